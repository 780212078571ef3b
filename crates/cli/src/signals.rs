//! What SIGINT and SIGTERM do where the kernel's default action does not suffice: process 1 has none, a file that has a name
//! would stay, and a server says goodbye.

use std::{
    fs, io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use tokio::{
    runtime::Builder,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

/// What the next signal does.
#[derive(Debug)]
pub(crate) enum AtSignal {
    /// Ends the process.
    End,
    /// Removes a file, and ends the process.
    Remove(PathBuf),
    /// Wakes the receiver; the signal after it ends the process.
    Wake(oneshot::Sender<()>),
}

/// Set once signals are handled.
static NEXT: Mutex<Option<AtSignal>> = Mutex::new(None);

/// Makes the next SIGINT or SIGTERM do this, in a thread of its own, because reading, writing and opening block the others. A
/// process that it ends has the exit code 128 and the signal's number, as shells report it.
pub(crate) fn at_signal(next: AtSignal) -> io::Result<()> {
    if lock().replace(next).is_some() {
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
        match lock().replace(AtSignal::End) {
            Some(AtSignal::Wake(waiting)) => {
                // Without a receiver the program is about to end.
                let _ = waiting.send(());
                continue;
            }
            Some(AtSignal::Remove(path)) => {
                // It may have got its final name meanwhile.
                let _ = fs::remove_file(path);
            }
            Some(AtSignal::End) | None => {}
        }
        std::process::exit(128 + kind.as_raw_value());
    }
}

fn lock() -> MutexGuard<'static, Option<AtSignal>> {
    NEXT.lock().unwrap_or_else(PoisonError::into_inner)
}
