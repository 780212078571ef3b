//! The distance of two CPUs: the time that a line of memory takes from one to the other.
//!
//! The hypervisor of a virtual machine moves its CPUs while it runs. Between near cores, which share a cache, a line
//! takes a fraction of the time that it takes between far ones. The same holds for all messages of two processes.
//! Figures of two programs can only be compared if the distance was the same.

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

/// The number that ends the second thread.
const END: u64 = u64::MAX;

/// A word that shares neither its line nor the next one, which some CPUs fetch with it.
#[repr(align(128))]
struct Line(AtomicU64);

/// Runs the measurement of the command line: the time of one direction.
pub(crate) fn measure(words: &[String]) -> Result<Figure, Fault> {
    let [milliseconds] = words else { return Err(USAGE.into()) };
    let length = Duration::from_millis(milliseconds.parse()?);
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    Ok(thread::scope(|scope| {
        scope.spawn(|| answer(&there, &back));
        let mut number = 0;
        // The other thread starts on the other CPU after some delay.
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
