//! The flags of the examples that train a network, and which process of a parameter server they make this one.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use clap::{Parser, ValueEnum};

use crate::{
    data::Data,
    fashion_mnist,
    training::{Model, ModelKind, Plan},
};

/// Trains a model with parameter servers and workers, each a process of its own.
///
/// Without --job-name this program starts all of them on this host, waits, measures the result, and trains in one
/// process to compare. With it, it is one of them: start one for each entry of --ps-hosts and --worker-hosts, with the
/// same flags on every host.
#[derive(Debug, Clone, Parser)]
#[command(name = "parameter_server", max_term_width = 100)]
pub struct Flags {
    /// Be one process: a parameter server or a worker.
    #[arg(long, alias = "job_name", value_enum, requires_all = ["task_index", "ps_hosts", "worker_hosts"])]
    pub job_name: Option<Job>,
    /// Which entry of its host list this process is, from 0. Worker 0 prints the result.
    #[arg(long, alias = "task_index", value_name = "N", requires = "job_name")]
    pub task_index: Option<u32>,
    /// Where the servers listen: HOST:PORT, separated by commas.
    #[arg(long, alias = "ps_hosts", value_name = "HOSTS", requires = "job_name")]
    pub ps_hosts: Option<String>,
    /// Where the workers listen: HOST:PORT, separated by commas.
    #[arg(long, alias = "worker_hosts", value_name = "HOSTS", requires = "job_name")]
    pub worker_hosts: Option<String>,
    /// A secret that all processes share; needed as soon as one listens beyond loopback.
    #[arg(long, value_name = "PATH")]
    pub secret_file: Option<PathBuf>,
    /// How many seconds a process tries to reach another that is not there before it gives up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub patience: u64,
    /// How many workers to start.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// How many servers to start.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=6))]
    pub servers: u16,
    /// How often a process that was killed is started again, in all.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub restarts: u32,
    /// How often the parameters are updated. Each update is made from one gradient of each worker.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// 1: every update is made from one gradient of each worker. 0: the servers apply each gradient as it comes.
    #[arg(long, value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub issync: u8,
    /// With --issync 0: how many steps a worker may be ahead of the slowest one.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub staleness: u64,
    /// A network, or a linear model, of which workers pull only the rows that their samples need.
    #[arg(long, default_value = "mlp", value_parser = ["mlp", "linear"])]
    pub model: String,
    /// What to learn from. `auto` takes Fashion-MNIST where it is installed.
    #[arg(long, default_value = "auto", value_parser = ["auto", "digits", "fashion-mnist"])]
    pub data: String,
    /// Where Fashion-MNIST is installed.
    #[arg(long, alias = "data_dir", value_name = "PATH", default_value = fashion_mnist::FOLDER)]
    pub data_dir: PathBuf,
    /// How far the parameters follow a gradient.
    #[arg(long, alias = "learning_rate", value_name = "RATE", default_value_t = 0.2)]
    pub learning_rate: f32,
    /// Fixes the first parameters and the order of the samples.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print accuracy and loss on the held-out samples each time worker 0 has completed so many steps.
    #[arg(long, alias = "steps_to_validate", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps_to_validate: Option<u64>,
    /// Where worker 0 writes checkpoints: the parameters and the step, as safetensors.
    #[arg(long, value_name = "PATH")]
    pub checkpoint: Option<PathBuf>,
    /// How many seconds are between checkpoints. The last one is written at the end.
    #[arg(long, alias = "checkpoint_secs", value_name = "SECONDS", default_value_t = 60)]
    pub checkpoint_secs: u64,
    /// Begin with the parameters and the step of a checkpoint, which every server reads.
    #[arg(long, value_name = "PATH")]
    pub restore: Option<PathBuf>,
    /// How tensors travel. `auto` takes shared memory on one host.
    #[arg(long, default_value = "auto", value_parser = ["auto", "shm", "tcp", "verbs"])]
    pub fabric: String,
    /// Print the summary as one line of JSON.
    #[arg(long)]
    pub json: bool,
    /// Started by a launcher, and ends with it.
    #[arg(long, hide = true)]
    pub launched: bool,
    /// Started again by a launcher after it was killed.
    #[arg(long, hide = true)]
    pub again: bool,
}

impl Flags {
    /// The checkpoint to begin with. After a kill that is the last one that this training has written.
    pub fn restored_from(&self) -> Option<&Path> {
        let written = self.checkpoint.as_deref().filter(|path| self.again && path.exists());
        written.or(self.restore.as_deref())
    }

    /// Which process of the cluster this is; `None` for the launcher.
    pub fn role(&self) -> Option<Role> {
        Some(Role { job: self.job_name?, index: self.task_index? })
    }

    /// The addresses of a job.
    pub fn hosts(&self, job: Job) -> &str {
        let hosts = if job == Job::Ps { &self.ps_hosts } else { &self.worker_hosts };
        hosts.as_deref().unwrap_or_default()
    }

    /// What is trained, by so many workers.
    pub fn plan(&self, workers: u32) -> Plan {
        let batch = u64::from(workers) * Model::BATCH;
        let model = if self.model == "linear" { ModelKind::Linear } else { ModelKind::Mlp };
        let is_installed = || self.data == "auto" && fashion_mnist::is_installed(&self.data_dir);
        let data = if self.data == "fashion-mnist" || is_installed() {
            Data::FashionMnist(self.data_dir.clone())
        } else {
            Data::Digits
        };
        Plan { model, data, steps: self.steps, batch, rate: self.learning_rate, seed: self.seed }
    }
}

/// The jobs of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// Holds parameters.
    Ps,
    /// Computes gradients.
    Worker,
}

/// A process of the cluster: `ps 0`, `worker 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Role {
    /// What it does.
    pub job: Job,
    /// Which of those that do the same, from 0.
    pub index: u32,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.job.name(), self.index)
    }
}

impl Job {
    /// The job's name in the cluster and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ps => "ps",
            Self::Worker => "worker",
        }
    }
}

/// Trains a network on handwritten digits with several ranks, which average their gradients.
///
/// Starts its ranks on this host, unless a launcher (torchrun, mpirun, srun) has started this process as one of them.
#[derive(Debug, Clone, Parser)]
#[command(name = "data_parallel", max_term_width = 100)]
pub struct DataParallel {
    /// How many ranks to start. Of no effect if a launcher starts them.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub ranks: u16,
    /// How often the parameters are updated.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Samples of each update, of all ranks together.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub batch: u64,
    /// How far the parameters follow a gradient.
    #[arg(long, alias = "learning_rate", value_name = "RATE", default_value_t = 0.2)]
    pub learning_rate: f32,
    /// Fixes the first parameters and the order of the samples.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// How gradients travel. `auto` takes shared memory on one host.
    #[arg(long, default_value = "auto", value_parser = ["auto", "shm", "tcp", "verbs"])]
    pub fabric: String,
    /// How many seconds the ranks may take to come, and each of their calls.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub patience: u64,
    /// Print the summary as one line of JSON.
    #[arg(long)]
    pub json: bool,
    /// Started by this program's launcher, and ends with it.
    #[arg(long, hide = true)]
    pub launched: bool,
}

impl DataParallel {
    /// What is trained.
    pub fn plan(&self) -> Plan {
        Plan {
            model: ModelKind::Mlp,
            data: Data::Digits,
            steps: self.steps,
            batch: self.batch,
            rate: self.learning_rate,
            seed: self.seed,
        }
    }
}
