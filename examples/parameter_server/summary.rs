//! What is printed at the end.

use std::{collections::BTreeSet, fmt, time::Duration};

use indicatif::{BinaryBytes, HumanCount};

use crate::report::Report;

/// What a worker moved, by the counters of its fabric.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) transport: String,
}

impl Traffic {
    /// The report with which a worker ends.
    pub(crate) fn to_report(&self) -> Report {
        Report::of("sent", self.sent).with("received", self.received).with("transport", &self.transport)
    }

    /// The traffic in a report, if it is such a one.
    pub(crate) fn from_report(report: &Report) -> Option<Self> {
        let (sent, received) = (report.value("sent")?, report.value("received")?);
        Some(Self { sent, received, transport: report.value("transport")? })
    }
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) accuracy: f64,
    pub(crate) accuracy_alone: f64,
    pub(crate) held_out: usize,
    pub(crate) steps: usize,
    pub(crate) elapsed: Duration,
    pub(crate) parameter_bytes: usize,
    pub(crate) traffic: Vec<Traffic>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held_out, steps, .. } = self;
        let seconds = self.elapsed.as_secs_f64();
        let moved: u64 = self.traffic.iter().map(|traffic| traffic.sent + traffic.received).sum();
        let transports: BTreeSet<&str> =
            self.traffic.iter().map(|traffic| traffic.transport.as_str()).collect();
        let transports: Vec<&str> = transports.into_iter().collect();
        writeln!(f, "accuracy     {:.1} % of {held_out} held-out digits", self.accuracy * 100.0)?;
        writeln!(f, "one process  {:.1} %", self.accuracy_alone * 100.0)?;
        writeln!(
            f,
            "steps/s      {:.0} ({steps} steps in {seconds:.1} s)",
            *steps as f64 / seconds.max(1e-9)
        )?;
        writeln!(
            f,
            "bytes moved  {} ({}; parameters are {} bytes)",
            HumanCount(moved),
            BinaryBytes(moved),
            HumanCount(self.parameter_bytes as u64)
        )?;
        write!(f, "transport    {}", transports.join(" and "))
    }
}
