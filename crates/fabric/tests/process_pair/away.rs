//! A fabric whose work another process does, with its own devices and queue pairs. Operations that are posted here are
//! posted there; completions, arrivals and failures there are reported here.

use std::{
    collections::HashMap,
    fs::File,
    os::fd::AsRawFd,
    process,
    sync::{Arc, Mutex},
};

use futures::channel::oneshot;
use tensorwire_fabric::{
    Access, Arrival, BoxFuture, Capabilities, ConnectParams, Connected, ConnectionData, Domain, Effort,
    Fabric, FabricError, FabricKind, Link, Look, LossCause, Prepared, QueuePairConfig, QueuePairCore,
    QueuePairStats, ReadDestination, ReadPart, RemoteRange, RemoteRegion, SlotKey, WorkRequest,
};
use tensorwire_memory::{Block, BlockId, Buf};

use super::{
    message::{Command, Number, Part, Place, Work},
    other::{Connecting, Other},
    pages,
    wire::Wire,
};

/// The other process's description of a fabric that it has made.
#[derive(Debug, Clone)]
pub(super) struct Made {
    /// Its process.
    pub(super) process: u32,
    pub(super) kind: FabricKind,
    pub(super) capabilities: Capabilities,
    pub(super) reach: Vec<u8>,
}

impl Wire for Made {
    fn put(&self, out: &mut Vec<u8>) {
        self.process.put(out);
        self.kind.put(out);
        self.capabilities.put(out);
        self.reach.put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        Self {
            process: Wire::get(from),
            kind: Wire::get(from),
            capabilities: Wire::get(from),
            reach: Wire::get(from),
        }
    }
}

/// A fabric of the other process.
#[derive(Debug)]
pub(super) struct AwayFabric {
    number: Number,
    made: Made,
    other: Arc<Other>,
}

impl AwayFabric {
    pub(super) fn make(other: Arc<Other>) -> Self {
        let number = other.number();
        let made: Made = other.call(|call| Command::MakeFabric { call, fabric: number }).unwrap();
        assert_ne!(made.process, process::id(), "both ends are in one process");
        Self { number, made, other }
    }
}

impl Drop for AwayFabric {
    fn drop(&mut self) {
        self.other.post(&Command::DropFabric { fabric: self.number });
    }
}

impl Fabric for AwayFabric {
    fn kind(&self) -> FabricKind {
        self.made.kind
    }

    fn capabilities(&self) -> Capabilities {
        self.made.capabilities
    }

    fn reach(&self) -> Vec<u8> {
        self.made.reach.clone()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let (number, other) = (self.other.number(), self.other.clone());
        other.call::<()>(|call| Command::OpenDomain { call, fabric: self.number, domain: number })?;
        Ok(Arc::new(AwayDomain { number, kind: self.made.kind, blocks: Arc::default(), other }))
    }
}

/// A domain of the other process.
#[derive(Debug)]
struct AwayDomain {
    number: Number,
    kind: FabricKind,
    blocks: Arc<SharedBlocks>,
    other: Arc<Other>,
}

/// The blocks of a domain, which both processes map.
#[derive(Debug, Default)]
pub(super) struct SharedBlocks(Mutex<HashMap<BlockId, SharedBlock>>);

#[derive(Debug)]
struct SharedBlock {
    region: RemoteRegion,
    /// Mapped while the domain or one of its queue pairs lives.
    _block: Block,
    /// Open for the same time: the other process opens it by its number.
    _pages: File,
}

impl SharedBlocks {
    /// Where `length` bytes at `offset` of `block` are.
    fn place(
        &self,
        kind: FabricKind,
        block: Option<&Block>,
        offset: usize,
        length: u64,
    ) -> Result<Place, FabricError> {
        let block = block.map_or(0, |block| block.id().get());
        let is_known = self.0.lock().unwrap().keys().any(|known| known.get() == block);
        if length > 0 && !is_known {
            return Err(FabricError::NotRegistered { kind, block });
        }
        Ok(Place { block, offset: offset as u64, length })
    }
}

impl Drop for AwayDomain {
    fn drop(&mut self) {
        self.other.post(&Command::DropDomain { domain: self.number });
    }
}

impl Domain for AwayDomain {
    fn kind(&self) -> FabricKind {
        self.kind
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        let mut blocks = self.blocks.0.lock().unwrap();
        if let Some(known) = blocks.get(&block.id()) {
            return Ok(known.region);
        }
        let pages = pages::share(block);
        let region = self.other.call(|call| Command::Register {
            call,
            domain: self.number,
            block: block.id().get(),
            descriptor: pages.as_raw_fd().cast_unsigned(),
            length: block.length() as u64,
            access,
        })?;
        blocks.insert(block.id(), SharedBlock { region, _block: block.clone(), _pages: pages });
        Ok(region)
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let end = self.other.number();
        let data = self.other.call(|call| Command::Prepare { call, domain: self.number, end, config })?;
        let (other, blocks) = (self.other.clone(), self.blocks.clone());
        Ok(Box::new(AwayPrepared { end: Abandoned { end, other }, kind: self.kind, config, data, blocks }))
    }
}

/// An end of the other process that is not connected yet.
#[derive(Debug)]
struct AwayPrepared {
    end: Abandoned,
    kind: FabricKind,
    config: QueuePairConfig,
    data: ConnectionData,
    blocks: Arc<SharedBlocks>,
}

/// Dropping it drops the prepared side in the other process, unless that is connected by then.
#[derive(Debug)]
struct Abandoned {
    end: Number,
    other: Arc<Other>,
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.other.post(&Command::Abandon { end: self.end });
    }
}

impl Prepared for AwayPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.data.clone()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        let Self { end, kind, config, blocks, .. } = *self;
        Box::pin(async move {
            let (done, connected) = oneshot::channel();
            let other = end.other.clone();
            end.other.expect_connected(end.end, Connecting { kind, config, blocks, other, done });
            end.other.post(&Command::Connect { end: end.end, params });
            let queue_pair = connected.await.expect("the other process has ended")?;
            // The other process drives.
            Ok(Connected { queue_pair, driver: Box::pin(std::future::pending()) })
        })
    }
}

/// A queue pair of the other process.
///
/// An arrival is taken there when a task polls for one here and none is left. So untaken arrivals hold their receives
/// there, where the peer's immediates need them.
#[derive(Debug)]
pub(super) struct AwayLink {
    end: Number,
    core: Arc<QueuePairCore>,
    other: Arc<Other>,
    blocks: Arc<SharedBlocks>,
    /// Whether an arrival was requested and has not come.
    is_asked: Mutex<bool>,
}

impl AwayLink {
    pub(super) fn new(
        end: Number,
        core: Arc<QueuePairCore>,
        other: Arc<Other>,
        blocks: Arc<SharedBlocks>,
    ) -> Self {
        Self { end, core, other, blocks, is_asked: Mutex::new(false) }
    }

    pub(super) fn completed(&self, key: SlotKey, result: Result<(), FabricError>) {
        let length = self.core.slots().request(key).map_or(0, |request| request.length());
        self.core.complete(key, length, result);
    }

    pub(super) fn arrived(&self, arrival: Arrival) {
        // An arrival that was taken there while this side closed the queue pair is dropped.
        if self.core.failure().is_none() {
            let mut is_asked = self.is_asked.lock().unwrap();
            // Not passed to a sink: the sink would find `is_asked` locked when it posts and polls.
            self.core.queue_arrival(arrival).expect("more arrivals than receives");
            *is_asked = false;
        }
    }

    /// Reports a failure. Outstanding operations end by their own completions.
    pub(super) fn failed(&self, failure: &FabricError) {
        self.core.fail_arrivals(failure);
    }

    pub(super) fn drained(&self) {
        self.core.mark_drained();
    }

    /// Reports that the other process has ended; its device accesses no memory any more.
    pub(super) fn lost(&self) {
        let (kind, cause) = (self.core.kind(), LossCause::EndOfFile);
        let detail = "the process of a queue pair's other half has ended".to_owned();
        self.core.fail(&FabricError::PeerLost { kind, cause, detail });
        self.core.mark_drained();
    }

    fn sent(&self, local: &Buf) -> Result<Place, FabricError> {
        self.blocks.place(self.core.kind(), local.block(), local.offset(), local.len() as u64)
    }

    fn read(&self, into: &ReadDestination) -> Result<Place, FabricError> {
        let target = into.target()?;
        let block = target.as_ref().map(|(block, _)| block);
        self.blocks.place(self.core.kind(), block, into.offset().unwrap_or(0), into.length())
    }

    /// `request` in the form that the other process can post.
    fn work(&self, request: &WorkRequest) -> Result<(Work, Vec<RemoteRegion>), FabricError> {
        let mut regions = Vec::new();
        let mut aim = |bytes: u64, remote: Option<&RemoteRange>| {
            regions.extend(self.core.remote_regions().aim(bytes, remote)?);
            Ok::<_, FabricError>(())
        };
        let work = match request {
            WorkRequest::Write { local, remote, immediate } => {
                aim(local.len() as u64, remote.as_ref())?;
                Work::Write { local: self.sent(local)?, remote: *remote, immediate: *immediate }
            }
            WorkRequest::WriteVectored { segments, immediate } => {
                let part = |segment: &tensorwire_fabric::Segment| {
                    aim(segment.local.len() as u64, Some(&segment.remote))?;
                    Ok(Part { local: self.sent(&segment.local)?, remote: segment.remote })
                };
                let segments = segments.iter().map(part).collect::<Result<_, FabricError>>()?;
                Work::WriteVectored { segments, immediate: *immediate }
            }
            WorkRequest::Read { .. } | WorkRequest::ReadVectored { .. } => {
                let part = |part: ReadPart<'_>| {
                    aim(part.into.length(), Some(part.remote))?;
                    Ok(Part { local: self.read(part.into)?, remote: *part.remote })
                };
                let mut segments = request.reads().map(part).collect::<Result<Vec<_>, FabricError>>()?;
                match request {
                    WorkRequest::Read { .. } => Work::Read { part: segments.remove(0) },
                    _ => Work::ReadVectored { segments },
                }
            }
            other => return Err(other.unsupported(self.core.kind())),
        };
        Ok((work, regions))
    }
}

impl Link for AwayLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        match self.work(request) {
            Ok((work, regions)) => {
                self.other.post(&Command::Submit { end: self.end, key: key.to_bits(), work, regions });
            }
            Err(refused) => self.core.complete(key, 0, Err(refused)),
        }
    }

    fn progress(&self, _: Effort) -> Look {
        let mut is_asked = self.is_asked.lock().unwrap();
        if !*is_asked && self.core.arrivals_waiting() == 0 && self.core.failure().is_none() {
            *is_asked = true;
            self.other.post(&Command::TakeArrival { end: self.end });
        }
        Look::Idle
    }

    fn start_close(&self) {
        self.other.post(&Command::Close { end: self.end });
    }

    /// The other process's counters.
    fn stats(&self, _here: QueuePairStats) -> QueuePairStats {
        self.other.call(|call| Command::Stats { call, end: self.end }).unwrap()
    }
}
