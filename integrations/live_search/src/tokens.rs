//! Texts as the numbers that the encoder reads.

use std::path::Path;

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Tensor};
use tokenizers::{PaddingParams, Tokenizer, TruncationParams};

/// Splits texts into tokens as the model was trained with.
#[derive(Debug, Clone)]
pub struct Tokens {
    tokenizer: Tokenizer,
}

/// Texts that are encoded together.
#[derive(Debug, Clone)]
pub struct Batch {
    /// `[texts, length]`: the numbers of the tokens, 0 after the end of a text.
    pub ids: Tensor,
    /// `[texts, length]`: 1.0 for each token, 0.0 after the end of a text.
    pub mask: Tensor,
}

impl Tokens {
    /// Of `tokenizer.json` in the folder of the model; texts are cut after `longest` tokens.
    ///
    /// # Errors
    /// If the file is missing or is no tokenizer.
    pub fn load(model: &Path, longest: usize) -> Result<Self> {
        let path = model.join("tokenizer.json");
        let mut tokenizer = Tokenizer::from_file(&path)
            .map_err(anyhow::Error::from_boxed)
            .with_context(|| format!("{}: {}", path.display(), crate::encoder::REMEDY))?;
        let truncation = TruncationParams { max_length: longest, ..TruncationParams::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(anyhow::Error::from_boxed)?;
        tokenizer.with_padding(Some(PaddingParams::default()));
        Ok(Self { tokenizer })
    }

    /// The tokens of `texts`, as long as the longest of them.
    ///
    /// # Errors
    /// If there is no text, or the tokenizer refuses one.
    pub fn batch(&self, texts: &[&str]) -> Result<Batch> {
        let encoded = self.tokenizer.encode_batch(texts.to_vec(), true).map_err(anyhow::Error::from_boxed)?;
        let length = encoded.first().map_or(0, |text| text.get_ids().len());
        let ids: Vec<u32> = encoded.iter().flat_map(|text| text.get_ids()).copied().collect();
        let mask: Vec<u32> = encoded.iter().flat_map(|text| text.get_attention_mask()).copied().collect();
        let shape = (texts.len(), length);
        Ok(Batch {
            ids: Tensor::from_vec(ids, shape, &Device::Cpu)?,
            mask: Tensor::from_vec(mask, shape, &Device::Cpu)?.to_dtype(DType::F32)?,
        })
    }
}
