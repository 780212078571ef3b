//! Faults to show what becomes of them: a process that is killed at a step, a worker that is slow.

use std::{fmt, str::FromStr, time::Duration};

use tensorwire::ClusterSpec;

/// Which process: `ps:0`, `worker:1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RoleName {
    Server(usize),
    Worker(usize),
}

impl RoleName {
    /// The job in the cluster.
    pub(crate) const fn job(self) -> &'static str {
        match self {
            Self::Server(_) => "ps",
            Self::Worker(_) => "worker",
        }
    }

    /// The number within the job.
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Server(index) | Self::Worker(index) => index,
        }
    }

    /// The worker's name, as tensorwire knows it: `/job:ps/replica:0/task:0`.
    pub(crate) fn worker_name(self) -> String {
        ClusterSpec::worker_name(self.job(), self.index() as u32)
    }
}

/// `ROLE@VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault<T> {
    pub(crate) role: RoleName,
    pub(crate) value: T,
}

/// Kill when this step has been reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtStep(pub(crate) u64);

/// Be slower by this in each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delay(pub(crate) Duration);

impl fmt::Display for RoleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.job(), self.index())
    }
}

impl FromStr for RoleName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once(':').and_then(|(job, index)| Some((job, index.parse().ok()?)));
        match parsed {
            Some(("ps", index)) => Ok(Self::Server(index)),
            Some(("worker", index)) => Ok(Self::Worker(index)),
            _ => Err(format!("`{text}` names no process: write ps:INDEX or worker:INDEX")),
        }
    }
}

impl FromStr for AtStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let step = text.strip_prefix("step").and_then(|step| step.parse().ok());
        step.map(Self).ok_or_else(|| format!("`{text}` is no step: write stepN, for instance step120"))
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let delay = text.strip_suffix("ms").and_then(|delay| delay.parse().ok()).map(Duration::from_millis);
        delay.map(Self).ok_or_else(|| format!("`{text}` is no delay: write Nms, for instance 20ms"))
    }
}

impl<T: FromStr<Err = String>> FromStr for Fault<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (role, value) = text
            .split_once('@')
            .ok_or_else(|| "there is no `@`: write for instance worker:1@step120".to_owned())?;
        Ok(Self { role: role.parse()?, value: value.parse()? })
    }
}
