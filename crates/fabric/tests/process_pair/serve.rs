//! The other process: it executes the commands of the test's process with the fabric under test.

use std::{
    collections::HashMap,
    fs::File,
    os::{
        fd::AsFd,
        unix::{fs::FileExt, net::UnixStream, process::parent_id},
    },
    panic, process,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use futures::{
    StreamExt,
    channel::mpsc,
    future::{AbortHandle, Either, abortable, select},
};
use tensorwire_fabric::{
    Access, Arrival, ConnectParams, Domain, Fabric, FabricError, Prepared, QueuePair, RemoteRegion, Runtime,
    Segment, TokioRuntime, WorkRequest,
};
use tensorwire_memory::{
    Block, BlockVisitor, Buf, BufMut, Exposure, GrantEnd, Granted, Pool, PoolConfig, VisitError,
};

use crate::contract::pair::RegisteredPool;

use super::{
    Ends, Side,
    away::Made,
    message::{Command, Event, Number, Place, Work, hear, say},
    pages,
    wire::Wire,
};

/// How soon the end of a connection is reported if no command waits for it.
const TICK: Duration = Duration::from_millis(2);

/// Serves one test after the other until the test's process is gone.
pub(super) fn serve(ends: &'static Ends) {
    // No other task notices that a task has panicked.
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        eprintln!("in the other process:");
        usual(what);
        process::abort();
    }));
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let (queue, mut commands) = mpsc::unbounded();
    let from = stream.try_clone().unwrap();
    thread::spawn(move || while hear(&from).is_some_and(|command| queue.unbounded_send(command).is_ok()) {});
    let events = Events(Arc::new(Mutex::new(stream)));
    loop {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let served = runtime.block_on(async {
            let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
            Session::new(ends, runtime, events.clone()).serve(&mut commands).await
        });
        // Everything that the test left ends with its runtime, as with one process.
        drop(runtime);
        let Some(call) = served else { return };
        events.answer(call, Ok(()));
    }
}

/// Sends events to the test's process.
#[derive(Clone)]
struct Events(Arc<Mutex<UnixStream>>);

impl Events {
    fn tell(&self, event: &Event) {
        // If that process is gone, this one ends too.
        let _gone = say(&*self.0.lock().unwrap(), event);
    }

    fn answer<T: Wire>(&self, call: Number, answer: Result<T, FabricError>) {
        let answer = answer.map(|value| {
            let mut bytes = Vec::new();
            value.put(&mut bytes);
            bytes
        });
        self.tell(&Event::Answered { call, answer });
    }
}

/// The objects of one test in this process.
struct Session {
    ends: &'static Ends,
    runtime: Arc<dyn Runtime>,
    events: Events,
    fabrics: HashMap<Number, Arc<dyn Fabric>>,
    domains: HashMap<Number, Arc<Hosted>>,
    connections: Arc<Mutex<HashMap<Number, End>>>,
}

/// An end of a connection, and the memory of its domain.
struct End {
    domain: Arc<Hosted>,
    state: State,
}

enum State {
    Prepared(Box<dyn Prepared>),
    Connecting(AbortHandle),
    Connected { queue_pair: QueuePair, asks: mpsc::UnboundedSender<()> },
}

impl Session {
    fn new(ends: &'static Ends, runtime: Arc<dyn Runtime>, events: Events) -> Self {
        let (fabrics, domains) = (HashMap::new(), HashMap::new());
        let connections = Arc::default();
        Self { ends, runtime, events, fabrics, domains, connections }
    }

    /// Returns the number of the call that ends the test; `None` if the test's process has ended.
    async fn serve(mut self, commands: &mut mpsc::UnboundedReceiver<Command>) -> Option<Number> {
        loop {
            match commands.next().await? {
                Command::EndTest { call } => return Some(call),
                command => self.obey(command),
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::MakeFabric { call, fabric } => {
                let made = (self.ends.fabric)(self.runtime.clone(), Side::Right);
                let (kind, capabilities, reach) = (made.kind(), made.capabilities(), made.reach());
                self.fabrics.insert(fabric, made);
                self.events.answer(call, Ok(Made { process: process::id(), kind, capabilities, reach }));
            }
            Command::DropFabric { fabric } => drop(self.fabrics.remove(&fabric)),
            Command::OpenDomain { call, fabric, domain } => {
                let opened = self.fabrics[&fabric].open_domain().map(Hosted::new);
                let answer = opened.map(|opened| drop(self.domains.insert(domain, Arc::new(opened))));
                self.events.answer(call, answer);
            }
            Command::DropDomain { domain } => drop(self.domains.remove(&domain)),
            Command::Register { call, domain, block, descriptor, length, access } => {
                let pages = pages::of_process(parent_id(), descriptor);
                let region = self.domains[&domain].register(block, pages, length, access);
                self.events.answer(call, Ok(region));
            }
            Command::Prepare { call, domain, end, config } => {
                let domain = self.domains[&domain].clone();
                let prepared = domain.domain.prepare(config).map(|prepared| {
                    let data = prepared.connection_data();
                    let end_of_it = End { domain, state: State::Prepared(prepared) };
                    self.connections.lock().unwrap().insert(end, end_of_it);
                    data
                });
                self.events.answer(call, prepared);
            }
            command => self.obey_connection(command),
        }
    }

    fn obey_connection(&mut self, command: Command) {
        match command {
            Command::Connect { end, params } => self.connect(end, params),
            Command::Abandon { end } => self.abandon(end),
            Command::Submit { end, key, work, regions } => {
                let (domain, queue_pair) = self.connected(end);
                regions.into_iter().for_each(|region| queue_pair.add_remote_region(region));
                self.submit(end, key, &domain, &queue_pair, work);
            }
            Command::TakeArrival { end } => {
                if let Some(End { state: State::Connected { asks, .. }, .. }) =
                    self.connections.lock().unwrap().get(&end)
                {
                    let _over = asks.unbounded_send(());
                }
            }
            Command::Stats { call, end } => {
                let (_, queue_pair) = self.connected(end);
                self.events.answer(call, Ok(queue_pair.stats()));
            }
            Command::Close { end } => {
                let (_, queue_pair) = self.connected(end);
                let events = self.events.clone();
                let close = async move {
                    queue_pair.close().await;
                    events.tell(&Event::Drained { end });
                };
                self.runtime.spawn("close", Box::pin(close));
            }
            other => panic!("no place for {other:?}"),
        }
    }

    fn connected(&self, end: Number) -> (Arc<Hosted>, QueuePair) {
        match self.connections.lock().unwrap().get(&end) {
            Some(End { domain, state: State::Connected { queue_pair, .. } }) => {
                (domain.clone(), queue_pair.clone())
            }
            _ => panic!("end {end} is not connected"),
        }
    }

    fn connect(&self, end: Number, params: ConnectParams) {
        let Some(End { domain, state: State::Prepared(prepared) }) =
            self.connections.lock().unwrap().remove(&end)
        else {
            panic!("end {end} is not prepared");
        };
        let (connecting, handle) = abortable(prepared.connect(params));
        let connecting_end = End { domain: domain.clone(), state: State::Connecting(handle) };
        self.connections.lock().unwrap().insert(end, connecting_end);
        let (runtime, events, connections) =
            (self.runtime.clone(), self.events.clone(), self.connections.clone());
        let task = async move {
            let result = match connecting.await {
                Ok(result) => result,
                Err(_) => Err(FabricError::Closed), // nobody waits for it any more
            };
            let result = result.map(|connected| {
                let queue_pair = connected.spawn(&*runtime);
                let (asks, asked) = mpsc::unbounded();
                let capabilities = queue_pair.capabilities();
                let watching = watch(end, queue_pair.clone(), asked, runtime.clone(), events.clone());
                runtime.spawn("watch", Box::pin(watching));
                let state = State::Connected { queue_pair, asks };
                connections.lock().unwrap().insert(end, End { domain, state });
                capabilities
            });
            events.tell(&Event::Connected { end, result });
        };
        self.runtime.spawn("connect", Box::pin(task));
    }

    fn abandon(&self, end: Number) {
        let mut connections = self.connections.lock().unwrap();
        match connections.get(&end).map(|end| &end.state) {
            Some(State::Prepared(_)) => drop(connections.remove(&end)),
            Some(State::Connecting(handle)) => handle.abort(),
            Some(State::Connected { .. }) | None => {}
        }
    }

    fn submit(&self, end: Number, key: u64, domain: &Arc<Hosted>, queue_pair: &QueuePair, work: Work) {
        let events = self.events.clone();
        let completed = move |result| events.tell(&Event::Completed { end, key, result });
        let request = match work {
            Work::Read { part } => {
                let read = queue_pair.read(part.remote, domain.staging(part.local));
                let domain = domain.clone();
                let task = async move { completed(read.await.map(|bytes| domain.put(part.local, &bytes))) };
                return self.runtime.spawn("read", Box::pin(task));
            }
            Work::ReadVectored { segments } => {
                let parts: Vec<_> =
                    segments.iter().map(|part| (part.remote, domain.staging(part.local))).collect();
                let (read, domain) = (queue_pair.read_vectored(parts), domain.clone());
                let task = async move {
                    let put = |read: Vec<BufMut>| {
                        read.iter().zip(segments).for_each(|(bytes, part)| domain.put(part.local, bytes));
                    };
                    completed(read.await.map(put));
                };
                return self.runtime.spawn("read", Box::pin(task));
            }
            Work::Write { local, remote, immediate } => {
                WorkRequest::Write { local: domain.bytes(local), remote, immediate }
            }
            Work::WriteVectored { segments, immediate } => {
                let segment = segments
                    .into_iter()
                    .map(|part| Segment { local: domain.bytes(part.local), remote: part.remote });
                WorkRequest::WriteVectored { segments: segment.collect(), immediate }
            }
        };
        match queue_pair.post_now(&request) {
            Ok(posted) => {
                let ended = async move { completed(posted.await) };
                self.runtime.spawn("operation", Box::pin(ended));
            }
            // The test's half counts its operations as this one does.
            Err(FabricError::SendQueueFull { depth }) => panic!("one more than {depth} operations"),
            Err(failure) => completed(Err(failure)),
        }
    }
}

/// Reports arrivals on request, and the connection's end after all earlier arrivals.
async fn watch(
    end: Number,
    queue_pair: QueuePair,
    mut asks: mpsc::UnboundedReceiver<()>,
    runtime: Arc<dyn Runtime>,
    events: Events,
) {
    loop {
        match select(asks.next(), runtime.sleep(TICK)).await {
            Either::Left((Some(()), _)) => {}
            Either::Left((None, _)) => return,
            Either::Right(_) if queue_pair.failure().is_none() => continue,
            Either::Right(_) => {}
        }
        match queue_pair.next_arrival().await {
            Ok(Arrival::Immediate { immediate, length }) => {
                events.tell(&Event::Arrived { end, immediate, length });
            }
            Ok(other) => panic!("{other:?} arrived, which no event can report"),
            Err(failure) => return events.tell(&Event::Failed { end, failure }),
        }
    }
}

/// A domain, with memory whose pages the test's process maps, too.
struct Hosted {
    domain: Arc<dyn Domain>,
    blocks: Mutex<HashMap<Number, Memory>>,
    /// Destination of reads: only the test's process knows which part of a block may be read into.
    staging: Mutex<Option<RegisteredPool>>,
}

/// A block, allocated as a whole: only the test's process knows the grants inside it.
struct Memory {
    pages: File,
    holding: Option<Holding>,
}

enum Holding {
    /// A source of writes, which peers with the right may read.
    Shared { bytes: Buf, _exposure: Exposure },
    /// A destination of the peers' writes.
    Granted(Granted),
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(Holding::Granted(granted)) = self.holding.take() {
            drop(granted.end(GrantEnd::QueuePairDrained));
        }
    }
}

impl Hosted {
    fn new(domain: Arc<dyn Domain>) -> Self {
        Self { domain, blocks: Mutex::default(), staging: Mutex::default() }
    }

    /// Registers a block of `length` bytes over `pages`.
    fn register(&self, block: Number, pages: File, length: u64, access: Access) -> RemoteRegion {
        let bytes = usize::try_from(length).unwrap();
        let config = PoolConfig { block_bytes: bytes, cap_bytes: length, ..PoolConfig::new("shared") };
        let pool = Pool::new(config).unwrap();
        let registrar = Registrar { domain: self.domain.clone(), pages, access, region: Mutex::default() };
        let registrar = Arc::new(registrar);
        pool.add_visitor(registrar.clone()).unwrap();
        let whole: BufMut = pool.try_alloc(bytes).unwrap();
        let holding = if access.remote_write {
            Holding::Granted(whole.grant())
        } else {
            let bytes = whole.freeze();
            Holding::Shared { _exposure: bytes.expose(), bytes }
        };
        let region = registrar.region.lock().unwrap().take().expect("the pool made its one block");
        let pages = registrar.pages.try_clone().unwrap();
        self.blocks.lock().unwrap().insert(block, Memory { pages, holding: Some(holding) });
        region
    }

    fn bytes(&self, place: Place) -> Buf {
        if place.length == 0 {
            return Buf::empty();
        }
        let blocks = self.blocks.lock().unwrap();
        let Some(Holding::Shared { bytes, .. }) = &blocks[&place.block].holding else {
            panic!("block {} is the peers' to write, and is to be sent from", place.block);
        };
        let start = usize::try_from(place.offset).unwrap();
        bytes.slice(start..start + usize::try_from(place.length).unwrap()).expect("inside the block")
    }

    /// Memory of the length of `place`.
    fn staging(&self, place: Place) -> BufMut {
        let mut staging = self.staging.lock().unwrap();
        let pool = staging
            .get_or_insert_with(|| RegisteredPool::new(&self.domain, "staging", Access::LOCAL, 256 << 20));
        pool.pool.try_alloc(usize::try_from(place.length).unwrap()).unwrap()
    }

    fn put(&self, place: Place, bytes: &[u8]) {
        if place.length > 0 {
            self.blocks.lock().unwrap()[&place.block].pages.write_all_at(bytes, place.offset).unwrap();
        }
    }
}

/// Replaces the pages of a pool's block by the shared pages before other code sees the block.
#[derive(Debug)]
struct Registrar {
    domain: Arc<dyn Domain>,
    pages: File,
    access: Access,
    region: Mutex<Option<RemoteRegion>>,
}

impl BlockVisitor for Registrar {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        pages::put_under(block, &self.pages);
        let region = self.domain.register(block, self.access).map_err(|error| VisitError(Arc::new(error)))?;
        assert!(self.region.lock().unwrap().replace(region).is_none(), "a second block");
        Ok(())
    }
}
