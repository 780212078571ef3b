//! Handles SIGINT and SIGTERM if the kernel's default action does not suffice: process 1 has no default action, a file
//! with a temporary name must be removed, and a server sends its peers a goodbye.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use tokio::{
    runtime::Builder,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

/// The action of the next signal.
#[derive(Debug)]
pub(crate) enum AtSignal {
    /// Ends the process.
    End,
    /// Wakes the receiver; the signal after it ends the process.
    Wake(oneshot::Sender<()>),
}

/// Set once signals are handled.
static NEXT: Mutex<Option<AtSignal>> = Mutex::new(None);

/// Files to remove when a signal ends the process.
static REMOVED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A file with a temporary name: a signal that ends the process removes it, until this is dropped.
#[derive(Debug)]
pub(crate) struct RemovedAtEnd(PathBuf);

impl RemovedAtEnd {
    /// Of the file at `path`.
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        lock(&REMOVED).push(path.to_owned());
        let removed = Self(path.to_owned());
        let is_handled = lock(&NEXT).is_some();
        if !is_handled {
            at_signal(AtSignal::End)?;
        }
        Ok(removed)
    }
}

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        lock(&REMOVED).retain(|path| *path != self.0);
    }
}

/// Sets the action of the next SIGINT or SIGTERM. A separate thread runs it, because reading, writing and opening block
/// the others. A process that it ends exits with 128 plus the signal's number, as shells report it.
pub(crate) fn at_signal(next: AtSignal) -> io::Result<()> {
    if lock(&NEXT).replace(next).is_some() {
        return Ok(());
    }
    let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let signals = {
        let _context = runtime.enter();
        [signal(kinds[0])?, signal(kinds[1])?]
    };
    let run = move || runtime.block_on(handle(kinds, signals));
    thread::Builder::new().name("signals".to_owned()).spawn(run).map(drop)
}

async fn handle(kinds: [SignalKind; 2], [mut interrupt, mut terminate]: [Signal; 2]) {
    loop {
        let kind = tokio::select! {
            _ = interrupt.recv() => kinds[0],
            _ = terminate.recv() => kinds[1],
        };
        match lock(&NEXT).replace(AtSignal::End) {
            Some(AtSignal::Wake(waiting)) => {
                // Without a receiver the program is about to end.
                let _ = waiting.send(());
                continue;
            }
            Some(AtSignal::End) | None => {}
        }
        for path in lock(&REMOVED).iter() {
            // The file may have got its final name meanwhile.
            let _ = fs::remove_file(path);
        }
        std::process::exit(128 + kind.as_raw_value());
    }
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
