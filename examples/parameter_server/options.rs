//! The command line.

use clap::{Parser, Subcommand, ValueEnum};
use tensorwire_examples::training;

/// Trains a network on handwritten digits with one parameter server and two workers, each a process of its own.
#[derive(Debug, Clone, Parser)]
#[command(name = "parameter_server", max_term_width = 100)]
pub(crate) struct Options {
    /// How tensors travel. `auto` takes shared memory on one host.
    #[arg(long, value_enum, default_value_t = Fabric::Auto, global = true)]
    pub(crate) fabric: Fabric,
    /// Gradients to compute, by all workers together.
    #[arg(long, default_value_t = training::STEPS, global = true)]
    pub(crate) steps: usize,
    /// Fixes the first parameters and the order of the samples.
    #[arg(long, default_value_t = 1, global = true)]
    pub(crate) seed: u64,
    /// Which process to be. Without it: start all of them, wait, and measure.
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
}

/// The processes that the launcher starts.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Role {
    /// Hold the parameters. Addresses of workers come by standard input.
    #[command(hide = true)]
    Server,
    /// Compute gradients on a part of the samples.
    #[command(hide = true)]
    Worker {
        /// Address of the server.
        #[arg(long)]
        server: String,
        /// Number of this worker, from 0.
        #[arg(long)]
        index: usize,
    },
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
}

impl Fabric {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl Options {
    /// Command-line arguments that give a child the same options.
    pub(crate) fn to_arguments(&self) -> Vec<String> {
        let pairs = [
            ("--fabric", self.fabric.name().to_owned()),
            ("--steps", self.steps.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }

    /// How many of the steps fall to worker `index` of `workers`.
    pub(crate) fn steps_of(&self, index: usize, workers: usize) -> usize {
        self.steps / workers + usize::from(index < self.steps % workers)
    }
}
