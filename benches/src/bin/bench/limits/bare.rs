//! The limits of shared memory: bare signals, and one copy or one read of a row's bytes.

use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use serde::{Deserialize, Serialize};
use tensorwire::fabric::Runtime;

use super::{
    LimitWait, read_once,
    shared_memory::SharedMemory,
    signal::{Signals, WORDS_BYTES, look},
};
use crate::{
    cpus::{self, Placement},
    error::BenchError,
    phase::{Phase, PhaseLength, Watch},
};

/// Up to this size one core copies: a second one would take longer to start than to copy.
const ONE_CORE_BYTES: usize = 256 << 10;

/// Names of copies.
pub(crate) const COPY_ON_TWO: &str = "copy on two cores";
pub(crate) const COPY_ON_ONE: &str = "copy";

/// The second process's work for each of `count` operations: it answers `width` signals at once, and copies the range
/// `copied`, if there is one, while the first process copies the first part.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Answers {
    pub(crate) count: u64,
    pub(crate) width: usize,
    pub(crate) wait: LimitWait,
    pub(crate) copied: Option<CopiedRange>,
}

/// The part that the second process copies: from its own memory to this offset of the shared memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct CopiedRange {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Executes `answers` in the second process.
pub(crate) fn answer(
    signals: Signals<'_>,
    memory: &SharedMemory,
    source: &[u8],
    answers: Answers,
) -> Result<(), BenchError> {
    for value in 1..=answers.count {
        for number in 0..answers.width {
            signals.receive(number, value)?;
            signals.send(number, value, number + 1 < answers.width)?;
        }
        if let Some(CopiedRange { offset, bytes }) = answers.copied {
            memory.write(offset, source.get(source.len().saturating_sub(bytes)..).unwrap_or_default());
            signals.send_copied(value)?;
        }
    }
    Ok(())
}

/// Round trips of `width` signals at once; each round trip is one operation.
pub(crate) fn round_trips(
    signals: Signals<'_>,
    width: usize,
    clock: &dyn Runtime,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let mut watch = Watch::start(clock, plan);
    for value in 1..=plan.ops {
        exchange(signals, width, value)?;
        watch.tick();
    }
    Ok(watch.stop())
}

fn exchange(signals: Signals<'_>, width: usize, value: u64) -> Result<(), BenchError> {
    for number in 0..width {
        signals.send(number, value, number + 1 < width)?;
    }
    (0..width).try_for_each(|number| signals.receive(number, value))
}

/// Whether a second core helps to copy.
fn has_two_cores(bytes: usize, placement: Placement) -> bool {
    bytes > ONE_CORE_BYTES && placement.has_two_cpus
}

/// The work on the bytes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// They are copied from shared memory, by all cores of the case.
    Copy,
    /// They are read.
    Read,
}

/// The bytes of a limit, and the cores that move them.
#[derive(Debug)]
pub(crate) struct Contents {
    work: Work,
    /// The destination of the first core's copy, or the bytes that are read.
    own: Vec<u8>,
    /// The destination of the second core's copy, if there is one.
    second: Vec<u8>,
    /// Number of contents in shared memory, one after the other. Operations use them in turns.
    pieces: usize,
    second_cpu: Option<usize>,
}

impl Contents {
    /// Contents of `bytes` bytes.
    pub(crate) fn new(work: Work, bytes: usize, pieces: usize, placement: Placement) -> Self {
        let has_two = work == Work::Copy && has_two_cores(bytes, placement);
        let second = if has_two { bytes / 2 } else { 0 };
        Self {
            work,
            own: vec![1; bytes - second],
            second: vec![1; second],
            pieces,
            second_cpu: placement.peer,
        }
    }

    /// Bytes of shared memory that they need.
    pub(crate) fn shared_bytes(bytes: usize, pieces: usize) -> usize {
        // The second process copies to its own memory after the pieces.
        WORDS_BYTES + (pieces + 1) * bytes
    }

    /// The name of the work on contents of `bytes` bytes, for reports.
    pub(crate) fn name(work: Work, bytes: usize, placement: Placement) -> &'static str {
        match work {
            Work::Read => "reading",
            Work::Copy if has_two_cores(bytes, placement) => COPY_ON_TWO,
            Work::Copy => COPY_ON_ONE,
        }
    }

    /// The same work by one core, if two do it.
    pub(crate) fn on_one_core(&self) -> Option<Self> {
        let own = vec![1; self.bytes()];
        (!self.second.is_empty()).then(|| Self { own, second: Vec::new(), ..*self })
    }

    /// Bytes of one piece.
    pub(crate) fn bytes(&self) -> usize {
        self.own.len() + self.second.len()
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces
    }

    /// The part of the second process, if both processes have a core.
    pub(crate) fn copied(&self) -> Option<CopiedRange> {
        let offset = WORDS_BYTES + self.pieces * self.bytes();
        (!self.second.is_empty()).then_some(CopiedRange { offset, bytes: self.second.len() })
    }

    fn offset(&self, operation: u64) -> usize {
        WORDS_BYTES + (operation % self.pieces as u64) as usize * self.bytes()
    }

    fn take(&mut self, memory: &SharedMemory, operation: u64) {
        let offset = self.offset(operation);
        match self.work {
            Work::Copy => memory.read(offset, black_box(&mut self.own)),
            Work::Read => read_once(black_box(&self.own)),
        }
    }

    /// Two bare messages around each operation.
    pub(crate) fn between_messages(
        &mut self,
        signals: Signals<'_>,
        memory: &SharedMemory,
        clock: &dyn Runtime,
        plan: PhaseLength,
    ) -> Result<Phase, BenchError> {
        let has_two = self.copied().is_some();
        let mut watch = Watch::start(clock, plan);
        for value in 1..=plan.ops {
            exchange(signals, 1, value)?;
            self.take(memory, value);
            if has_two {
                signals.receive_copied(value)?;
            }
            watch.tick();
        }
        Ok(watch.stop())
    }

    /// Only the work, without messages.
    pub(crate) fn alone(
        &mut self,
        wait: LimitWait,
        memory: &SharedMemory,
        clock: &dyn Runtime,
        plan: PhaseLength,
    ) -> Result<Phase, BenchError> {
        if self.second.is_empty() {
            let mut watch = Watch::start(clock, plan);
            for operation in 1..=plan.ops {
                self.take(memory, operation);
                watch.tick();
            }
            return Ok(watch.stop());
        }
        let mut second = std::mem::take(&mut self.second);
        let measured = self.with_helper(&mut second, (wait, memory, clock), plan);
        self.second = second;
        measured
    }

    /// A thread on the second CPU copies the second part of each operation.
    fn with_helper(
        &mut self,
        second: &mut [u8],
        (wait, memory, clock): (LimitWait, &SharedMemory, &dyn Runtime),
        plan: PhaseLength,
    ) -> Result<Phase, BenchError> {
        let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let (bytes, pieces, own) = (self.own.len() + second.len(), self.pieces as u64, &mut self.own);
        let offset = |operation: u64| WORDS_BYTES + (operation % pieces) as usize * bytes;
        let (cpu, main) = (self.second_cpu, thread::current());
        thread::scope(|scope| {
            let (begun, done, first_bytes) = (&begun, &done, own.len());
            let helper = scope.spawn(move || -> Result<(), BenchError> {
                // If the CPU went away meanwhile, the scheduler chooses another.
                let _ = cpu.map(|cpu| cpus::pin(&[cpu]));
                for operation in 1..=plan.ops {
                    await_count(begun, operation, wait, clock)?;
                    memory.read(offset(operation) + first_bytes, black_box(second));
                    done.store(operation, Ordering::Release);
                    main.unpark();
                }
                Ok(())
            });
            let mut watch = Watch::start(clock, plan);
            for operation in 1..=plan.ops {
                begun.store(operation, Ordering::Release);
                if wait == LimitWait::Sleep {
                    helper.thread().unpark();
                }
                memory.read(offset(operation), black_box(own));
                await_count(done, operation, wait, clock)?;
                watch.tick();
            }
            let phase = watch.stop();
            helper
                .join()
                .map_err(|_| BenchError::Unexpected("a copying thread has panicked".to_owned()))??;
            Ok(phase)
        })
    }
}

/// Waits until `count` has reached `wanted`.
fn await_count(
    count: &AtomicU64,
    wanted: u64,
    wait: LimitWait,
    clock: &dyn Runtime,
) -> Result<(), BenchError> {
    let reached = || count.load(Ordering::Acquire) >= wanted;
    if wait != LimitWait::Sleep {
        return look(wait, clock, reached);
    }
    while !reached() {
        thread::park();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{COPY_ON_ONE, COPY_ON_TWO, Contents, ONE_CORE_BYTES, Placement, Work};

    #[test]
    fn two_cores_copy_what_is_large_where_there_are_two() {
        let two = Placement { name: "two", own: Some(0), peer: Some(1), has_two_cpus: true };
        let one = Placement { name: "one", own: Some(0), peer: Some(0), has_two_cpus: false };
        let large = ONE_CORE_BYTES + 3;
        assert_eq!(Contents::name(Work::Copy, large, two), COPY_ON_TWO);
        assert_eq!(Contents::name(Work::Copy, large, one), COPY_ON_ONE);
        assert_eq!(Contents::name(Work::Copy, ONE_CORE_BYTES, two), COPY_ON_ONE);
        let contents = Contents::new(Work::Copy, large, 1, two);
        let second = contents.copied().unwrap();
        assert_eq!((contents.bytes(), second.bytes), (large, large / 2));
        assert!(second.offset + second.bytes <= Contents::shared_bytes(large, 1));
        let alone = contents.on_one_core().unwrap();
        assert!(alone.copied().is_none() && alone.bytes() == large && alone.on_one_core().is_none());
        assert!(Contents::new(Work::Read, large, 1, two).copied().is_none());
    }
}
