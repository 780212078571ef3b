//! The plan of a measurement, and the loop that times it.

use std::{
    io::Read,
    time::{Duration, Instant},
};

/// The reason why nothing was measured.
pub(crate) type Fault = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "usage: tensorwire-peers RIVAL shm|tcp sleep|look BYTES MILLISECONDS [ADDRESS]";

/// The arguments of the command line.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) rival: String,
    /// Whether to move bytes through shared memory, if the rival supports both.
    pub(crate) shared_memory: bool,
    /// Whether to poll instead of sleeping, if the rival supports both.
    pub(crate) looks: bool,
    /// Bytes of the answer.
    pub(crate) bytes: usize,
    /// How long to measure.
    pub(crate) length: Duration,
    /// The server's address; `None` in the server itself.
    pub(crate) address: Option<String>,
}

/// A number of operations, and their total time.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) operations: u64,
    pub(crate) seconds: f64,
}

impl Figure {
    /// Prints it in the form that scripts/bench-peers reads.
    pub(crate) fn print(&self) {
        println!("{} {:.9}", self.operations, self.seconds);
    }
}

/// The words after `name`, if that is the first word of the command line.
pub(crate) fn words_of(name: &str) -> Option<Vec<String>> {
    let mut words = std::env::args().skip(1);
    (words.next()? == name).then(|| words.collect())
}

impl Plan {
    /// Reads the process's arguments.
    pub(crate) fn from_arguments() -> Result<Self, Fault> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let (words, address) = match words.as_slice() {
            [words @ .., address] if words.len() == 5 => (words, Some(address.clone())),
            words => (words, None),
        };
        let [rival, transport, wait, bytes, milliseconds] = words else { return Err(USAGE.into()) };
        Ok(Self {
            rival: rival.clone(),
            shared_memory: transport == "shm",
            looks: wait == "look",
            bytes: bytes.parse()?,
            length: Duration::from_millis(milliseconds.parse()?),
            address,
        })
    }

    /// Times `operation`, one at a time, after a warm-up that also finds out how many operations fill the time. The clock is read
    /// at the start and at the finish only.
    pub(crate) async fn time(
        &self,
        mut operation: impl AsyncFnMut() -> Result<(), Fault>,
    ) -> Result<Figure, Fault> {
        // The first operations connect and fault memory in; only later ones show the time of an operation.
        let mut rate = 0.0;
        for _ in 0..2 {
            let (begin, mut done) = (Instant::now(), 0_u32);
            while done < 2 || begin.elapsed() < self.length / 8 {
                operation().await?;
                done += 1;
            }
            rate = f64::from(done) / begin.elapsed().as_secs_f64();
        }
        let operations = (rate * self.length.as_secs_f64()).clamp(4.0, 1e9) as u64;
        let begin = Instant::now();
        for _ in 0..operations {
            operation().await?;
        }
        Ok(Figure { operations, seconds: begin.elapsed().as_secs_f64() })
    }
}

/// Reports to the parent that the server listens at `address`.
pub(crate) fn ready(address: impl std::fmt::Display) {
    println!("ready {address}");
}

/// Blocks until the parent closes this process's standard input.
pub(crate) fn wait_for_parent() {
    // An error ends the wait like the end of the input.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Ends when the parent closes this process's standard input.
pub(crate) async fn parent_is_done() {
    let _ = tokio::task::spawn_blocking(wait_for_parent).await;
}

/// Refuses an answer of another length than the requested one.
pub(crate) fn check_length(wanted: usize, came: usize) -> Result<(), Fault> {
    if wanted == came { Ok(()) } else { Err(format!("{came} bytes came, not {wanted}").into()) }
}
