//! Discovery: the workers at all addresses of a name, as they come and go.
//!
//! [`Worker::discover`] resolves a name, such as that of a headless Kubernetes service, connects to the worker at each address, and goes
//! on: it resolves the name again at an interval, and as soon as a peer is lost. No coordinator is needed.
//!
//! ```
//! use std::time::Duration;
//! use tensorwire::{Worker, discovery::Discovered};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! # let trainer = Worker::builder("trainer").start().await?;
//! # let name = trainer.address();
//! # /*
//! let name = "trainers:7000";
//! # */
//! let worker = Worker::client().start().await?;
//! let mut discovery = worker.discover(name).every(Duration::from_secs(2));
//! let mut peers = Vec::new();
//! while let Some(discovered) = discovery.next().await {
//!     match discovered? {
//!         Discovered::Found(peer) => peers.push(peer),
//!         Discovered::Gone(peer) => peers.retain(|known| known.name() != peer.name()),
//!         Discovered::Failed { address, error } => eprintln!("{address}: {error}"),
//!         _ => {}
//!     }
//! #   if !peers.is_empty() { break }
//! }
//! # assert_eq!(peers[0].name(), trainer.name());
//! # Ok(())
//! # }
//! ```

mod lookup;
mod search;

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt as _, Stream, StreamExt, stream::Next};
use tensorwire_fabric::BoxFuture;

use self::search::Search;
use crate::{
    control::host_and_port,
    error::WorkerError,
    worker::{Worker, peer::Peer},
};

/// The interval between two lookups, unless [`Discovery::every`] says otherwise.
const EVERY: Duration = Duration::from_secs(5);

/// The shortest interval.
const EVERY_MIN: Duration = Duration::from_millis(10);

impl Worker {
    /// The workers at all addresses that `name` (`host:port`) resolves to, as a stream of those that come and go. The
    /// system's resolver is asked, which returns all addresses of a headless Kubernetes service, of IPv4 and of IPv6.
    ///
    /// This worker's own address is left out. A worker with several addresses is one peer. Nothing is resolved or dialled
    /// until the stream is polled; its methods are the options. The stream keeps this worker running.
    ///
    /// Under TLS the certificate of each worker must contain the host of `name`, unless the setting `tls_names` allows any
    /// host (`TlsNames::AnyHost`).
    pub fn discover(&self, name: &str) -> Discovery {
        Discovery::new(self, name)
    }
}

/// A change of the workers behind a name.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Discovered {
    /// A worker that is connected, once in each [incarnation](Peer::incarnation), and again after it was
    /// [gone](Self::Gone).
    Found(Peer),
    /// A worker that was found: its session has ended, or the name no longer has its address. In the second case it stays
    /// connected, and transfers under way go on. This comes before the same name is found in another incarnation.
    Gone(Peer),
    /// An address cannot be used now. It is tried again after growing pauses of 50 ms to 2 s. The same error of an address
    /// is returned once, until the address is connected.
    Failed {
        /// The address, `host:port`.
        address: String,
        /// The cause. [`WorkerError::NameTaken`] if a worker at another address has the same name; its text has both
        /// addresses.
        error: WorkerError,
    },
}

/// The workers behind a name, made by [`Worker::discover`]: a [`Stream`] of [`Discovered`].
///
/// The name is resolved [at an interval](Self::every), and as soon as a worker is lost. A name that does not resolve is asked again, and
/// the peers stay; one line is logged then, and one when it resolves again. At most 16 addresses are dialled at a time, 8 of them after a
/// failure, so that addresses which do not answer leave room for others. At most 4,096 addresses are used, the first ones in the order of
/// their text; one line is logged if there are more.
///
/// The work is done while the stream is polled. Dropping the stream ends it; peers stay connected.
///
/// # Errors
/// [`WorkerError::Config`] for a bad name or interval, [`WorkerError::ShutDown`]. The stream ends after an error.
#[must_use = "nothing is discovered until the stream is polled"]
pub struct Discovery {
    /// `None` while `step` has it, and when the stream is over.
    search: Option<Search>,
    step: Option<BoxFuture<'static, (Search, Result<Discovered, WorkerError>)>>,
    /// Returned before anything else.
    problem: Option<WorkerError>,
}

impl fmt::Debug for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discovery").field("search", &self.search).finish_non_exhaustive()
    }
}

impl Discovery {
    fn new(worker: &Worker, name: &str) -> Self {
        let problem = check_name(name).err();
        Self { search: Some(Search::new(worker, name, EVERY)), step: None, problem }
    }

    /// The interval between two lookups of the name, at least 10 ms. Default: 5 s. Applies until the stream is polled.
    pub fn every(mut self, interval: Duration) -> Self {
        if interval < EVERY_MIN {
            self.problem.get_or_insert_with(|| WorkerError::Config {
                field: "every",
                value: format!("{interval:?}"),
                remedy: format!("use at least {EVERY_MIN:?}"),
            });
        }
        if let Some(search) = &mut self.search {
            search.set_interval(interval);
        }
        self
    }

    /// The next change, as from the stream. `None` when the stream is over.
    ///
    /// # Errors
    /// See [`Discovery`].
    ///
    /// # Cancel safety
    /// Cancel-safe: the next call goes on.
    #[allow(clippy::should_implement_trait)] // streams have this method through `StreamExt`
    pub fn next(&mut self) -> Next<'_, Self> {
        StreamExt::next(self)
    }
}

impl Stream for Discovery {
    type Item = Result<Discovered, WorkerError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(problem) = this.problem.take() {
            this.search = None;
            return Poll::Ready(Some(Err(problem)));
        }
        if let Some(search) = this.search.take() {
            this.step = Some(search.next().boxed());
        }
        let Some(step) = &mut this.step else { return Poll::Ready(None) };
        let Poll::Ready((search, discovered)) = step.poll_unpin(context) else { return Poll::Pending };
        this.step = None;
        // After an error the stream is over, and nothing is kept: the search has the worker.
        this.search = discovered.is_ok().then_some(search);
        Poll::Ready(Some(discovered))
    }
}

fn check_name(name: &str) -> Result<(), WorkerError> {
    let problem = match host_and_port(name) {
        Ok((_, 0)) => "its port is 0: give the port that the workers listen on",
        Ok(_) => return Ok(()),
        Err(problem) => problem,
    };
    Err(WorkerError::Config { field: "name", value: name.to_owned(), remedy: problem.to_owned() })
}
