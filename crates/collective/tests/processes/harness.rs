//! Child processes of a test: this test binary, run with the same test and [`CHILD`] set.
//!
//! Parent and child exchange lines of text. The child's lines begin with `@@`; other lines on its standard output are the test
//! harness's.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{child, rdma::patient};

/// The arguments of a child, from its parent.
pub(crate) const CHILD: &str = "TENSORWIRE_COLLECTIVE_TEST_CHILD";

/// How long a step of a test may take that has no limit of its own, before [`patient`] makes it longer.
pub(crate) const STEP: Duration = Duration::from_secs(30);

/// The limit of each call of a group whose ranks fail.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

/// A child process. Killed when dropped.
pub(crate) struct Other {
    process: std::process::Child,
    to: ChildStdin,
    lines: Receiver<String>,
    what: String,
}

impl Other {
    /// Starts `test` (`module::name`) in a process of its own, which [`child::run`] runs with `role`.
    fn start(test: &str, role: String) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env(CHILD, &role)
            .env_remove("TENSORWIRE_SECRET_FILE");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let (found, lines) = channel();
        thread::spawn(move || {
            for line in from.lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once("@@") {
                    let _ = found.send(said.trim().to_owned());
                }
            }
        });
        Self { process, to, lines, what: role }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// The next line, which must come before `end`.
    pub(crate) fn hear_until(&self, end: Instant) -> String {
        let line = self.lines.recv_timeout(end.saturating_duration_since(Instant::now()));
        line.unwrap_or_else(|error| panic!("no line of `{}` in time: {error}", self.what))
    }

    pub(crate) fn hear(&self) -> String {
        self.hear_until(Instant::now() + patient(STEP))
    }

    #[track_caller]
    pub(crate) fn expect(&self, line: &str) {
        assert_eq!(self.hear(), line, "of `{}`", self.what);
    }

    /// Whether it prints nothing for this time.
    pub(crate) fn is_silent_for(&self, time: Duration) -> bool {
        self.lines.recv_timeout(time).is_err()
    }

    /// The error of a call, reported before `end`, after some correct rounds.
    pub(crate) fn failure_until(&self, end: Instant) -> String {
        loop {
            let line = self.hear_until(end);
            if let Some(error) = line.strip_prefix("failed ") {
                return error.to_owned();
            }
            assert!(line.starts_with("round "), "`{}` said: {line}", self.what);
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.process.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Requests it to end, and waits until it has.
    pub(crate) fn end(mut self) {
        self.tell("end");
        self.expect("ended");
        assert!(self.process.wait().unwrap().success(), "`{}` failed", self.what);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One test: its processes, and their store.
pub(crate) struct Test {
    /// `module::name`.
    pub(crate) name: &'static str,
    pub(crate) fabric: &'static str,
    /// The limit of joining, and of each call.
    pub(crate) limit: Duration,
    pub(crate) liveness: Duration,
    pub(crate) store: Other,
    pub(crate) store_address: String,
}

/// Runs `body` in the parent, with a store in a process of its own. In a child, runs its role.
pub(crate) fn test(name: &'static str, fabric: &'static str, limit: Duration, body: impl FnOnce(Test)) {
    if let Ok(role) = env::var(CHILD) {
        return child::run(&role);
    }
    let (store, store_address) = serve(name, "127.0.0.1:0");
    let liveness = patient(Duration::from_secs(10));
    body(Test { name, fabric, limit, liveness, store, store_address });
}

/// Starts a store in a process of its own. Returns it with its address.
pub(crate) fn serve(test: &str, address: &str) -> (Other, String) {
    let store = Other::start(test, format!("store {address}"));
    let address = store.hear();
    (store, address)
}

impl Test {
    /// Starts a rank of `job`. It prints `waiting` before it joins.
    pub(crate) fn rank(&self, job: &str, rank: usize, size: usize) -> Other {
        self.start("rank", &self.store_address, job, rank, size)
    }

    /// Starts a rank as a launcher does that gives `store` and no name of the job.
    pub(crate) fn launched(&self, store: &str, job: &str, rank: usize, size: usize) -> Other {
        self.start("rank", &format!("{}{store}", child::LAUNCHED), job, rank, size)
    }

    /// Starts a rank that the group of the others is to admit.
    pub(crate) fn newcomer(&self, rank: usize, size: usize) -> Other {
        self.start("newcomer", &self.store_address, "job", rank, size)
    }

    /// Starts a process with all ranks of a group, which may open `left` files.
    pub(crate) fn crowded(&self, left: u64) -> Other {
        Other::start(self.name, format!("crowded {} {left}", self.fabric))
    }

    fn start(&self, role: &str, store: &str, job: &str, rank: usize, size: usize) -> Other {
        let Self { name, fabric, limit, liveness, .. } = self;
        let (limit, liveness) = (limit.as_millis(), liveness.as_millis());
        Other::start(name, format!("{role} {fabric} {store} {job} {rank} {size} {limit} {liveness}"))
    }

    /// As [`group`](Self::group), with a store that rank 0 serves.
    pub(crate) fn group_with_own_store(&self, size: usize) -> Vec<Other> {
        let first = self.start("rank", child::OWN_STORE, "job", 0, size);
        let address = first.hear();
        let others = (1..size).map(|rank| self.start("rank", &address, "job", rank, size));
        Self::joined([first].into_iter().chain(others).collect())
    }

    /// Starts all ranks of a group, and waits until they have joined.
    pub(crate) fn group(&self, size: usize) -> Vec<Other> {
        Self::joined((0..size).map(|rank| self.rank("job", rank, size)).collect())
    }

    fn joined(ranks: Vec<Other>) -> Vec<Other> {
        for (rank, other) in ranks.iter().enumerate() {
            other.expect("waiting");
            other.expect(&format!("joined {rank} of {}", ranks.len()));
        }
        ranks
    }
}

/// The sum of these ranks' values in each round.
pub(crate) fn sum(ranks: impl IntoIterator<Item = usize>) -> usize {
    ranks.into_iter().map(child::share).sum()
}

pub(crate) fn tell(ranks: &mut [Other], lines: &[&str]) {
    for line in lines {
        ranks.iter_mut().for_each(|rank| rank.tell(line));
    }
}

/// Closes the group of these ranks, and ends them.
pub(crate) fn close(mut ranks: Vec<Other>) {
    tell(&mut ranks, &["close"]);
    ranks.iter().for_each(|rank| rank.expect("closed"));
    ranks.into_iter().for_each(Other::end);
}
