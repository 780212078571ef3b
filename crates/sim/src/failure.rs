//! The findings of a run, and their report.

use std::{collections::BTreeMap, fmt, time::Duration};

use crate::trace::{Event, line};

/// A broken promise (`scripts/promises.txt`), or a broken rule of the simulator itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A process or peer accessed bytes that it does not own.
    #[error("S1 memory: {0}")]
    Memory(String),
    /// A queue held more than it has room for, or was used before it was connected.
    #[error("queue: {0}")]
    Overrun(String),
    /// A receive that ended with `Ok` does not hold the bytes that were sent.
    #[error("S2 data: {0}")]
    Data(String),
    /// An operation did not end, or not exactly once.
    #[error("S3 once: {0}")]
    Operation(String),
    /// An immediate found no posted receive: credits are wrong.
    #[error("receiver not ready: {0}")]
    ReceiverNotReady(String),
    /// A peer broke the fabric contract, or its access was refused.
    #[error("refused access: {0}")]
    Refused(String),
    /// An operation took longer than its bound.
    #[error("{promise} late: {what}")]
    Late {
        /// The promise: L1, L2 or L3.
        promise: &'static str,
        /// The late operation, and by how much.
        what: String,
    },
    /// No event is possible any more, and an operation is unfinished.
    #[error("stuck: {0}")]
    Stuck(String),
    /// A deadline or a lost peer that no injected fault explains.
    #[error("unexplained: {0}")]
    Unexplained(String),
    /// A task panicked.
    #[error("panic: {0}")]
    Panicked(String),
    /// More events than the run may have.
    #[error("endless: {0}")]
    Endless(String),
    /// A scenario's own finding.
    #[error("{0}")]
    Scenario(String),
}

impl Violation {
    /// Its kind, without details of one run: the promise where there is one.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Memory(_) => "S1 memory",
            Self::Overrun(_) => "queue",
            Self::Data(_) => "S2 data",
            Self::Operation(_) => "S3 once",
            Self::ReceiverNotReady(_) => "receiver not ready",
            Self::Refused(_) => "refused access",
            Self::Late { promise, .. } => promise,
            Self::Stuck(_) => "stuck",
            Self::Unexplained(_) => "unexplained",
            Self::Panicked(_) => "panic",
            Self::Endless(_) => "endless",
            Self::Scenario(_) => "scenario",
        }
    }
}

/// A run with a finding: enough to read what happened and to run it again.
#[derive(Clone)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The finding.
    pub violation: Violation,
    /// Hash over all events.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Virtual time.
    pub at: Duration,
    /// The last events, oldest first.
    pub tail: Vec<(Duration, Event)>,
    /// The knobs that the seed drew.
    pub swarm: String,
    /// The phase it was in.
    pub phase: &'static str,
    /// What it injected, if the scenario provides it.
    pub plan: String,
    /// The command that runs it again.
    pub replay: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.violation)?;
        writeln!(f, "  seed {}, event hash {:016x}, {} events", self.seed, self.hash, self.events)?;
        writeln!(f, "  {} phase; plan: {}", self.phase, self.plan)?;
        writeln!(f, "  {}", self.swarm)?;
        let first = self.events.saturating_sub(self.tail.len() as u64);
        for (number, (at, event)) in self.tail.iter().enumerate() {
            line(f, first + number as u64, *at, event)?;
        }
        write!(f, "  replay: {}", self.replay)
    }
}

impl fmt::Debug for Failure {
    /// As `Display`, so that `unwrap` in a test prints the report.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Failure {}

/// A run without findings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The seed.
    pub seed: u64,
    /// Hash over all events: equal for equal seeds.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Virtual time.
    pub at: Duration,
    /// Operations that succeeded.
    pub operations_done: u64,
    /// Operations that failed, or that their own side cancelled.
    pub operations_failed: u64,
    /// Nodes that crashed.
    pub crashes: u64,
    /// Grants of living nodes that were leaked.
    pub leaks: u64,
    /// Rare branches by name, and how often they were taken.
    pub marks: BTreeMap<&'static str, u64>,
}
