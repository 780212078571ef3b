//! The model of a service: it takes versions between two queries, and proves that it never has parts of two.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use tensorwire::sets::Snapshot;
use tensorwire_candle::Variables;

use crate::{
    encoder::Encoder,
    inputs::{PROBE, PROBE_TEXT},
    tokens::{Batch, Tokens},
    tunable::Tunable,
};

/// Queries between two comparisons with the probe, beside the one after each version.
const QUERIES_PER_CHECK: u64 = 100;

/// An answer to a query.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Answer {
    /// The version of the weights that it was computed with.
    pub version: u64,
    /// The service.
    pub service: String,
    /// The nearest packages, best first.
    pub packages: Vec<Found>,
}

/// A package that was found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// 1 is the same direction as the query's.
    pub score: f32,
}

/// Comparisons of the model with the probe of its version.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Checks {
    /// How many there were.
    pub made: u64,
    /// How many found other bits than the trainer's.
    pub differences: u64,
}

/// The documents, of which queries find some.
#[derive(Debug, Clone)]
pub struct Index {
    names: Arc<[String]>,
    /// `[width, documents]`
    documents: Tensor,
}

impl Index {
    /// Of the names and the vectors `[documents, width]`.
    ///
    /// # Errors
    /// If their numbers differ.
    pub fn new(names: impl IntoIterator<Item = String>, documents: &Tensor) -> Result<Self> {
        let names: Arc<[String]> = names.into_iter().collect();
        let vectors = documents.dim(0)?;
        ensure!(names.len() == vectors, "there are {} packages and {vectors} vectors", names.len());
        Ok(Self { names, documents: documents.t()?.contiguous()? })
    }

    fn nearest(&self, query: &Tensor, count: usize) -> Result<Vec<Found>> {
        let scores: Vec<f32> = query.matmul(&self.documents)?.flatten_all()?.to_vec1()?;
        let mut found: Vec<(&String, f32)> = self.names.iter().zip(scores).collect();
        found.sort_by(|one, other| other.1.total_cmp(&one.1));
        found.truncate(count);
        Ok(found.into_iter().map(|(name, score)| Found { name: name.clone(), score }).collect())
    }
}

/// The encoder with the weights of a version, and the documents.
pub struct Model {
    encoder: Arc<Encoder>,
    variables: Variables,
    tokens: Tokens,
    index: Index,
    probe: Batch,
    /// What the trainer computed of the probe with the weights of this version.
    expected: Vec<f32>,
    checks: Checks,
    queries: u64,
}

impl Model {
    /// A model without a version: [`apply`](Self::apply) comes before the first query.
    ///
    /// # Errors
    /// If the tokenizer refuses the probe.
    pub fn new(tunable: Tunable, tokens: Tokens, index: Index) -> Result<Self> {
        let probe = tokens.batch(&[PROBE_TEXT])?;
        let (encoder, variables) = (tunable.encoder, Variables::new(tunable.variables));
        Ok(Self {
            encoder,
            variables,
            tokens,
            index,
            probe,
            expected: vec![],
            checks: Checks::default(),
            queries: 0,
        })
    }

    /// Copies a version into the encoder, and compares with its probe.
    ///
    /// # Errors
    /// If the version is of another model: then the one before stays.
    pub fn apply(&mut self, version: &Snapshot) -> Result<()> {
        let probe = version
            .get(PROBE)
            .with_context(|| format!("version {} has no tensor `{PROBE}`", version.version()))?;
        let expected = probe.values::<f32>()?;
        self.variables.apply(version)?;
        self.expected = expected;
        self.check()
    }

    /// Computes the probe and compares all bits with the trainer's.
    fn check(&mut self) -> Result<()> {
        let computed: Vec<f32> = self.encoder.embed(&self.probe)?.flatten_all()?.to_vec1()?;
        self.checks.made += 1;
        self.checks.differences += u64::from(!same_bits(&computed, &self.expected));
        Ok(())
    }

    /// Finds the `count` packages whose descriptions are nearest to `text`. The answer names `service`.
    ///
    /// # Errors
    /// If the model has no version yet.
    pub fn search(&mut self, service: &str, text: &str, count: usize) -> Result<Answer> {
        let version = self.variables.version().context("there is no version of the weights yet")?;
        self.queries += 1;
        if self.queries.is_multiple_of(QUERIES_PER_CHECK) {
            self.check()?;
        }
        let query = self.encoder.embed(&self.tokens.batch(&[text])?)?;
        Ok(Answer { version, service: service.to_owned(), packages: self.index.nearest(&query, count)? })
    }

    /// The comparisons until now.
    pub fn checks(&self) -> Checks {
        self.checks
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Model").field("variables", &self.variables).finish_non_exhaustive()
    }
}

fn same_bits(one: &[f32], other: &[f32]) -> bool {
    one.iter().map(|value| value.to_bits()).eq(other.iter().map(|value| value.to_bits()))
}
