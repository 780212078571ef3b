//! A sentence encoder in two parts: the lower one stays as it was trained before, and the upper one is tuned.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde::{Deserialize, Serialize};

use crate::{
    bert::{self, Layers},
    table::{self, Table},
    tokens::Batch,
};

/// What to do if a file of the model is missing.
pub(crate) const REMEDY: &str = "--model is a folder with config.json, tokenizer.json and model.safetensors of a sentence encoder; \
                                 integrations/live_search/run fetches one";

/// The kind of an encoder, and its sizes: what this program reads of `config.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "model_type", rename_all = "lowercase")]
pub enum Config {
    /// Layers with attention.
    Bert(bert::Sizes),
    /// A row for each token.
    Table(table::Sizes),
}

impl Config {
    /// Of `config.json` in the folder of the model.
    ///
    /// # Errors
    /// If it is missing, or says what cannot be; the remedy is in the text.
    pub fn load(model: &Path) -> Result<Self> {
        let path = model.join("config.json");
        let context = || format!("{}: {REMEDY}", path.display());
        let config =
            serde_json::from_str(&fs::read_to_string(&path).with_context(context)?).with_context(context)?;
        if let Self::Bert(sizes) = &config {
            let (layers, heads) = (sizes.num_hidden_layers, sizes.num_attention_heads);
            ensure!(
                layers > 0 && heads > 0 && sizes.hidden_size.is_multiple_of(heads),
                "{}: num_hidden_layers is {layers}, and num_attention_heads {heads}: both are 1 or more, and the latter \
                 divides hidden_size, {}",
                path.display(),
                sizes.hidden_size
            );
        }
        Ok(config)
    }

    /// What the names of the upper part's variables begin with: those that are tuned.
    pub fn tuned_prefix(&self) -> String {
        match self {
            Self::Bert(sizes) => format!("encoder.layer.{}.", sizes.num_hidden_layers.saturating_sub(1)),
            Self::Table(_) => table::MATRIX.to_owned(),
        }
    }

    /// Whether a model's file need not have this variable, because it begins with zeros.
    pub(crate) fn begins_with_zeros(&self, variable: &str) -> bool {
        matches!(self, Self::Table(_)) && variable.starts_with(table::MATRIX)
    }
}

/// An encoder.
#[derive(Debug)]
pub struct Encoder {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Bert(Box<Layers>),
    Table(Table),
}

impl Encoder {
    /// An encoder of these variables. If they change, so does the encoder.
    ///
    /// # Errors
    /// If a variable has another shape.
    pub fn new(config: &Config, map: &VarMap) -> Result<Self> {
        let variables = VarBuilder::from_varmap(map, DType::F32, &Device::Cpu);
        let kind = match config {
            Config::Bert(sizes) => Kind::Bert(Box::new(Layers::new(sizes, &variables)?)),
            Config::Table(sizes) => Kind::Table(Table::new(sizes, &variables)?),
        };
        Ok(Self { kind })
    }

    /// `[texts, width]`: vectors of length 1, whose product says how near two texts are.
    ///
    /// # Errors
    /// If a text is longer than the model has positions for.
    pub fn embed(&self, batch: &Batch) -> Result<Tensor> {
        self.upper(&self.lower(batch)?, &batch.mask)
    }

    /// `[texts, length, width]`: what the upper part gets. Of the same texts it is always the same.
    ///
    /// # Errors
    /// As [`Encoder::embed`].
    pub fn lower(&self, batch: &Batch) -> Result<Tensor> {
        match &self.kind {
            Kind::Bert(layers) => layers.below_last(batch),
            Kind::Table(table) => table.rows(batch),
        }
    }

    /// The vectors, of what [`lower`](Self::lower) returned.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn upper(&self, hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let hidden = match &self.kind {
            Kind::Bert(layers) => layers.last(hidden, mask)?,
            Kind::Table(table) => table.changed(hidden)?,
        };
        // The sum instead of the mean: the length is made 1 in any case.
        let sum = hidden.broadcast_mul(&mask.unsqueeze(D::Minus1)?)?.sum(1)?;
        let length = (sum.sqr()?.sum_keepdim(D::Minus1)? + 1e-12)?.sqrt()?;
        Ok(sum.broadcast_div(&length)?)
    }
}
