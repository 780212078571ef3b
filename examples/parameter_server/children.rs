//! Child processes that report by lines, and that never outlive their parent.
//!
//! The parent holds the writing end of each child's standard input. When the parent ends, in whatever way, the kernel
//! closes it; the child sees the end of its input and ends too.

use std::{
    io::{self, BufRead, BufReader, Write},
    pin::pin,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::SyncSender,
    thread,
    time::Duration,
};

use futures::future::{Either, pending, select};
use tokio::sync::mpsc;

use crate::{failure::Failure, options::Settings, report::Report};

/// Lines that wait to be read, at most.
const LINES_MAX: usize = 64;
/// How long a child may take to close its connections after its parent has gone.
const FAREWELL: Duration = Duration::from_secs(8);

/// What happens to a child.
#[derive(Debug)]
pub(crate) enum Event {
    /// It printed a report.
    Report(Report),
    /// It printed something for people.
    Text(String),
    /// Its output has ended: it is ending or has been killed.
    Ended,
}

/// A child process; killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    input: Option<ChildStdin>,
}

impl Process {
    /// Starts this program again with `arguments`. Its events go to `events` under the number `index`.
    pub(crate) fn start(
        arguments: &[String],
        index: usize,
        events: SyncSender<(usize, Event)>,
    ) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let report = Report::from(line.as_str());
                    let event = if report.is_empty() { Event::Text(line) } else { Event::Report(report) };
                    if events.send((index, event)).is_err() {
                        return;
                    }
                }
                // The launcher has gone if nobody listens.
                let _ = events.send((index, Event::Ended));
            });
        }
        Ok(Self { child, input })
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends one line to the child.
    pub(crate) fn tell(&mut self, report: &Report) -> io::Result<()> {
        let input = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "{report}")?;
        input.flush()
    }

    /// Kills the child, as an operator or the kernel might.
    pub(crate) fn kill(&mut self) {
        // It fails only for a child that has ended.
        let _ = self.child.kill();
    }

    /// Ends the child's input, which asks it to end.
    pub(crate) fn release(&mut self) {
        self.input = None;
    }

    /// Waits for the end of a child whose output has ended.
    pub(crate) fn wait(&mut self) -> io::Result<std::process::ExitStatus> {
        self.release();
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a child that is gone, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a child: the launcher. A process that was started by hand has none.
#[derive(Debug)]
pub(crate) struct Parent {
    lines: Option<mpsc::Receiver<Report>>,
}

impl Parent {
    /// The launcher of this process, if it has one. When that goes, or wants this process to end, the process ends
    /// within eight seconds, whatever else it does.
    pub(crate) fn of(settings: &Settings) -> Self {
        Self { lines: settings.flags.launched.then(lines) }
    }

    /// Whether there is one.
    pub(crate) const fn is_there(&self) -> bool {
        self.lines.is_some()
    }

    /// Does `work`; `None` if the launcher goes, or lets go, before that is done.
    pub(crate) async fn unless_gone<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let gone = async {
            match &mut self.lines {
                Some(lines) => while lines.recv().await.is_some() {},
                None => pending().await,
            }
        };
        match select(pin!(work), pin!(gone)).await {
            Either::Left((worked, _)) => Some(worked),
            Either::Right(_) => None,
        }
    }

    /// Does `work`. With a launcher, waits then until that lets go; an error if it is gone before the work is done.
    pub(crate) async fn work_until_let_go<T>(
        mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<(), Failure> {
        self.unless_gone(work).await.unwrap_or(Err(Failure::LauncherGone))?;
        if self.is_there() {
            self.unless_gone(pending::<()>()).await;
        }
        Ok(())
    }
}

/// The launcher's lines, until it goes or lets go. The process ends within eight seconds of that, whatever else it does.
pub(crate) fn lines() -> mpsc::Receiver<Report> {
    let (sender, receiver) = mpsc::channel(LINES_MAX);
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            // Who has stopped listening still wants to know when the launcher goes.
            let _ = sender.blocking_send(Report::from(line.as_str()));
        }
        drop(sender);
        thread::sleep(FAREWELL);
        std::process::exit(1);
    });
    receiver
}
