//! The two sides of a stream of frames, whichever system carries it: what is in a frame, and the lines that a process exchanges with its
//! parent. `benches/peers` includes this file by path.
//!
//! A writer prints `ready ADDRESS`, begins at the first line of its standard input, and at the second one prints `wrote` with the time of
//! each frame. A reader prints `ready -`, `sign TIME WORDS` for whatever tells it that the writer is lost, and at the first line of its
//! standard input `read TORN` with the number, the time and the counted loss of each frame. Both end when their standard input does.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

use std::{
    error::Error,
    fmt,
    io::Read as _,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Why there is no stream.
pub type Fault = Box<dyn Error + Send + Sync>;

/// Which frames a reader wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// All: the writer waits.
    Every,
    /// The newest one: the writer does not wait.
    Latest,
}

/// The part of one process.
#[derive(Debug, Clone)]
pub struct Part {
    /// Whether it writes or reads.
    pub writes: bool,
    /// The system that carries the frames.
    pub system: String,
    /// How it carries them: `shm`, `view` or `tcp`.
    pub way: String,
    /// Which frames the reader wants.
    pub policy: Policy,
    /// Frames that wait for the reader at most.
    pub ahead: u8,
    /// Bytes of a frame, a multiple of 8.
    pub bytes: usize,
    /// The time between two frames of a writer, or that a reader takes for each.
    pub pause: Duration,
    /// The writer's address; in the writer itself a mere word.
    pub address: String,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.writes { "write" } else { "read" };
        let policy = if self.policy == Policy::Every { "every" } else { "latest" };
        let Self { system, way, ahead, bytes, address, .. } = self;
        write!(f, "{side} {system} {way} {policy} {ahead} {bytes} {} {address}", self.pause.as_micros())
    }
}

impl FromStr for Part {
    type Err = Fault;

    fn from_str(words: &str) -> Result<Self, Fault> {
        let words: Vec<&str> = words.split(' ').collect();
        let &[side, system, way, policy, ahead, bytes, micros, address] = words.as_slice() else {
            return Err("usage: write|read SYSTEM WAY every|latest AHEAD BYTES MICROSECONDS ADDRESS".into());
        };
        Ok(Self {
            writes: side == "write",
            system: system.to_owned(),
            way: way.to_owned(),
            policy: if policy == "every" { Policy::Every } else { Policy::Latest },
            ahead: ahead.parse()?,
            bytes: bytes.parse()?,
            pause: Duration::from_micros(micros.parse()?),
            address: address.to_owned(),
        })
    }
}

/// Microseconds of a clock that all processes of the host share.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Writes a frame: its number in every word.
pub fn fill(frame: &mut [u8], number: u64) {
    for word in frame.as_chunks_mut::<8>().0 {
        *word = number.to_le_bytes();
    }
}

/// Reads a frame once, and tells whether all of its words are the same number.
#[derive(Debug, Default)]
pub struct Check {
    first: Option<u64>,
    differences: u64,
}

impl Check {
    /// Reads the next bytes, whole words.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.words(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)));
    }

    /// Reads the next words.
    pub fn words(&mut self, mut words: impl Iterator<Item = u64>) {
        let Some(first) = self.first.or_else(|| words.next()) else { return };
        self.first = Some(first);
        self.differences |= words.fold(0, |differences, word| differences | (word ^ first));
    }

    /// The number of the frame; `None` if it is torn.
    pub fn number(&self) -> Option<u64> {
        self.first.filter(|_| self.differences == 0)
    }
}

/// The frames of a writer: numbers from 1 on, each when it is due, until the parent stops them.
#[derive(Debug)]
pub struct Writing {
    is_stopped: Arc<AtomicBool>,
    pause: Duration,
    due: Instant,
    times: Vec<u64>,
}

impl Writing {
    /// Prints the address, and waits for the parent's first line.
    pub fn begin(address: impl fmt::Display, pause: Duration) -> Self {
        println!("ready {address}");
        wait_for_line();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopping = is_stopped.clone();
        at_next_line(move || stopping.store(true, Ordering::Relaxed));
        Self { is_stopped, pause, due: Instant::now(), times: Vec::new() }
    }

    /// The number of the next frame, and the time until it is due. A late frame does not hasten the later ones.
    pub fn next_frame(&mut self) -> Option<(u64, Duration)> {
        if self.is_stopped.load(Ordering::Relaxed) {
            return None;
        }
        let now = Instant::now();
        self.due = self.due.max(now);
        let delay = self.due - now;
        self.due += self.pause;
        Some((self.times.len() as u64 + 1, delay))
    }

    /// The number of the next frame, once it is due.
    pub async fn due_frame(&mut self) -> Option<u64> {
        let (number, delay) = self.next_frame()?;
        if delay.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(delay).await;
        }
        Some(number)
    }

    /// The frame has been published.
    pub fn published(&mut self) {
        self.times.push(now());
    }

    /// Prints what was written.
    pub fn report(&self) {
        let times: String = self.times.iter().map(|time| format!(" {time}")).collect();
        println!("wrote{times}");
    }
}

/// The frames that a reader has seen.
#[derive(Debug, Default)]
pub struct Reading {
    torn: u64,
    seen: String,
}

impl Reading {
    /// Tells the parent that the reader is ready, and calls `stop` at its next line.
    pub fn begin(stop: impl FnOnce() + Send + 'static) -> Self {
        at_next_line(stop);
        println!("ready -");
        Self::default()
    }

    /// A frame that came at this time, with the number of frames that the system says it has left out before it.
    pub fn saw(&mut self, number: Option<u64>, at: u64, left_out: u64) {
        match number {
            Some(number) => self.seen += &format!(" {number}:{at}:{left_out}"),
            None => self.torn += 1,
        }
    }

    /// Prints what was read.
    pub fn report(&self) {
        println!("read {}{}", self.torn, self.seen);
    }
}

/// Tells the parent, with the time, what the reader has noticed.
pub fn sign(words: impl fmt::Display) {
    println!("sign {} {}", now(), words.to_string().replace('\n', " "));
}

/// Calls `act` at the next line of standard input, and ends the process at the end of it.
fn at_next_line(act: impl FnOnce() + Send + 'static) {
    thread::spawn(move || {
        wait_for_line();
        act();
        // An error is the end of the input, too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// Ends the process if there is no further line.
fn wait_for_line() {
    if !std::io::stdin().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0) {
        std::process::exit(0);
    }
}
