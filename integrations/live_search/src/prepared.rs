//! What is computed once, with the weights as they were trained before: the vectors of all documents, and of the queries that
//! are trained with what the upper part gets. Neither changes while the upper part is tuned for queries.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use candle_core::{Device, Tensor};

use crate::{
    packages::{Packages, hash},
    tokens::Tokens,
    tunable::Tunable,
};

/// The longest document, in tokens; the rest of its text is not read.
pub const DOCUMENT_TOKENS: usize = 32;
/// The longest query, in tokens.
pub const QUERY_TOKENS: usize = 24;
/// Texts that are encoded together.
const TOGETHER: usize = 32;

/// The tensors, in a file beside the checkpoint.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// `[packages, width]`: the vectors of the documents, in the order of [`Packages::all`].
    pub documents: Tensor,
    /// `[packages for training, length, width]`: what the upper part gets of the synopses.
    pub hidden: Tensor,
    /// `[packages for training, length]`: 1.0 for each token of a synopsis.
    pub mask: Tensor,
}

impl Prepared {
    /// Reads the file of these packages and this model, or computes and writes it; `progress` gets the part that is done.
    ///
    /// # Errors
    /// If the model does not fit, or the file cannot be written.
    pub fn read_or_compute(
        work: &Path,
        model: &Path,
        packages: &Packages,
        progress: impl FnMut(f64),
    ) -> Result<Self> {
        let path = file_of(work, model, packages)?;
        if !path.exists() {
            compute(model, packages, progress)?.write(&path)?;
        }
        Self::read(&path)
    }

    /// Reads the file that [`read_or_compute`](Self::read_or_compute) has written.
    fn read(path: &Path) -> Result<Self> {
        let context = || format!("{}: delete it, so that it is computed again", path.display());
        let mut tensors = candle_core::safetensors::load(path, &Device::Cpu).with_context(context)?;
        let mut take = |name: &str| tensors.remove(name).with_context(context);
        Ok(Self { documents: take("documents")?, hidden: take("hidden")?, mask: take("mask")? })
    }

    fn write(&self, path: &Path) -> Result<()> {
        let tensors = [("documents", &self.documents), ("hidden", &self.hidden), ("mask", &self.mask)];
        write_whole(path, &tensors.map(|(name, tensor)| (name, tensor.clone())).into())
    }
}

/// Writes a file of tensors that has its name only once it is complete.
pub(crate) fn write_whole(path: &Path, tensors: &HashMap<&str, Tensor>) -> Result<()> {
    // Two processes that are started at the same time write the same file.
    let new = path.with_extension(format!("new.{}", std::process::id()));
    let context = || format!("writing {}", path.display());
    candle_core::safetensors::save(tensors, &new).with_context(context)?;
    fs::rename(&new, path).with_context(context)
}

/// Its name says what it was computed of.
fn file_of(work: &Path, model: &Path, packages: &Packages) -> Result<PathBuf> {
    fs::create_dir_all(work).with_context(|| format!("--work {}", work.display()))?;
    let weights = model.join("model.safetensors");
    let bytes = fs::metadata(&weights)
        .with_context(|| format!("{}: {}", weights.display(), crate::encoder::REMEDY))?
        .len();
    let texts = packages.all.iter().map(|package| format!("{}\n{}\n", package.synopsis, package.description));
    let made_of = format!(
        "{bytes} {DOCUMENT_TOKENS} {QUERY_TOKENS} {}\n{}",
        packages.trained,
        texts.collect::<String>()
    );
    Ok(work.join(format!("prepared-{:016x}.safetensors", hash(made_of.as_bytes()))))
}

fn compute(model: &Path, packages: &Packages, mut progress: impl FnMut(f64)) -> Result<Prepared> {
    let encoder = Tunable::load(model)?.encoder;
    let (documents, queries) = (packages.all.chunks(TOGETHER), packages.for_training().chunks(TOGETHER));
    let parts = (documents.len() + queries.len()) as f64;
    let mut done = 0.0;
    let mut one_more = || {
        done += 1.0;
        progress(done / parts);
    };
    let tokens = Tokens::load(model, DOCUMENT_TOKENS)?;
    let mut vectors = Vec::new();
    for part in documents {
        let texts: Vec<&str> = part.iter().map(|package| &*package.description).collect();
        vectors.push(encoder.embed(&tokens.batch(&texts)?)?.detach());
        one_more();
    }
    let tokens = Tokens::load(model, QUERY_TOKENS)?;
    let (mut hidden, mut mask) = (Vec::new(), Vec::new());
    for part in queries {
        let texts: Vec<&str> = part.iter().map(|package| &*package.synopsis).collect();
        let batch = tokens.batch(&texts)?;
        // All parts are made as long as a query can be, so that they are one tensor.
        let absent = QUERY_TOKENS - batch.mask.dim(1)?;
        hidden.push(encoder.lower(&batch)?.detach().pad_with_zeros(1, 0, absent)?);
        mask.push(batch.mask.pad_with_zeros(1, 0, absent)?);
        one_more();
    }
    let documents = Tensor::cat(&vectors, 0)?;
    Ok(Prepared { documents, hidden: Tensor::cat(&hidden, 0)?, mask: Tensor::cat(&mask, 0)? })
}
