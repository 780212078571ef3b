//! What is printed at the end.

use std::{collections::BTreeSet, fmt};

use indicatif::{BinaryBytes, HumanCount};
use tensorwire::Worker;
use tensorwire_examples::{model::Quality, training::train};

use crate::{
    options::{Mode, Settings},
    report::Report,
};

/// What a worker moved, by the counters of its fabrics.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) transport: String,
}

impl Traffic {
    /// What passed between `worker` and the servers.
    pub(crate) fn of(worker: &Worker) -> Self {
        let servers: Vec<_> =
            worker.peers().into_iter().filter(|peer| peer.name.starts_with("/job:ps")).collect();
        let transports = servers.iter().filter_map(|peer| peer.transport).map(|kind| kind.to_string());
        let transports: BTreeSet<String> = transports.collect();
        Self {
            sent: servers.iter().map(|peer| peer.fabric.bytes_sent).sum(),
            received: servers.iter().map(|peer| peer.fabric.bytes_received).sum(),
            transport: transports.into_iter().collect::<Vec<_>>().join("+"),
        }
    }

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

/// Prints what several workers moved.
pub(crate) fn print_traffic(traffic: &[&Traffic], parameter_bytes: u64) {
    let moved: u64 = traffic.iter().map(|traffic| traffic.sent + traffic.received).sum();
    let transports: BTreeSet<&str> = traffic.iter().map(|traffic| traffic.transport.as_str()).collect();
    println!(
        "bytes moved  {} ({}; parameters are {} bytes)",
        HumanCount(moved),
        BinaryBytes(moved),
        HumanCount(parameter_bytes)
    );
    println!("transport    {}", transports.into_iter().collect::<Vec<_>>().join(" and "));
}

/// What was learnt, beside what one process learns.
#[derive(Debug)]
pub(crate) struct Summary {
    mode: Mode,
    quality: Quality,
    alone: Quality,
    /// Between any parameter of this training and of the one process.
    largest_difference: f32,
    fingerprint: u64,
}

impl Summary {
    /// Measures `parameters`, and trains in this process to compare.
    pub(crate) fn of(settings: &Settings, parameters: &[Vec<f32>]) -> Self {
        Self::beside(settings, parameters, &train(&settings.alone(), |_| ()))
    }

    /// Measures `parameters`, and those that `alone` has trained.
    pub(crate) fn beside(settings: &Settings, parameters: &[Vec<f32>], alone: &[Vec<f32>]) -> Self {
        let mut model = settings.model.open(settings.flags.seed);
        let pairs = parameters.iter().flatten().zip(alone.iter().flatten());
        Self {
            mode: settings.mode,
            quality: model.quality(parameters),
            alone: model.quality(alone),
            largest_difference: pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max),
            fingerprint: fingerprint(parameters),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = match self.quality {
            Quality::Accuracy { .. } => "accuracy",
            _ => "result",
        };
        writeln!(f, "{label:<12} {}", self.quality)?;
        writeln!(f, "one process  {}", self.alone)?;
        match (self.mode, self.largest_difference) {
            (Mode::Sync { .. }, 0.0) => writeln!(f, "difference   none: equal bit for bit")?,
            (_, largest) => writeln!(f, "difference   {largest:.1e} at most, in any parameter")?,
        }
        write!(f, "fingerprint  {:016x}", self.fingerprint)
    }
}

/// Tells parameters apart that differ in a bit (FNV-1a).
fn fingerprint(parameters: &[Vec<f32>]) -> u64 {
    let bytes = parameters.iter().flatten().flat_map(|value| value.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
