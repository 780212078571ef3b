//! An encoder that is a table: a row for each token. The rows stay as they were trained before; a square matrix after them is tuned.

use anyhow::Result;
use candle_core::{Module as _, Tensor};
use candle_nn::{Embedding, Init, Linear, VarBuilder, embedding};
use serde::{Deserialize, Serialize};

use crate::tokens::Batch;

/// What the names of the matrix's variables begin with.
pub(crate) const MATRIX: &str = "matrix.";

/// The sizes of a table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sizes {
    /// Numbers of each token.
    pub hidden_size: usize,
    /// Tokens.
    pub vocab_size: usize,
}

/// The encoder.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Embedding,
    /// It is added to what it gets, and begins with zeros: so an untrained one changes nothing.
    matrix: Linear,
}

impl Table {
    pub(crate) fn new(sizes: &Sizes, variables: &VarBuilder<'_>) -> Result<Self> {
        let width = sizes.hidden_size;
        let matrix =
            variables.get_with_hints((width, width), &format!("{MATRIX}weight"), Init::Const(0.0))?;
        let rows = embedding(sizes.vocab_size, width, variables.pp("embedding"))?;
        Ok(Self { rows, matrix: Linear::new(matrix, None) })
    }

    /// `[texts, length, width]`: the rows of the tokens.
    pub(crate) fn rows(&self, batch: &Batch) -> Result<Tensor> {
        Ok(self.rows.forward(&batch.ids)?)
    }

    /// `[texts, length, width]`, of [`rows`](Self::rows).
    pub(crate) fn changed(&self, rows: &Tensor) -> Result<Tensor> {
        Ok((rows + self.matrix.forward(rows)?)?)
    }
}
