//! A mapped file. Before another process changes it, it is copied into memory.

use std::{
    fs,
    future::pending,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    thread,
    time::Duration,
};

use futures::future::{Either, select};
use tensorwire::{
    Worker, WorkerError,
    fabric::{Runtime, TokioRuntime},
    memory::{Buf, Joined, Lease, Mapping},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

use tensorwire_protocol::text::escaped;

use crate::{console::Console, failure::Failure};

/// How many seconds the kernel delays a process that wants to change a leased file; 0 means without limit.
const LEASE_BREAK_TIME: &str = "/proc/sys/fs/lease-break-time";

/// The kernel's signal that another process wants to change a leased file: SIGIO.
#[derive(Debug)]
pub(crate) struct Changes(Signal);

impl Changes {
    /// Handles the signal from now on. Without a handler it would end the program.
    pub(crate) fn listen() -> Result<Self, Failure> {
        signal(SignalKind::io()).map(Self).map_err(Failure::Runtime)
    }
}

/// A leased mapping that a worker sends from.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    mapping: Arc<Mapping>,
    joined: Joined,
    changes: Changes,
}

impl MappedFile {
    /// Lets `worker` send from `mapping` for as long as the returned value lives.
    pub(crate) fn join(
        worker: &Worker,
        path: &Path,
        mapping: Arc<Mapping>,
        changes: Changes,
    ) -> Result<Self, Failure> {
        let joined = worker.user_memory().join(mapping.clone()).map_err(WorkerError::from)?;
        Ok(Self { path: path.to_owned(), mapping, joined, changes })
    }

    /// All bytes of the file.
    pub(crate) fn buf(&self) -> &Buf {
        self.joined.buf()
    }

    /// Keeps the bytes unchanged: when another process wants to change the file, this first copies it into memory.
    /// Returns only if that fails; then the program must end, because the file may be truncated at any time.
    pub(crate) async fn until_lost(mut self, console: Console) -> Failure {
        while !self.mapping.change_is_awaited() {
            if self.changes.0.recv().await.is_none() {
                pending::<()>().await;
            }
        }
        match self.copied().await {
            Ok(lease) => {
                self.joined.register_again();
                // If the release fails, the copy may be torn.
                if let Err(lost) = lease.map_or(Ok(()), Lease::release) {
                    return Failure::Unmapped { path: self.path, problem: lost.to_string() };
                }
                let path = escaped(&self.path.display().to_string()).to_string();
                console.say(&format!("somebody changes {path}: serving a copy in memory\n"));
                pending().await
            }
            Err(problem) => Failure::Unmapped { path: self.path, problem },
        }
    }

    /// Copies the file within half of the lease-break time; the other half is for ending the program.
    async fn copied(&self) -> Result<Option<Lease>, String> {
        let (done, copied) = oneshot::channel();
        let mapping = self.mapping.clone();
        let copy = move || done.send(mapping.detach().map_err(|error| error.to_string()));
        // In a separate thread, because tensors are served meanwhile.
        thread::Builder::new().spawn(copy).map_err(|error| error.to_string())?;
        let limit = lease_break_time().map(|time| time / 2);
        let too_late = async {
            match (limit, TokioRuntime::current()) {
                (Some(limit), Some(runtime)) => runtime.sleep(limit).await,
                _ => pending().await,
            }
        };
        match select(copied, pin!(too_late)).await {
            Either::Left((copied, _)) => {
                copied.unwrap_or_else(|_| Err("the copying thread has ended".to_owned()))
            }
            Either::Right(_) => Err(format!("it took longer than half of {LEASE_BREAK_TIME}")),
        }
    }
}

fn lease_break_time() -> Option<Duration> {
    let seconds = fs::read_to_string(LEASE_BREAK_TIME).ok()?.trim().parse().ok()?;
    (seconds > 0).then(|| Duration::from_secs(seconds))
}
