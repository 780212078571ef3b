//! Protection domains: registered blocks, and queue pairs that may use them.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tensorwire_memory::{Block, BlockId};

use tensorwire_fabric::{
    Access, BoxFuture, ConnectParams, Connected, ConnectionData, Domain, FabricError, FabricKind, Prepared,
    QueuePair, QueuePairConfig, QueuePairCore, RegionGeneration, RemoteRegion, Role, Spinner, timeout,
};

use super::{
    DeviceLimits, Endpoint, VerbsError,
    adapter::Adapter,
    completion::CompletionQueue,
    driver::start,
    endpoint::{host_name, sequence},
    error::{fabric_error, loss},
    link::VerbsLink,
    message::SIGNALS,
    opened::{Child, Opened},
    pending::RequestLimits,
    queue_pair::{Depths, RawQueuePair, Way},
    registrations::Registrations,
    round_trip::RoundTrip,
    send::SendSide,
    send_queue::SendQueue,
};

/// A protection domain of the device.
#[derive(Debug)]
pub(super) struct VerbsDomain {
    adapter: Arc<Adapter>,
    registrations: Arc<Registrations>,
    spinner: Arc<Spinner>,
}

impl VerbsDomain {
    pub(super) fn new(adapter: Arc<Adapter>, spinner: Arc<Spinner>) -> Result<Self, VerbsError> {
        let generation = RegionGeneration(sequence(adapter.runtime.random()));
        let registrations = Arc::new(Registrations::new(adapter.clone(), generation));
        registrations.on(&adapter.opened()?)?;
        Ok(Self { adapter, registrations, spinner })
    }

    /// Entries of the send and the receive queue. The send queue has the smallest depth of those that the connection,
    /// the settings and the device allow. The receive queue has the depth that the connection asks for. It is an error
    /// if the device allows less: the peer sends as many immediates as the connection data promise.
    fn entries(&self, config: QueuePairConfig, limits: &DeviceLimits) -> Result<(u32, u32), FabricError> {
        let allowed = limits.work_requests.saturating_sub(SIGNALS).max(1);
        let send = config.send_depth.min(self.adapter.settings.queue_depth()).min(allowed) + SIGNALS;
        let receive = receives(config);
        let refused = |what: &str, wanted: u32, limit: u32| {
            let detail = format!(
                "{config:?} needs {what} of {wanted} entries, and the limit of RDMA device {} is {limit}: use \
                 smaller depths",
                self.adapter.device
            );
            Err(FabricError::device(FabricKind::VERBS, "making a queue pair", std::io::Error::other(detail)))
        };
        if receive > limits.work_requests {
            return refused("a receive queue", receive, limits.work_requests);
        }
        match send.saturating_add(receive) {
            both if both > limits.completions => refused("a completion queue", both, limits.completions),
            _ => Ok((send, receive)),
        }
    }

    fn prepare_on(
        &self,
        opened: &Arc<Opened>,
        config: QueuePairConfig,
    ) -> Result<VerbsPrepared, FabricError> {
        let (send, receive) = self.entries(config, &opened.limits)?;
        let way = Way::new(&self.adapter.settings, &opened.port, &opened.source, opened.reads_started());
        let made = self.make_ends(opened, &way, (send, receive)).map_err(|error| fabric_error(&error))?;
        let here = Endpoint {
            link: opened.port.link,
            kind: opened.source.kind,
            mtu: opened.mtu,
            service_level: self.adapter.settings.service_level.unwrap_or(0),
            partition_key: opened.partition_key,
            local_identifier: opened.port.local_identifier,
            number: made.number,
            sequence: sequence(self.adapter.runtime.random()),
            piece_bytes: opened.piece_bytes(),
            send_depth: send - SIGNALS,
            receive_depth: config.receive_depth,
            gid: opened.source.gid,
            reads: opened.reads_served(),
            host: host_name(),
        };
        let limits = opened.request_limits();
        let (opened, registrations) = (Arc::downgrade(opened), self.registrations.clone());
        let (adapter, spinner) = (self.adapter.clone(), self.spinner.clone());
        Ok(VerbsPrepared {
            ends: made.ends,
            opened,
            adapter,
            registrations,
            spinner,
            config,
            here,
            way,
            limits,
        })
    }

    fn make_ends(
        &self,
        opened: &Arc<Opened>,
        way: &Way,
        (send, receive): (u32, u32),
    ) -> Result<MadeEnds, VerbsError> {
        let protection = self.registrations.on(opened)?;
        let completions = CompletionQueue::new(opened.context.clone(), send + receive)?;
        let depths = Depths { send, receive, ranges: opened.request_limits().ranges as u32 };
        let queue_pair = RawQueuePair::new(protection, completions.clone(), depths)?;
        queue_pair.initialize(way)?;
        queue_pair.post_receives(receive as usize).map_err(|refused| refused.error)?;
        let number = queue_pair.number();
        let ends = Arc::new(Ends(Mutex::new(Some((queue_pair, completions)))));
        let weak = Arc::downgrade(&ends);
        opened.adopt(weak)?;
        Ok(MadeEnds { ends, number })
    }
}

/// Entries of the receive queue. An immediate may take three: its own, and those of the two messages that carry the
/// length of its write. Each of the connection's own messages takes one more.
fn receives(config: QueuePairConfig) -> u32 {
    config.receive_depth.saturating_mul(3).saturating_add(SIGNALS)
}

impl Domain for VerbsDomain {
    fn kind(&self) -> FabricKind {
        FabricKind::VERBS
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        self.registrations.register(block, access).map_err(|error| fabric_error(&error))
    }

    fn deregister(&self, block: BlockId) {
        self.registrations.deregister(block);
    }

    fn epoch(&self) -> u64 {
        self.registrations.epoch()
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let opened = self.adapter.opened().map_err(|error| fabric_error(&error))?;
        Ok(Box::new(self.prepare_on(&opened, config)?))
    }
}

/// A queue pair that is not connected yet, and its completion queue. Both are destroyed when the device is lost.
struct Ends(Mutex<Option<(RawQueuePair, Arc<CompletionQueue>)>>);

struct MadeEnds {
    ends: Arc<Ends>,
    number: u32,
}

impl Ends {
    fn take(&self) -> Option<(RawQueuePair, Arc<CompletionQueue>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Child for Ends {
    fn device_lost(&self, _failure: &FabricError) {
        drop(self.take());
    }
}

/// A queue pair with its receives posted, not connected yet.
struct VerbsPrepared {
    ends: Arc<Ends>,
    /// Weak, so that waiting for a peer does not keep the device open.
    opened: Weak<Opened>,
    adapter: Arc<Adapter>,
    registrations: Arc<Registrations>,
    spinner: Arc<Spinner>,
    config: QueuePairConfig,
    here: Endpoint,
    way: Way,
    limits: RequestLimits,
}

impl fmt::Debug for VerbsPrepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsPrepared").field("here", &self.here.number).finish_non_exhaustive()
    }
}

impl VerbsPrepared {
    /// Moves the queue pair to the state in which it sends and receives.
    fn attach(&self, queue_pair: &RawQueuePair, peer: &ConnectionData) -> Result<Endpoint, FabricError> {
        let failed = |step, detail| FabricError::Connect { kind: FabricKind::VERBS, step, detail };
        let peer =
            Endpoint::decode(peer).map_err(|detail| failed("reading the peer's connection data", detail))?;
        self.here.check(&peer).map_err(|detail| failed("comparing the two ports", detail))?;
        let result = queue_pair.connect(&self.here, &self.way, &peer);
        result.map_err(|error| {
            let detail =
                format!("{error}; is {} of {} reachable from {}?", peer.gid, peer.host, self.here.gid);
            failed("finding a route to the peer", detail)
        })?;
        Ok(peer)
    }

    /// Connects this side's queue pair. From here on the connection ends if the device is lost.
    fn join(&self, peer: &ConnectionData) -> Result<(Arc<QueuePairCore>, Arc<VerbsLink>), FabricError> {
        let (queue_pair, completions) = self.ends.take().ok_or_else(|| self.lost())?;
        let peer = self.attach(&queue_pair, peer)?;
        let mut capabilities = self.adapter.capabilities;
        capabilities.read = self.way.reads_of(&peer) > 0;
        let core = Arc::new(QueuePairCore::new(FabricKind::VERBS, self.config, capabilities));
        let (receive, send) = (receives(self.config) as usize, self.here.send_depth as usize);
        let clock = &self.adapter.runtime;
        let round_trip = RoundTrip::new(clock.clone());
        let send = SendSide::new(queue_pair, receive, SendQueue::new(send, self.limits), round_trip);
        let domain = self.registrations.clone();
        let link = VerbsLink::new(core.clone(), domain, completions, send, self.limits, &peer);
        let link = Arc::new(link);
        let weak = Arc::downgrade(&link);
        let adopted = self.opened.upgrade().is_some_and(|opened| opened.adopt(weak).is_ok());
        if !adopted {
            link.abandon(&self.lost());
        }
        Ok((core, link))
    }

    fn lost(&self) -> FabricError {
        self.adapter.lost().map_or(FabricError::Closed, |lost| loss(&lost))
    }
}

impl Prepared for VerbsPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.here.encode()
    }

    /// The dialer sends a greeting, and the acceptor waits for it. The acceptor's `connect` must begin within the
    /// device's retry time (see [`Rdma::timeout`](super::Rdma::timeout)), or the greeting fails.
    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        Box::pin(async move {
            let (core, link) = self.join(&params.peer)?;
            let runtime = self.adapter.runtime.clone();
            let driver = start(link.clone(), runtime.clone(), self.spinner.clone())?;
            let mut driver: BoxFuture<'static, ()> = Box::pin(driver);
            // From here on dropping this value ends the connection.
            let queue_pair = QueuePair::new(core, link.clone());
            if params.role == Role::Dialer {
                link.greet();
            }
            let established = poll_fn(|context| {
                if driver.as_mut().poll(context).is_ready() {
                    // The driver has ended, and a future that has ended must not be polled again.
                    driver = Box::pin(std::future::ready(()));
                }
                link.poll_established(context)
            });
            match timeout(&*runtime, params.limit, established).await {
                Ok(result) => result.map(|()| Connected { queue_pair, driver }).map_err(|failure| {
                    FabricError::Connect {
                        kind: FabricKind::VERBS,
                        step: "greeting the peer",
                        detail: failure.to_string(),
                    }
                }),
                Err(_) => Err(FabricError::ConnectTimeout {
                    kind: FabricKind::VERBS,
                    limit_ms: u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX),
                }),
            }
        })
    }
}

#[cfg(test)]
mod tests;
