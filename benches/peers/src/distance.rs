//! How far two CPUs are from each other: how long a line of memory takes from one to the other.
//!
//! The hypervisor of a virtual machine moves its CPUs while it runs. On near cores, whose caches are one, a line takes a fraction of
//! the time that it takes between far ones, and so does all that two processes send each other. Figures of two programs can only be
//! compared if the distance was the same.

use std::{
    hint,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::plan::{Fault, Figure};

const USAGE: &str = "usage: tensorwire-peers distance MILLISECONDS";

/// Round trips between two looks at the clock.
const ROUND_TRIPS: u64 = 64;

/// What the second thread takes for the end.
const END: u64 = u64::MAX;

/// A word that has its line for itself, and the one beside it, which some CPUs fetch with it.
#[repr(align(128))]
struct Line(AtomicU64);

/// Measures what the command line asks for: the time of one way.
pub(crate) fn measure(words: &[String]) -> Result<Figure, Fault> {
    let [milliseconds] = words else { return Err(USAGE.into()) };
    let length = Duration::from_millis(milliseconds.parse()?);
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    Ok(thread::scope(|scope| {
        scope.spawn(|| answer(&there, &back));
        let mut number = 0;
        // The other thread starts on the other CPU only after a while.
        play(&there, &back, &mut number, length / 4);
        let (begin, before) = (Instant::now(), number);
        play(&there, &back, &mut number, length);
        let seconds = begin.elapsed().as_secs_f64();
        there.0.store(END, Ordering::Release);
        Figure { operations: 2 * (number - before), seconds }
    }))
}

fn play(there: &Line, back: &Line, number: &mut u64, length: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < length {
        for _ in 0..ROUND_TRIPS {
            *number += 1;
            there.0.store(*number, Ordering::Release);
            while back.0.load(Ordering::Acquire) != *number {
                hint::spin_loop();
            }
        }
    }
}

fn answer(there: &Line, back: &Line) {
    let mut last = 0;
    while last != END {
        let number = there.0.load(Ordering::Acquire);
        if number == last {
            hint::spin_loop();
        } else {
            last = number;
            back.0.store(number, Ordering::Release);
        }
    }
}
