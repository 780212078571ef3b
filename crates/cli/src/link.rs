//! A server, its tensors, and the memory to receive them in.

use std::{sync::Arc, time::Duration};

use tensorwire::{
    FabricKind, Peer, PeerInfo, Sharing, Tensor, Worker, WorkerError,
    fabric::{Runtime, TokioRuntime},
    settings::Trust,
};
use tensorwire_fabric::timeout;

use crate::{
    arguments::Pull,
    failure::Failure,
    layout::Piece,
    plan::{Listing, Plan},
};

/// Base time limit of one tensor.
const FETCH_LIMIT: Duration = Duration::from_secs(60);

/// Additional time limit for each MiB.
const FETCH_LIMIT_PER_MIB: Duration = Duration::from_secs(1);

/// Pause between two attempts to reach a server that was lost.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Memory that one tensor takes in a pool besides its bytes, by rounding up.
const POOL_SLACK: u64 = 64 << 10;

/// A server whose tensors are known.
#[derive(Debug)]
pub(crate) struct Link {
    worker: Worker,
    server: Peer,
    /// The server's incarnation for which the plan was made.
    life: Option<u64>,
    pub(crate) plan: Arc<Plan>,
}

impl Link {
    /// Connects, lists the server's tensors, and allocates the memory for them. After the loss of a server, `before` is
    /// its plan, and the new plan must be the same.
    pub(crate) async fn open(arguments: &Pull, before: Option<&Plan>) -> Result<Self, Failure> {
        let _shown =
            arguments.console.phase(if before.is_some() { "connecting again" } else { "connecting" });
        let (mut worker, mut server) = connect(arguments, arguments.memory()).await?;
        let listing = Listing::ask(&server, arguments).await?;
        if before.is_some_and(|plan| plan.is_file) && !listing.is_file() {
            return Err(Failure::NotReady { address: arguments.address.clone() });
        }
        let life = server.incarnation();
        let least = listing.largest(arguments).saturating_add(POOL_SLACK);
        if least > arguments.memory() {
            worker.shutdown().await;
            // First, because this worker holds memory.
            drop((worker, server));
            (worker, server) = connect(arguments, least).await?;
        }
        let plan = Plan::make(&server, &listing, arguments).await?;
        let link = Self { worker, server, life, plan: Arc::new(plan) };
        link.check_life(arguments)?;
        if before.is_some_and(|before| !before.is_same(&link.plan)) {
            return Err(Failure::Changed { address: arguments.address.clone() });
        }
        link.reserve(arguments).await?;
        Ok(link)
    }

    /// Replaces this link, whose server was `lost`, by one to the same server with the same tensors. The memory of this link
    /// is freed before the new one takes any.
    pub(crate) async fn again(self, arguments: &Pull, lost: Failure) -> Result<Self, Failure> {
        let Some(seconds) = arguments.retry.filter(|_| lost.is_passing()) else { return Err(lost) };
        let limit = Duration::from_secs(seconds.into());
        tracing::warn!(%lost, "the server is lost, and is tried again for {seconds} s");
        let runtime = runtime()?;
        let Self { worker, server, plan, .. } = self;
        worker.shutdown().await;
        drop((worker, server));
        let mut last = lost;
        let again = async {
            loop {
                match Self::open(arguments, Some(&plan)).await {
                    Err(failure) if failure.is_passing() => last = failure,
                    ended => return ended,
                }
                runtime.sleep(RETRY_PAUSE).await;
            }
        };
        let ended = timeout(&runtime, limit, again).await;
        ended.unwrap_or_else(|_| Err(Failure::GaveUp { last: Box::new(last), limit }))
    }

    /// Fetches one tensor; on one host as a view of the server's memory, which takes no memory here.
    pub(crate) async fn fetch(&self, arguments: &Pull, piece: &Piece) -> Result<Tensor, Failure> {
        let mebibytes = u32::try_from(piece.bytes >> 20).unwrap_or(u32::MAX);
        let limit = FETCH_LIMIT.saturating_add(FETCH_LIMIT_PER_MIB.saturating_mul(mebibytes));
        let fetch = self.server.fetch(&piece.name).sharing(Sharing::View).timeout(limit).into_future();
        let fetched = fetch.await;
        // First, because an answer of another incarnation of the server is invalid.
        self.check_life(arguments)?;
        fetched.map_err(|error| of_memory(arguments, error))
    }

    /// Checks that the files are those of one moment: that the server has published no newer ones since the plan was made.
    pub(crate) async fn check_current(&self, arguments: &Pull) -> Result<(), Failure> {
        if !self.plan.is_file {
            return Ok(());
        }
        let listed = self.server.list().await?;
        self.check_life(arguments)?;
        match self.plan.is_current(&Listing::of(listed)) {
            true => Ok(()),
            false => Err(Failure::NewerVersion { address: arguments.address.clone() }),
        }
    }

    fn check_life(&self, arguments: &Pull) -> Result<(), Failure> {
        if self.server.incarnation() == self.life {
            return Ok(());
        }
        Err(Failure::Restarted { address: arguments.address.clone() })
    }

    /// Allocates the memory for all tensors in one piece: blocks that are allocated one by one, for sizes in any order,
    /// would fit fewer of the later tensors.
    async fn reserve(&self, arguments: &Pull) -> Result<(), Failure> {
        let is_viewed = self.info().and_then(|info| info.transport) == Some(FabricKind::SHM);
        if is_viewed && arguments.peering.trust.peers.trust() == Trust::Cluster {
            return Ok(());
        }
        let largest = self.plan.layout.pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        let bytes = in_flight(arguments).max(largest).min(self.plan.layout.data_bytes());
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let taken = self.worker.receive_pool().alloc(bytes).await;
        taken.map(drop).map_err(|error| of_memory(arguments, error.into()))
    }

    /// The worker's present information about the server.
    pub(crate) fn info(&self) -> Option<PeerInfo> {
        self.worker.peers().into_iter().find(|info| info.name == self.server.name())
    }

    /// Maximum bytes of the memory that tensors were received in.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.worker.receive_memory().block_bytes
    }

    /// Shuts the worker down, which notifies the server.
    pub(crate) async fn close(&self) {
        self.worker.shutdown().await;
    }
}

/// Bytes that tensors may take together. Tensors of different sizes leave gaps that are too small for later tensors, so
/// half of the memory is reserved for these gaps; and under [`Trust::Hostile`] a tensor is in memory twice while it
/// arrives.
pub(crate) fn in_flight(arguments: &Pull) -> u64 {
    let usable = arguments.memory() / 2;
    match arguments.peering.trust.peers.trust() {
        Trust::Hostile => usable / 2,
        _ => usable,
    }
}

/// Makes the error name the option that sets the memory.
pub(crate) fn of_memory(arguments: &Pull, error: WorkerError) -> Failure {
    match error {
        WorkerError::Memory(problem) => Failure::Memory { memory: arguments.memory(), problem },
        WorkerError::VersionTooLarge { version, bytes, held, .. } => {
            Failure::VersionTooLarge { memory: arguments.memory(), version, bytes, held }
        }
        error => error.into(),
    }
}

pub(crate) fn runtime() -> Result<TokioRuntime, Failure> {
    TokioRuntime::current().ok_or_else(|| Failure::Runtime(std::io::ErrorKind::Other.into()))
}

/// A unique name: a server distinguishes its clients by name. Process ids would not do, because each container counts its own.
fn name(runtime: &TokioRuntime) -> Result<String, Failure> {
    runtime.check_random().map_err(Failure::Runtime)?;
    // A task's number has 31 bits.
    Ok(format!("/job:pull/replica:0/task:{}", runtime.random() >> 33))
}

/// A worker that receives into at most `bytes`, and its server.
pub(crate) async fn connect(arguments: &Pull, bytes: u64) -> Result<(Worker, Peer), Failure> {
    let mut builder = Worker::builder(&name(&runtime()?)?);
    builder = builder.memory(|memory| {
        memory.receive_bytes = bytes;
        memory.bounce_bytes = bytes;
    });
    builder = builder.validation(arguments.validate.checksum.validation());
    if let Some(kind) = arguments.fabric.required() {
        builder = builder.require(kind);
    }
    let worker = arguments.peering.apply(builder)?.start().await?;
    let server = worker.peer_at(&arguments.address).await?;
    Ok((worker, server))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{name, runtime};

    #[tokio::test(flavor = "current_thread")]
    async fn pulls_with_one_process_id_have_different_names() {
        let names: HashSet<String> = (0..8).map(|_| name(&runtime().unwrap()).unwrap()).collect();
        assert!(names.len() > 1, "{names:?}");
        for name in names {
            let number = name.strip_prefix("/job:pull/replica:0/task:").unwrap();
            assert!(number.parse::<i32>().is_ok(), "{name}");
        }
    }
}
