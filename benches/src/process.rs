//! The processes of a measurement: this program again, which gets commands in lines and answers in lines.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::Failure;

/// The limit of every answer.
const LIMIT: Duration = Duration::from_secs(60);

/// A child. Dropping this kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    to: ChildStdin,
    lines: Receiver<String>,
    role: String,
}

impl Process {
    /// Starts this program with `role` in the environment `variable`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn start(variable: &str, role: &str) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(variable, role);
        Self::spawn(command, role)
    }

    /// Starts another program, which has the role.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn spawn(mut command: Command, role: &str) -> Result<Self, Failure> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a child without pipes".into());
        };
        let (found, lines) = channel();
        thread::spawn(move || {
            BufReader::new(from).lines().map_while(Result::ok).try_for_each(|line| found.send(line))
        });
        Ok(Self { child, to, lines, role: role.to_owned() })
    }

    /// Writes a line to it.
    ///
    /// # Errors
    /// It has ended.
    pub fn tell(&mut self, line: &str) -> Result<(), Failure> {
        Ok(writeln!(self.to, "{line}")?)
    }

    /// Its next line.
    ///
    /// # Errors
    /// It has ended, or has not answered within a minute.
    pub fn hear(&self) -> Result<String, Failure> {
        self.hear_within(LIMIT)?.ok_or_else(|| format!("`{}` did not answer in {LIMIT:?}", self.role).into())
    }

    /// Its next line, if that comes within this time.
    ///
    /// # Errors
    /// It has ended.
    pub fn hear_within(&self, limit: Duration) -> Result<Option<String>, Failure> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(format!("`{}` has ended", self.role).into()),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).ok_or("a child without a number")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
