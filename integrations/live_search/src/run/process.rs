//! The processes that a run starts, kills and ends. None outlives the run: they are killed when it ends in any way, and end
//! themselves when their standard input does.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

/// The longest duration of an orderly end.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// A process of this program.
pub(crate) struct Process {
    name: String,
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
    input: Option<ChildStdin>,
    /// The line that it printed last.
    line: watch::Receiver<String>,
    /// Writes what it prints to the log; ends with the process.
    logging: JoinHandle<()>,
}

impl Process {
    /// Starts this program with `arguments`; what it prints goes to `NAME.log` in `work`.
    pub(crate) fn start(name: &str, work: &Path, arguments: Vec<String>) -> Result<Self> {
        let log = work.join(format!("{name}.log"));
        File::create(&log).with_context(|| format!("writing {}", log.display()))?;
        let (child, input, line, logging) = spawn(&log, &arguments)?;
        Ok(Self { name: name.to_owned(), arguments, log, child, input, line, logging })
    }

    /// Sends a line to its standard input.
    pub(crate) async fn order(&mut self, line: &str) -> Result<()> {
        let context = || format!("{} has ended: see {}", self.name, self.log.display());
        let input = self.input.as_mut().with_context(context)?;
        let line = format!("{line}\n");
        input.write_all(line.as_bytes()).await.with_context(context)?;
        input.flush().await.with_context(context)
    }

    /// Waits until it has printed a line that begins with `prefix`, and nothing after it; the rest of the line.
    pub(crate) async fn wait_for_line(&mut self, prefix: &str, limit: Duration) -> Result<String> {
        let printed = timeout(limit, self.line.wait_for(|line| line.starts_with(prefix))).await;
        let late = || {
            format!("waited {limit:?} for the line {prefix:?} of {}: see {}", self.name, self.log.display())
        };
        let line = printed.with_context(late)?.with_context(late)?;
        Ok(line.strip_prefix(prefix).unwrap_or_default().to_owned())
    }

    /// The numbers that it has printed after `prefix` since its first start.
    pub(crate) fn printed(&self, prefix: &str) -> Result<BTreeSet<u64>> {
        let text =
            std::fs::read_to_string(&self.log).with_context(|| format!("reading {}", self.log.display()))?;
        let numbers =
            text.lines().filter_map(|line| line.strip_prefix(prefix)?.split(',').next()?.parse().ok());
        Ok(numbers.collect())
    }

    /// SIGKILL; returns when the process is gone, and all that it printed is in its log.
    pub(crate) async fn kill(&mut self) -> Result<()> {
        self.ensure_runs()?;
        self.child.kill().await.with_context(|| format!("killing {}", self.name))?;
        let late = || format!("waited {ENDS_WITHIN:?} for the output of {} to end", self.name);
        Ok(timeout(ENDS_WITHIN, &mut self.logging).await.with_context(late)??)
    }

    /// The same process once more, after [`kill`](Self::kill).
    pub(crate) fn restart(&mut self) -> Result<()> {
        (self.child, self.input, self.line, self.logging) = spawn(&self.log, &self.arguments)?;
        Ok(())
    }

    /// An error if it has ended by itself.
    pub(crate) fn ensure_runs(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(
            ended.is_none(),
            "{} has ended ({}): see {}",
            self.name,
            ended.unwrap_or_default(),
            self.log.display()
        );
        Ok(())
    }

    /// SIGTERM, after which it ends in order.
    pub(crate) async fn end(mut self) -> Result<()> {
        self.ensure_runs()?;
        let pid = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(pid.cast_signed()))
            .context("the process has no number")?;
        kill_process(pid, Signal::TERM).with_context(|| format!("ending {}", self.name))?;
        let ended = timeout(ENDS_WITHIN, self.child.wait()).await;
        let late = || {
            format!("{} has not ended {ENDS_WITHIN:?} after SIGTERM: see {}", self.name, self.log.display())
        };
        let status = ended.with_context(late)??;
        ensure!(status.success(), "{} ended with {status}: see {}", self.name, self.log.display());
        Ok(())
    }
}

type Spawned = (Child, Option<ChildStdin>, watch::Receiver<String>, JoinHandle<()>);

fn spawn(log: &Path, arguments: &[String]) -> Result<Spawned> {
    let program = std::env::current_exe().context("the path of this program")?;
    let open =
        || File::options().append(true).open(log).with_context(|| format!("writing {}", log.display()));
    let mut command = Command::new(&program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(open()?).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
    let (input, output) = (child.stdin.take(), child.stdout.take().context("its standard output")?);
    let (printed, line) = watch::channel(String::new());
    let mut log = open()?;
    let logging = tokio::spawn(async move {
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // The log is for people who look for a cause; a full disk does not end the run.
            drop(writeln!(log, "{line}"));
            printed.send_replace(line);
        }
    });
    Ok((child, input, line, logging))
}
