//! The trainer: a step, a commit, a step, a commit.

use std::io::{BufRead as _, Write as _};

use anyhow::{Context as _, Result};
use tensorwire::{Tensor, Worker};
use tensorwire_candle::from_candle;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::block_in_place,
};

use crate::{
    inputs::{Inputs, PROBE, PROBE_TEXT, SET},
    prepared::{Prepared, QUERY_TOKENS},
    tokens::{Batch, Tokens},
    training::{Pace, Training},
    tunable::Tunable,
};

/// What the trainer prints before each version that it commits, and the loss of the step to it.
pub(crate) const STEPPED: &str = "trainer: version ";
/// What the trainer prints before the version with which it waits for the next line of standard input.
pub(crate) const RESTS: &str = "trainer: rests at version ";

/// Trains the encoder, and commits each version of it.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    inputs: Inputs,
    /// End when standard input does, as that of a program does with the one that started it.
    #[arg(long)]
    tied: bool,
    #[command(flatten)]
    pace: Pace,
    /// Where services find it.
    #[arg(long, default_value = "127.0.0.1:4300", value_name = "HOST:PORT")]
    bind: String,
    /// The version after which it only serves what it has.
    #[arg(long, default_value_t = 120)]
    until: u64,
    /// Versions between two checkpoints.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// Wait for lines of standard input: `commit` trains and commits each step, `until N` does so up to version N, `silent`
    /// trains without commits, `pause` stops.
    #[arg(long, requires = "tied")]
    controlled: bool,
}

/// What the trainer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Trains and commits each step, up to this version.
    Until(u64),
    Silent,
    Pause,
    End,
}

/// Runs until SIGTERM or SIGINT, and with `--tied` until standard input ends.
///
/// # Errors
/// If a file is missing or does not fit, or the worker cannot start.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { inputs, pace, bind, .. } = &arguments;
    let mut mode = follow_orders(&arguments)?;
    let packages = inputs.packages()?;
    let prepared = Prepared::read_or_compute(&inputs.work, &inputs.model, &packages, |_| {})?;
    let tunable = Tunable::load(&inputs.model)?;
    let mut training = Training::begin(tunable.clone(), prepared, pace, &inputs.checkpoint())?;
    let worker = Worker::builder("trainer").bind(bind).start().await?;
    let publisher =
        Publisher::new(worker.clone(), &tunable, &training, &Tokens::load(&inputs.model, QUERY_TOKENS)?)?;
    print(&format!("{STEPPED}{}, at {}", training.version(), worker.address()))?;
    publisher.commit(&training).await?;
    loop {
        let wanted = *mode.borrow_and_update();
        match wanted {
            Mode::End => break,
            Mode::Silent => step(&mut training, &publisher, &arguments, false).await?,
            Mode::Until(last) if training.version() < last => {
                step(&mut training, &publisher, &arguments, true).await?;
            }
            Mode::Until(_) | Mode::Pause => {
                print(&format!("{RESTS}{}", training.version()))?;
                mode.changed().await?;
            }
        }
    }
    worker.shutdown().await;
    Ok(())
}

async fn step(
    training: &mut Training,
    publisher: &Publisher,
    arguments: &Arguments,
    commits: bool,
) -> Result<()> {
    let loss = block_in_place(|| training.step())?;
    let version = training.version();
    if commits {
        // Before the commit: no service has a version that was not printed.
        print(&format!("{STEPPED}{version}, loss {loss:.3}"))?;
        publisher.commit(training).await?;
    } else {
        print(&format!("trainer: silent step to version {version}, loss {loss:.3}"))?;
    }
    if version.is_multiple_of(arguments.checkpoint_every) {
        block_in_place(|| training.write(&arguments.inputs.checkpoint()))?;
    }
    Ok(())
}

/// An error ends the trainer: the program that reads its lines is gone.
fn print(line: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("standard output is closed")
}

/// Commits the whole encoder as a set. Tensors that training does not change are the same in each version.
struct Publisher {
    worker: Worker,
    frozen: Vec<(String, Tensor)>,
    probe: Batch,
}

impl Publisher {
    fn new(worker: Worker, tunable: &Tunable, training: &Training, tokens: &Tokens) -> Result<Self> {
        let tuned: Vec<String> = training.tuned()?.into_iter().map(|(name, _)| name).collect();
        let variables =
            tunable.variables.data().lock().map_err(|_| anyhow::anyhow!("the variables are unusable"))?;
        let frozen = variables.iter().filter(|(name, _)| !tuned.contains(name));
        let frozen = frozen.map(|(name, variable)| Ok((name.clone(), from_candle(worker.pool(), variable)?)));
        let frozen = frozen.collect::<Result<_>>()?;
        drop(variables);
        Ok(Self { worker, frozen, probe: tokens.batch(&[PROBE_TEXT])? })
    }

    async fn commit(&self, training: &Training) -> Result<()> {
        let pool = self.worker.pool();
        let mut tensors = self.frozen.clone();
        for (name, variable) in training.tuned()? {
            tensors.push((name, from_candle(pool, &variable)?));
        }
        let probe = block_in_place(|| training.encoder().embed(&self.probe))?;
        tensors.push((PROBE.to_owned(), from_candle(pool, &probe)?));
        let version = training.version();
        self.worker
            .set(SET)
            .commit(version, tensors)
            .await
            .with_context(|| format!("committing version {version}"))
    }
}

/// What is to be done, as signals and standard input change it.
fn follow_orders(arguments: &Arguments) -> Result<watch::Receiver<Mode>> {
    let first = if arguments.controlled { Mode::Pause } else { Mode::Until(arguments.until) };
    let (mode, receiver) = watch::channel(first);
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let at_signal = mode.clone();
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        at_signal.send_replace(Mode::End);
    });
    if arguments.tied {
        std::thread::spawn(move || read_orders(&mode));
    }
    Ok(receiver)
}

fn read_orders(mode: &watch::Sender<Mode>) {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let line = line.trim();
        let until = line.strip_prefix("until ").and_then(|version| version.parse().ok());
        let next = match (line, until) {
            (_, Some(version)) => Mode::Until(version),
            ("commit", None) => Mode::Until(u64::MAX),
            ("silent", None) => Mode::Silent,
            ("pause", None) => Mode::Pause,
            _ => {
                eprintln!("trainer: no such line: {line:?}; there are: commit, until N, silent, pause");
                continue;
            }
        };
        mode.send_replace(next);
    }
    mode.send_replace(Mode::End);
}
