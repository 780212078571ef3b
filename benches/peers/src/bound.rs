//! What the machine's memory allows an all-reduce: the sum of 32-bit floats of all ranks, without any messages.
//!
//! A thread for each rank sums its part of all ranks' values, a block at a time, and writes it into every rank's result. So all values
//! are read once, and all results written once, which no all-reduce can do without.

use std::{
    hint::black_box,
    sync::{
        Barrier, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::plan::{Fault, Figure};

const USAGE: &str = "usage: tensorwire-peers bound RANKS BYTES MILLISECONDS";

/// Numbers of a block, which stays in the first cache until it is in all results.
const BLOCK: usize = 1024;

/// The part of each result that one rank writes. No two ranks write the same one at the same time.
type Parts = Vec<Mutex<Vec<f32>>>;

struct Bound {
    inputs: Vec<Vec<f32>>,
    /// By result, then by part.
    results: Vec<Parts>,
    /// Between two operations.
    barrier: Barrier,
    /// How many operations all ranks do next; nothing more if it is 0.
    operations: AtomicU64,
}

/// Measures what the command line asks for.
pub(crate) fn measure(words: &[String]) -> Result<Figure, Fault> {
    let [ranks, bytes, milliseconds] = words else { return Err(USAGE.into()) };
    let (ranks, count): (usize, usize) = (ranks.parse()?, bytes.parse::<usize>()? / size_of::<f32>());
    let length = Duration::from_millis(milliseconds.parse()?);
    let part = |rank: usize| count * (rank + 1) / ranks - count * rank / ranks;
    let result = || (0..ranks).map(|rank| Mutex::new(vec![0.0; part(rank)])).collect();
    let bound = Bound {
        // Not zeros, which may all be one page.
        inputs: vec![vec![1.0; count]; ranks],
        results: (0..ranks).map(|_| result()).collect(),
        barrier: Barrier::new(ranks),
        operations: AtomicU64::new(0),
    };
    Ok(thread::scope(|scope| {
        for rank in 1..ranks {
            let bound = &bound;
            scope.spawn(move || while bound.run(rank) {});
        }
        bound.lead(length)
    }))
}

impl Bound {
    /// Rank 0: finds out how many operations fill the time, and times as many.
    fn lead(&self, length: Duration) -> Figure {
        let mut operations = 1;
        let mut seconds = self.time(operations);
        while seconds < length.as_secs_f64() / 8.0 {
            operations *= 2;
            seconds = self.time(operations);
        }
        let operations = (operations as f64 / seconds * length.as_secs_f64()).max(4.0) as u64;
        let seconds = self.time(operations);
        self.operations.store(0, Ordering::Relaxed);
        self.barrier.wait();
        Figure { operations, seconds }
    }

    fn time(&self, operations: u64) -> f64 {
        self.operations.store(operations, Ordering::Relaxed);
        let begin = Instant::now();
        self.run(0);
        begin.elapsed().as_secs_f64()
    }

    /// One rank's part of the operations that rank 0 wants next. Returns whether there were any.
    fn run(&self, rank: usize) -> bool {
        self.barrier.wait();
        let operations = self.operations.load(Ordering::Relaxed);
        for _ in 0..operations {
            self.combine(rank);
            self.barrier.wait();
        }
        operations > 0
    }

    fn combine(&self, rank: usize) {
        let before: usize = self.results[0][..rank].iter().map(|part| lock(part).len()).sum();
        let mut results: Vec<_> = self.results.iter().map(|parts| lock(&parts[rank])).collect();
        let count = results[0].len();
        for start in (0..count).step_by(BLOCK) {
            let at = start..(start + BLOCK).min(count);
            let mut sums = [0.0; BLOCK];
            let sums = &mut sums[..at.len()];
            for input in &self.inputs {
                let input = &input[before + at.start..before + at.end];
                sums.iter_mut().zip(input).for_each(|(sum, number)| *sum += number);
            }
            results.iter_mut().for_each(|result| result[at.clone()].copy_from_slice(sums));
        }
        black_box(&results);
    }
}

fn lock(part: &Mutex<Vec<f32>>) -> std::sync::MutexGuard<'_, Vec<f32>> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}
