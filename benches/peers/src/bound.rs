//! The limit that the machine's memory sets for an all-reduce: the sum of 32-bit floats of all ranks, without messages.
//!
//! A thread for each rank sums its part of all ranks' values, a block at a time, and writes it in place of each of
//! them. So all values are read once, and all results written once, which every all-reduce in place must do.

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

/// The values of one rank, by the rank that combines them. No two ranks use the same part at the same time.
type Parts = Vec<Mutex<Vec<f32>>>;

struct Bound {
    values: Vec<Parts>,
    /// Separates operations.
    barrier: Barrier,
    /// How many operations all ranks do next; 0 ends them.
    operations: AtomicU64,
}

/// Runs the measurement of the command line.
pub(crate) fn measure(words: &[String]) -> Result<Figure, Fault> {
    let [ranks, bytes, milliseconds] = words else { return Err(USAGE.into()) };
    let (ranks, count): (usize, usize) = (ranks.parse()?, bytes.parse::<usize>()? / size_of::<f32>());
    let length = Duration::from_millis(milliseconds.parse()?);
    let part = |rank: usize| count * (rank + 1) / ranks - count * rank / ranks;
    // Sums of zeros stay zero, and the first operation writes every page.
    let values = || (0..ranks).map(|rank| Mutex::new(vec![0.0; part(rank)])).collect();
    let bound = Bound {
        values: (0..ranks).map(|_| values()).collect(),
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
    /// Rank 0: finds out how many operations fill the time, and times that many.
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

    /// One rank's part of the next operations of rank 0. Returns whether there were any.
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
        let mut values: Vec<_> = self.values.iter().map(|parts| lock(&parts[rank])).collect();
        let count = values[0].len();
        for start in (0..count).step_by(BLOCK) {
            let at = start..(start + BLOCK).min(count);
            let mut sums = [0.0; BLOCK];
            let sums = &mut sums[..at.len()];
            for values in &values {
                sums.iter_mut().zip(&values[at.clone()]).for_each(|(sum, number)| *sum += number);
            }
            values.iter_mut().for_each(|values| values[at.clone()].copy_from_slice(sums));
        }
        black_box(&values);
    }
}

fn lock(part: &Mutex<Vec<f32>>) -> std::sync::MutexGuard<'_, Vec<f32>> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}
