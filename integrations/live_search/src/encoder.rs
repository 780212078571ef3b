//! A sentence encoder of the kind of BERT, in two parts: what is below the last layer stays as it was trained before; the last
//! layer is tuned.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use candle_core::{D, DType, Device, Module as _, Tensor};
use candle_nn::{
    Embedding, Init, Linear, VarBuilder, VarMap, embedding, linear,
    ops::{layer_norm_slow, softmax},
};
use serde::{Deserialize, Serialize};

use crate::tokens::Batch;

/// What to do if a file of the model is missing.
pub(crate) const REMEDY: &str = "--model is a folder with config.json, tokenizer.json and model.safetensors of a sentence encoder; \
                                 integrations/live_search/run fetches one";

/// The sizes of an encoder: what this program reads of `config.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    /// Numbers of each token in all layers.
    pub hidden_size: usize,
    /// Numbers between the two halves of a layer.
    pub intermediate_size: usize,
    /// What is added to variances.
    pub layer_norm_eps: f32,
    /// The longest text, in tokens.
    pub max_position_embeddings: usize,
    /// Parts of attention; they divide `hidden_size`.
    pub num_attention_heads: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Kinds of texts in one input.
    pub type_vocab_size: usize,
    /// Tokens.
    pub vocab_size: usize,
}

impl Config {
    /// Of `config.json` in the folder of the model.
    ///
    /// # Errors
    /// If it is missing, or says what cannot be; the remedy is in the text.
    pub fn load(model: &Path) -> Result<Self> {
        let path = model.join("config.json");
        let context = || format!("{}: {REMEDY}", path.display());
        let config: Self =
            serde_json::from_str(&fs::read_to_string(&path).with_context(context)?).with_context(context)?;
        let (layers, heads) = (config.num_hidden_layers, config.num_attention_heads);
        ensure!(
            layers > 0 && heads > 0 && config.hidden_size.is_multiple_of(heads),
            "{}: num_hidden_layers is {layers}, and num_attention_heads {heads}: both are 1 or more, and the latter \
             divides hidden_size, {}",
            path.display(),
            config.hidden_size
        );
        Ok(config)
    }

    /// What the names of the last layer's variables begin with: those that are tuned.
    pub fn tuned_prefix(&self) -> String {
        format!("encoder.layer.{}.", self.num_hidden_layers.saturating_sub(1))
    }
}

/// An encoder.
#[derive(Debug)]
pub struct Encoder {
    words: Embedding,
    positions: Embedding,
    kinds: Embedding,
    norm: Norm,
    below: Vec<Layer>,
    last: Layer,
}

impl Encoder {
    /// An encoder of these variables. If they change, so does the encoder.
    ///
    /// # Errors
    /// If a variable has another shape.
    pub fn new(config: &Config, map: &VarMap) -> Result<Self> {
        let variables = VarBuilder::from_varmap(map, DType::F32, &Device::Cpu);
        let (root, layers) = (variables.pp("embeddings"), variables.pp("encoder.layer"));
        let (width, last) = (config.hidden_size, config.num_hidden_layers.saturating_sub(1));
        let below = (0..last).map(|number| Layer::new(config, &layers.pp(number))).collect::<Result<_>>()?;
        Ok(Self {
            words: embedding(config.vocab_size, width, root.pp("word_embeddings"))?,
            positions: embedding(config.max_position_embeddings, width, root.pp("position_embeddings"))?,
            kinds: embedding(config.type_vocab_size, width, root.pp("token_type_embeddings"))?,
            norm: Norm::new(config, &root.pp("LayerNorm"))?,
            below,
            last: Layer::new(config, &layers.pp(last))?,
        })
    }

    /// `[texts, width]`: vectors of length 1, whose product says how near two texts are.
    ///
    /// # Errors
    /// If a text is longer than the model has positions for.
    pub fn embed(&self, batch: &Batch) -> Result<Tensor> {
        self.from_last_layer(&self.below_last_layer(batch)?, &batch.mask)
    }

    /// `[texts, length, width]`: what the last layer gets. Of the same texts it is always the same.
    ///
    /// # Errors
    /// As [`Encoder::embed`].
    pub fn below_last_layer(&self, batch: &Batch) -> Result<Tensor> {
        let (_, length) = batch.ids.dims2()?;
        let positions = Tensor::arange(0, length as u32, &Device::Cpu)?;
        let kind = self.kinds.forward(&Tensor::new(&[0u32], &Device::Cpu)?)?;
        let places = self.positions.forward(&positions)?.broadcast_add(&kind)?;
        let mut hidden = self.norm.forward(&self.words.forward(&batch.ids)?.broadcast_add(&places)?)?;
        for layer in &self.below {
            hidden = layer.forward(&hidden, &batch.mask)?;
        }
        Ok(hidden)
    }

    /// The vectors, of what [`below_last_layer`](Self::below_last_layer) returned.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn from_last_layer(&self, hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let hidden = self.last.forward(hidden, mask)?;
        // The sum instead of the mean: the length is made 1 in any case.
        let sum = hidden.broadcast_mul(&mask.unsqueeze(D::Minus1)?)?.sum(1)?;
        let length = (sum.sqr()?.sum_keepdim(D::Minus1)? + 1e-12)?.sqrt()?;
        Ok(sum.broadcast_div(&length)?)
    }
}

#[derive(Debug)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attended: Linear,
    attended_norm: Norm,
    wide: Linear,
    narrow: Linear,
    norm: Norm,
    heads: usize,
}

impl Layer {
    fn new(config: &Config, variables: &VarBuilder<'_>) -> Result<Self> {
        let (width, wide) = (config.hidden_size, config.intermediate_size);
        let attention = variables.pp("attention");
        let projection = |name| linear(width, width, attention.pp("self").pp(name));
        Ok(Self {
            query: projection("query")?,
            key: projection("key")?,
            value: projection("value")?,
            attended: linear(width, width, attention.pp("output.dense"))?,
            attended_norm: Norm::new(config, &attention.pp("output.LayerNorm"))?,
            wide: linear(width, wide, variables.pp("intermediate.dense"))?,
            narrow: linear(wide, width, variables.pp("output.dense"))?,
            norm: Norm::new(config, &variables.pp("output.LayerNorm"))?,
            heads: config.num_attention_heads,
        })
    }

    fn forward(&self, hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let attended = self.attended.forward(&self.attention(hidden, mask)?)?;
        let hidden = self.attended_norm.forward(&(hidden + attended)?)?;
        let changed = self.narrow.forward(&self.wide.forward(&hidden)?.gelu()?)?;
        self.norm.forward(&(hidden + changed)?)
    }

    fn attention(&self, hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (texts, length, width) = hidden.dims3()?;
        let part = width / self.heads;
        let by_head = |projection: &Linear| -> Result<Tensor> {
            let all = projection.forward(hidden)?.reshape((texts, length, self.heads, part))?;
            Ok(all.transpose(1, 2)?.contiguous()?)
        };
        let (query, key, value) = (by_head(&self.query)?, by_head(&self.key)?, by_head(&self.value)?);
        let scores = (query.matmul(&key.transpose(2, 3)?)? / (part as f64).sqrt())?;
        // What is after the end of a text counts nothing.
        let absent = mask.affine(1e9, -1e9)?.reshape((texts, 1, 1, length))?;
        let weights = softmax(&scores.broadcast_add(&absent)?, D::Minus1)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?.contiguous()?;
        Ok(mixed.reshape((texts, length, width))?)
    }
}

/// Layer normalisation whose gradient candle has; its fused one has none.
#[derive(Debug)]
struct Norm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl Norm {
    fn new(config: &Config, variables: &VarBuilder<'_>) -> Result<Self> {
        let width = config.hidden_size;
        Ok(Self {
            weight: variables.get_with_hints(width, "weight", Init::Const(1.0))?,
            bias: variables.get(width, "bias")?,
            eps: config.layer_norm_eps,
        })
    }

    fn forward(&self, values: &Tensor) -> Result<Tensor> {
        Ok(layer_norm_slow(values, &self.weight, &self.bias, self.eps)?)
    }
}
