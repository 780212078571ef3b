//! The flags as they are typed.

use std::{fmt::Display, path::PathBuf, str::FromStr};

use clap::{Parser, ValueEnum};
use tensorwire::FabricKind;
use tensorwire_examples::model::ModelKind;

use super::faults::{AtStep, Delay, Fault, RoleName};

/// Trains a model with parameter servers and workers, each a process of its own.
///
/// Without --job-name this program starts all of them on this host, waits, measures the result, and trains in one
/// process to compare. With it, it is one of them: start one for each entry of --ps-hosts and --worker-hosts, with the
/// same flags on every host. Flags may be written with `_` as well as with `-`.
#[derive(Debug, Clone, Parser)]
#[command(name = "parameter_server", max_term_width = 100)]
pub(crate) struct Flags {
    /// Be one process: a parameter server or a worker.
    #[arg(long, value_enum, help_heading = "One process of a cluster")]
    pub(crate) job_name: Option<Job>,
    /// Which entry of its host list this process is, from 0. Worker 0 is the chief, which keeps the checkpoint.
    #[arg(long, value_name = "N", value_parser = whole::<usize>, help_heading = "One process of a cluster")]
    pub(crate) task_index: Option<usize>,
    /// Where the servers listen: HOST:PORT, separated by commas.
    #[arg(long, value_name = "HOSTS", help_heading = "One process of a cluster")]
    pub(crate) ps_hosts: Option<String>,
    /// Where the workers listen: HOST:PORT, separated by commas.
    #[arg(long, value_name = "HOSTS", help_heading = "One process of a cluster")]
    pub(crate) worker_hosts: Option<String>,
    /// A secret that all processes share; needed as soon as one listens beyond loopback. Also by
    /// TENSORWIRE_SECRET_FILE.
    #[arg(long, value_name = "PATH", help_heading = "One process of a cluster")]
    pub(crate) secret_file: Option<PathBuf>,
    /// How many seconds a worker tries to reach a server that is not there before it gives up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = from_one, help_heading = "One process of a cluster")]
    pub(crate) patience: u64,

    /// How many workers to start [default: 2].
    #[arg(long, value_name = "N", value_parser = from_one, help_heading = "All processes")]
    pub(crate) workers: Option<u64>,
    /// How many servers to start [default: 1].
    #[arg(long, value_name = "N", value_parser = from_one, help_heading = "All processes")]
    pub(crate) servers: Option<u64>,
    /// Kill a process when a step has been reached, for instance worker:1@step120 or ps:0@step40; it is started again.
    /// May be given several times.
    #[arg(long, value_name = "ROLE@STEP", help_heading = "All processes")]
    pub(crate) kill: Vec<Fault<AtStep>>,
    /// Make a worker slow, for instance worker:1@20ms for each step. May be given several times.
    #[arg(long, value_name = "ROLE@DELAY", help_heading = "All processes")]
    pub(crate) slow: Vec<Fault<Delay>>,
    /// How often a process that was killed is started again, in all.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole::<u64>, help_heading = "All processes")]
    pub(crate) restarts: u64,

    /// What is trained: a network that reads handwritten digits, or the line y = w·x + b.
    #[arg(long, value_enum, default_value_t = ModelName::Mlp, help_heading = "Training")]
    pub(crate) model: ModelName,
    /// Synchronous training: each step is made from one gradient of each worker. Without it workers don't wait for
    /// each other.
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "0", default_missing_value = "1", value_parser = switch, help_heading = "Training")]
    pub(crate) issync: bool,
    /// Of the workers of a synchronous training, how many a step may go without: the slowest ones' gradients are
    /// dropped.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>, help_heading = "Training")]
    pub(crate) backup_workers: usize,
    /// In asynchronous training, how many steps a worker may be ahead of the slowest before it waits.
    #[arg(long, value_name = "STEPS", default_value_t = 8, value_parser = whole::<u64>, help_heading = "Training")]
    pub(crate) staleness: u64,
    /// How often the parameters are updated, in all [default: 2000 for mlp, 100000 for linear].
    #[arg(long, value_name = "N", value_parser = from_one, help_heading = "Training")]
    pub(crate) steps: Option<u64>,
    /// How far the parameters follow a gradient [default: 0.05 for mlp, 0.00003 for linear].
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, value_parser = rate, help_heading = "Training")]
    pub(crate) learning_rate: Option<f32>,
    /// The chief measures the model and prints the loss each time so many steps are done.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = from_one, help_heading = "Training")]
    pub(crate) steps_to_validate: u64,
    /// Fixes the first parameters and the order of the samples.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u64>, help_heading = "Training")]
    pub(crate) seed: u64,
    /// How tensors travel. `auto` takes shared memory on one host.
    #[arg(long, value_enum, default_value_t = Fabric::Auto, help_heading = "Training")]
    pub(crate) fabric: Fabric,
    /// Where the chief writes a safetensors checkpoint, and reads it when it starts. Without it the chief keeps the
    /// last one in memory, for a server that is started again.
    #[arg(long, value_name = "PATH", help_heading = "Training")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = from_one, help_heading = "Training")]
    pub(crate) checkpoint_steps: u64,

    /// Measure how fast parameters and gradients move, beside gRPC in the same run. Nothing is trained.
    #[arg(long, help_heading = "Bench")]
    pub(crate) bench: bool,
    /// Parameters to move, in tensors with the proportions of ResNet-50's.
    #[arg(long, value_name = "N", default_value_t = 25_557_032, value_parser = from_one, help_heading = "Bench")]
    pub(crate) parameters: u64,
    /// Rounds that are counted.
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = from_one, help_heading = "Bench")]
    pub(crate) rounds: u64,
    /// Print the result as JSON.
    #[arg(long, requires = "bench", help_heading = "Bench")]
    pub(crate) json: bool,

    /// Be a process of the bench.
    #[arg(long, hide = true)]
    pub(crate) bench_role: Option<RoleName>,
    /// Started by a launcher, and ends with it.
    #[arg(long, hide = true)]
    pub(crate) launched: bool,
    /// Report every so many steps to the launcher.
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) report_steps: u64,
    /// Milliseconds to be slower in each step.
    #[arg(long, hide = true, default_value_t = 0)]
    pub(crate) delay: u64,
}

/// The jobs of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Job {
    /// Holds parameters.
    Ps,
    /// Computes gradients.
    Worker,
}

/// [`ModelKind`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelName {
    /// 64 → 512 → 512 → 10, on handwritten digits.
    Mlp,
    /// Two scalars, one sample in each step.
    Linear,
}

impl ModelName {
    pub(crate) const fn kind(self) -> ModelKind {
        match self {
            Self::Mlp => ModelKind::Mlp,
            Self::Linear => ModelKind::Linear,
        }
    }
}

/// The fabrics that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fabric {
    /// The fastest that both ends have.
    Auto,
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA.
    Verbs,
    /// gRPC, the last fallback.
    Grpc,
}

impl Fabric {
    /// The one that is required; none for `auto`.
    pub(crate) const fn required(self) -> Option<FabricKind> {
        match self {
            Self::Auto => None,
            Self::Shm => Some(FabricKind::Shm),
            Self::Tcp => Some(FabricKind::Tcp),
            Self::Verbs => Some(FabricKind::Verbs),
            Self::Grpc => Some(FabricKind::Grpc),
        }
    }
}

/// Writes `_` in the names of flags as `-`, so that both spellings are understood.
pub(crate) fn with_dashes(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let dashed = |argument: String| match argument.strip_prefix("--") {
        Some(flag) => match flag.split_once('=') {
            Some((name, value)) => format!("--{}={value}", name.replace('_', "-")),
            None => format!("--{}", flag.replace('_', "-")),
        },
        None => argument,
    };
    arguments.map(dashed).collect()
}

fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "give a whole number from 0 on".to_owned())
}

fn from_one(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| "give a whole number from 1 on".to_owned())
}

fn rate(text: &str) -> Result<f32, String> {
    let rate = text.parse().ok().filter(|rate: &f32| *rate > 0.0 && rate.is_finite());
    rate.ok_or_else(|| "give a number above 0, for instance 0.05".to_owned())
}

fn switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "0" | "false" => Ok(false),
        "1" | "true" => Ok(true),
        _ => Err("give 1 for synchronous training, 0 for asynchronous".to_owned()),
    }
}

impl Flags {
    /// The arguments that make a process with the training's flags as these, as a user would type them. What is left at
    /// its default is left out.
    pub(crate) fn training_arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        let mut add = |name: &str, value: &dyn Display| arguments.push(format!("--{name}={value}"));
        add("model", &self.model.kind().name());
        if self.issync {
            add("issync", &1);
            add("backup-workers", &self.backup_workers);
        } else {
            add("staleness", &self.staleness);
        }
        if let Some(steps) = self.steps {
            add("steps", &steps);
        }
        if let Some(rate) = self.learning_rate {
            add("learning-rate", &rate);
        }
        add("steps-to-validate", &self.steps_to_validate);
        add("seed", &self.seed);
        if let Some(fabric) = self.fabric.to_possible_value() {
            add("fabric", &fabric.get_name());
        }
        if let Some(path) = &self.checkpoint {
            add("checkpoint", &path.display());
        }
        add("checkpoint-steps", &self.checkpoint_steps);
        if let Some(path) = &self.secret_file {
            add("secret-file", &path.display());
        }
        add("patience", &self.patience);
        arguments
    }
}
