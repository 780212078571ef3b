//! An encoder of the kind of BERT, in two parts: what is below the last layer stays as it was trained before; the last layer is tuned.

use anyhow::Result;
use candle_core::{D, Device, Module as _, Tensor};
use candle_nn::{
    Embedding, Init, Linear, VarBuilder, embedding, linear,
    ops::{layer_norm_slow, softmax},
};
use serde::{Deserialize, Serialize};

use crate::tokens::Batch;

/// The sizes of an encoder: what this program reads of its `config.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sizes {
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

/// The encoder.
#[derive(Debug)]
pub(crate) struct Layers {
    words: Embedding,
    positions: Embedding,
    kinds: Embedding,
    norm: Norm,
    below: Vec<Layer>,
    last: Layer,
}

impl Layers {
    pub(crate) fn new(sizes: &Sizes, variables: &VarBuilder<'_>) -> Result<Self> {
        let (root, layers) = (variables.pp("embeddings"), variables.pp("encoder.layer"));
        let (width, last) = (sizes.hidden_size, sizes.num_hidden_layers.saturating_sub(1));
        let below = (0..last).map(|number| Layer::new(sizes, &layers.pp(number))).collect::<Result<_>>()?;
        Ok(Self {
            words: embedding(sizes.vocab_size, width, root.pp("word_embeddings"))?,
            positions: embedding(sizes.max_position_embeddings, width, root.pp("position_embeddings"))?,
            kinds: embedding(sizes.type_vocab_size, width, root.pp("token_type_embeddings"))?,
            norm: Norm::new(sizes, &root.pp("LayerNorm"))?,
            below,
            last: Layer::new(sizes, &layers.pp(last))?,
        })
    }

    /// `[texts, length, width]`: what the last layer gets.
    pub(crate) fn below_last(&self, batch: &Batch) -> Result<Tensor> {
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

    /// `[texts, length, width]`, of what [`below_last`](Self::below_last) returned.
    pub(crate) fn last(&self, hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
        self.last.forward(hidden, mask)
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
    fn new(sizes: &Sizes, variables: &VarBuilder<'_>) -> Result<Self> {
        let (width, wide) = (sizes.hidden_size, sizes.intermediate_size);
        let attention = variables.pp("attention");
        let projection = |name| linear(width, width, attention.pp("self").pp(name));
        Ok(Self {
            query: projection("query")?,
            key: projection("key")?,
            value: projection("value")?,
            attended: linear(width, width, attention.pp("output.dense"))?,
            attended_norm: Norm::new(sizes, &attention.pp("output.LayerNorm"))?,
            wide: linear(width, wide, variables.pp("intermediate.dense"))?,
            narrow: linear(wide, width, variables.pp("output.dense"))?,
            norm: Norm::new(sizes, &variables.pp("output.LayerNorm"))?,
            heads: sizes.num_attention_heads,
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
    fn new(sizes: &Sizes, variables: &VarBuilder<'_>) -> Result<Self> {
        let width = sizes.hidden_size;
        Ok(Self {
            weight: variables.get_with_hints(width, "weight", Init::Const(1.0))?,
            bias: variables.get(width, "bias")?,
            eps: sizes.layer_norm_eps,
        })
    }

    fn forward(&self, values: &Tensor) -> Result<Tensor> {
        Ok(layer_norm_slow(values, &self.weight, &self.bias, self.eps)?)
    }
}
