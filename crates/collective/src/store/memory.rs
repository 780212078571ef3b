//! The store within one process.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::{FutureExt, future::ready};
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_rendezvous::{StoreService, Worker};

use super::{
    StoreError,
    backend::Backend,
    board::{Board, MemoryLimits},
    request::{Answer, Request},
    served::Served,
};

/// A map in this process, for groups whose ranks are tasks of one process, or [served](Self::serve) to other processes. Clones
/// share it.
///
/// A write wakes the waits for its key; nothing polls.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    inner: Arc<Served>,
    /// The address of the worker that serves it, once one does.
    served_at: Arc<OnceLock<String>>,
}

impl MemoryStore {
    /// An empty map with the default [`MemoryLimits`]. `runtime` measures the time limits of waits.
    pub fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self::within(MemoryLimits::default(), runtime)
    }

    /// As [`new`](Self::new), with other limits.
    pub fn within(limits: MemoryLimits, runtime: Arc<dyn Runtime>) -> Self {
        let inner = Arc::new(Served { board: Board::new(limits), runtime });
        Self { inner, served_at: Arc::default() }
    }

    /// Serves this store to the peers of `worker` at its port, until the last clone of the store or of the worker is dropped. Peers
    /// reach it by [`WorkerStore::connect`](super::WorkerStore::connect). A peer proves the secret, or its certificate, as for
    /// tensors, and counts towards the same limits
    /// ([`sessions_max`](tensorwire_rendezvous::Limits::sessions_max)).
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if the worker serves another store.
    pub fn serve(&self, worker: &Worker) -> Result<(), StoreError> {
        let service: Arc<dyn StoreService> = self.inner.clone();
        if !worker.serve_store(&service) {
            let detail =
                "this worker serves another store: use a clone of that one, or another worker".to_owned();
            return Err(StoreError::Unreachable {
                store: format!("the store at {}", worker.address()),
                detail,
            });
        }
        self.served_at.get_or_init(|| worker.address().to_owned());
        Ok(())
    }

    /// The number of waits in progress, over all clones and peers.
    pub fn waits(&self) -> usize {
        self.inner.board.waits()
    }
}

impl Backend for MemoryStore {
    fn name(&self) -> String {
        let at = self.served_at.get();
        at.map_or_else(|| "the store in memory".to_owned(), |at| format!("the store served at {at}"))
    }

    fn machine_address(&self) -> Option<IpAddr> {
        let Some(address) = self.served_at.get() else { return Some(Ipv4Addr::LOCALHOST.into()) };
        let address = address.parse::<SocketAddr>().ok().map(|address| address.ip());
        address.filter(|address| !address.is_unspecified())
    }

    fn runtime(&self) -> &dyn Runtime {
        &*self.inner.runtime
    }

    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        let board = &self.inner.board;
        let answer =
            board.execute(&request).map_err(|why| why.error(self.name(), board.limit(why), &request));
        ready(answer).boxed()
    }

    fn wait_for<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move {
            let board = &self.inner.board;
            let values = match timeout(self.runtime(), limit, board.wait(keys)).await {
                Ok(Err(why)) => {
                    return Err(why.error(self.name(), board.limit(why), &Request::Get { keys: Vec::new() }));
                }
                Ok(Ok(values)) => Some(values),
                // The last value may have arrived just as the limit expired.
                Err(_) => board.get(keys).into_iter().collect(),
            };
            let missing = || StoreError::TimedOut { store: self.name(), limit, missing: board.missing(keys) };
            Ok(values.ok_or_else(missing)?.iter().map(|value| value.to_vec()).collect())
        }
        .boxed()
    }
}
