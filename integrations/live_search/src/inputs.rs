//! What all processes of a run have in common.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::packages::Packages;

/// The name of the set of weights.
pub(crate) const SET: &str = "encoder";
/// The tensor in each version that the trainer computed with exactly its weights.
pub(crate) const PROBE: &str = "probe";
/// The text of which the probe is the vector.
pub(crate) const PROBE_TEXT: &str = "a small program that finds files by what they contain";

/// The same for all processes of a run.
#[derive(Debug, Clone, clap::Args)]
pub struct Inputs {
    /// Folder with config.json, tokenizer.json and model.safetensors of a sentence encoder.
    #[arg(long, value_name = "FOLDER")]
    pub model: PathBuf,
    /// Descriptions of packages, in the format of APT's Translation-en.
    #[arg(long, value_name = "FILE")]
    pub descriptions: PathBuf,
    /// Folder for the checkpoint and for what is computed once.
    #[arg(long, value_name = "FOLDER")]
    pub work: PathBuf,
    /// Packages that are trained with.
    #[arg(long = "train", default_value_t = 3000, value_name = "COUNT")]
    pub trained: usize,
    /// Further packages, whose synopses are the queries that measure.
    #[arg(long, default_value_t = 500, value_name = "COUNT")]
    pub held_out: usize,
}

impl Inputs {
    /// The packages of the run.
    ///
    /// # Errors
    /// As [`Packages::read`].
    pub fn packages(&self) -> Result<Packages> {
        Packages::read(&self.descriptions, self.trained, self.held_out)
    }

    /// Where the trainer leaves its state.
    pub fn checkpoint(&self) -> PathBuf {
        self.work.join("checkpoint.safetensors")
    }

    /// As arguments of a trainer or a service that is tied to this process.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let named = [
            ("--model", path(&self.model)),
            ("--descriptions", path(&self.descriptions)),
            ("--work", path(&self.work)),
            ("--train", self.trained.to_string()),
            ("--held-out", self.held_out.to_string()),
        ];
        let named = named.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        named.chain(["--tied".to_owned()]).collect()
    }
}
