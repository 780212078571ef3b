//! A second process, for tests in which a process dies, is stopped, holds descriptors, or sends arbitrary bytes.
//!
//! It runs the same test of the same binary with [`CHILD`] set. The processes exchange lines of text that begin with
//! `@@`; all other lines on the child's standard output are the test harness's.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use tensorwire_fabric::Runtime;

use crate::contract::{
    Flavour, bounded,
    pair::{step, yield_once},
    patience,
};

const CHILD: &str = "TENSORWIRE_TEST_CHILD";

pub(crate) fn is_child() -> bool {
    env::var_os(CHILD).is_some()
}

/// The role that the parent gave this child.
pub(crate) fn part() -> String {
    env::var(CHILD).unwrap_or_default()
}

/// The other process. Killed when dropped.
pub(crate) struct Other {
    process: Child,
    to: ChildStdin,
    /// Its lines. A thread reads them, so that each wait for a line is bounded.
    from: mpsc::Receiver<String>,
}

/// How long the other process may take to print a line.
const HEARING_LIMIT: Duration = Duration::from_secs(15);

impl Other {
    /// Runs the test of this path, whose [`part`] is `part`.
    pub(crate) fn start_as(test: &str, part: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env(CHILD, part);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, output) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let (lines, from) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
        Self { process, to, from }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// The next line of the other process. Nothing else runs on this thread meanwhile.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let line =
                self.from.recv_timeout(HEARING_LIMIT * patience()).expect("the child has ended or hangs");
            if let Some((_, text)) = line.split_once("@@") {
                return text.trim().to_owned();
            }
        }
    }

    /// Like [`hear`](Self::hear), while other tasks continue.
    pub(crate) async fn hear_meanwhile(&mut self, runtime: &Arc<dyn Runtime>, what: &str) -> String {
        let next = async {
            loop {
                match self.from.try_recv() {
                    Ok(line) if line.contains("@@") => {
                        return line.split_once("@@").unwrap().1.trim().to_owned();
                    }
                    Ok(_) => {}
                    Err(mpsc::TryRecvError::Empty) => yield_once().await,
                    Err(mpsc::TryRecvError::Disconnected) => panic!("{what}: the child has ended"),
                }
            }
        };
        step(runtime, what, next).await
    }

    /// Whether it was stopped since the last call.
    pub(crate) fn has_stopped(&self) -> bool {
        // SAFETY: all zeroes are a `siginfo_t`.
        let mut found: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `found` is writable; the process is our child and not waited for yet.
        let result = unsafe {
            libc::waitid(libc::P_PID, self.process.id(), &mut found, libc::WSTOPPED | libc::WNOHANG)
        };
        assert_eq!(result, 0, "waitid: {}", std::io::Error::last_os_error());
        found.si_signo == libc::SIGCHLD
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: no pointers are involved; the process is our child and not waited for yet.
        assert_eq!(unsafe { libc::kill(self.process.id().cast_signed(), signal) }, 0);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _already_dead = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs `body` in a process of its own, so that process-wide counts concern only `body`.
pub(crate) fn alone(
    test: &str,
    body: impl FnOnce(Arc<dyn Runtime>) -> futures::future::LocalBoxFuture<'static, ()> + Send + 'static,
) {
    if is_child() {
        return bounded(Flavour::CurrentThread, body);
    }
    let mut other = Other::start_as(test, "1");
    // Reads until its standard output is closed; the process ends by itself within the limit of a test.
    let output = other.from.iter().collect::<Vec<_>>().join("\n");
    let status = other.process.wait().unwrap();
    assert!(status.success() && output.contains("1 passed"), "{status}:\n{output}");
}

pub(crate) fn say(line: &str) {
    println!("@@ {line}");
    std::io::stdout().flush().unwrap();
}

pub(crate) fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}
