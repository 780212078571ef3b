//! One control session: who the peer is, what it announces, and the data connections set up over it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use protocol::{
    Code, Status,
    limits::REGIONS_MAX,
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot, watch};

use crate::{
    announce::region,
    control::{ControlError, FrameReceiver, FrameSender, handshake::Introduction},
    error::{Lost, PeerLoss},
    route::Route,
    sessions::{Connections, Counted},
};

/// What the peer answered to a Connect.
pub(crate) type ConnectAnswer = Result<Connect, Status>;
/// One page of the peer's list.
pub(crate) struct ListPage {
    pub(crate) entries: Vec<ListEntry>,
    pub(crate) more: bool,
}

/// Connection numbers of the end that accepted the session have this bit set, so that both ends may choose
/// numbers without asking.
const ACCEPTED: u32 = 1 << 31;

/// Requests for a list that may be unanswered at once on one session, in each direction.
const LISTS_MAX: usize = 64;

/// An authenticated control session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) peer: Introduction,
    pub(crate) peer_host: Option<IpAddr>,
    /// SHA-256 of the certificate that the peer has shown, if this session runs over TLS.
    pub(crate) certificate: Option<[u8; 32]>,
    /// `None` once this end has hung up.
    sender: Mutex<Option<Arc<dyn FrameSender>>>,
    dialled: bool,
    /// Frames that came.
    frames: AtomicU64,
    ended: watch::Sender<bool>,
    /// Lists that the peer waits for.
    lists_served: Arc<Semaphore>,
    /// Of the peer's sessions together.
    connections: Arc<Connections>,
    /// One page is made and sent at a time: a peer that asks for many and reads none holds one.
    list_turn: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    over: Option<Lost>,
    next: u32,
    connections: BTreeMap<u32, Entry>,
    connects: BTreeMap<u32, oneshot::Sender<ConnectAnswer>>,
    lists: BTreeMap<u32, oneshot::Sender<ListPage>>,
}

impl State {
    /// Connections that are over end by themselves, and no longer count.
    fn forget_ended(&mut self) {
        self.connections
            .retain(|_, entry| !matches!(&entry.stage, Stage::Up(connection) if connection.is_over()));
    }
}

/// A data connection of this session.
#[derive(Debug)]
struct Entry {
    stage: Stage,
    _counted: Counted,
}

#[derive(Debug)]
enum Stage {
    /// Being set up; regions announced meanwhile wait here.
    Opening(Vec<RegionRecord>),
    Up(Route),
}

impl std::fmt::Debug for ListPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ListPage({} entries)", self.entries.len())
    }
}

impl Session {
    pub(crate) fn new(
        peer: Introduction,
        peer_host: Option<IpAddr>,
        sender: Arc<dyn FrameSender>,
        dialled: bool,
        connections: Arc<Connections>,
    ) -> Arc<Self> {
        Arc::new(Self {
            peer,
            peer_host,
            certificate: sender.proven().map(|proven| proven.certificate),
            sender: Mutex::new(Some(sender)),
            dialled,
            frames: AtomicU64::new(0),
            ended: watch::Sender::new(false),
            lists_served: Arc::new(Semaphore::new(LISTS_MAX)),
            list_turn: Semaphore::new(1),
            connections,
            state: Mutex::default(),
        })
    }

    /// Where the peer says that it listens, as this end can dial it.
    pub(crate) fn listen_address(&self) -> Option<String> {
        let address = self.peer.listen_address.as_ref()?;
        let Ok(listens) = address.parse::<SocketAddr>() else { return Some(address.clone()) };
        if listens.ip().is_unspecified() {
            return self.peer_host.map(|host| SocketAddr::new(host, listens.port()).to_string());
        }
        Some(address.clone())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }

    /// Why it is over.
    pub(crate) fn lost(&self) -> Lost {
        self.lock().over.clone().unwrap_or_else(|| Lost::gone("the control session is over"))
    }

    pub(crate) fn why_over(&self) -> String {
        self.lost().detail
    }

    /// Turns true when the session is over.
    pub(crate) fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// The next frame, decoded.
    pub(crate) async fn next_frame(&self, receiver: &mut dyn FrameReceiver) -> Result<ControlFrame, Lost> {
        let bytes = receiver.recv().await.map_err(|error| Lost::gone(error.to_string()))?;
        let bytes = bytes.ok_or_else(|| Lost::new(PeerLoss::Goodbye, "the peer ended the session"))?;
        self.frames.fetch_add(1, Ordering::Relaxed);
        let frame = ControlFrame::decode(&bytes);
        frame.map_err(|error| Lost::misbehaved(format!("the peer broke the control protocol: {error}")))
    }

    /// Grows with everything that shows that the peer's process runs: frames, arrivals, and bytes that it wrote
    /// here. Completions of own writes are none: the peer's kernel or adapter gives them without its process.
    pub(crate) fn signs_of_life(&self) -> u64 {
        let state = self.lock();
        let up = state.connections.values().filter_map(|entry| match &entry.stage {
            Stage::Up(connection) => Some(connection.stats()),
            Stage::Opening(_) => None,
        });
        let moved = up.map(|stats| stats.arrivals.wrapping_add(stats.bytes_received));
        moved.fold(self.frames.load(Ordering::Relaxed), u64::wrapping_add)
    }

    pub(crate) async fn send(&self, frame: ControlFrame) -> Result<(), ControlError> {
        self.sender()?.send(frame.encode()).await
    }

    /// What sends on this session, for as long as it is not hung up.
    pub(crate) fn sender(&self) -> Result<Arc<dyn FrameSender>, ControlError> {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sender.ok_or_else(|| ControlError::Lost { detail: self.why_over() })
    }

    /// Ends this end's direction of a session that is over. The peer waits for that before its own end is done, so
    /// a session that is only remembered would hold up the peer's shutdown.
    pub(crate) fn hang_up(&self) {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// A number for a connection that this end sets up; its entry waits for regions.
    pub(crate) fn open(&self) -> Result<(u32, oneshot::Receiver<ConnectAnswer>), String> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        state.forget_ended();
        let number = self.number(&mut state);
        let entry = Entry { stage: Stage::Opening(Vec::new()), _counted: self.connections.count() };
        state.connections.insert(number, entry);
        state.connects.insert(number, answer);
        Ok((number, answered))
    }

    /// Notes a connection that the peer sets up.
    ///
    /// # Errors
    /// The number is in use, or the peer has as many connections as it may.
    pub(crate) fn open_for_peer(&self, number: u32) -> Result<(), Status> {
        let mut state = self.lock();
        state.forget_ended();
        let ours = (number & ACCEPTED == 0) == self.dialled;
        if ours || state.connections.contains_key(&number) {
            let message =
                format!("connection number {number} cannot be used: it is taken, or this end's to give");
            return Err(Status::new(Code::InvalidArgument, message));
        }
        if state.connections.len() >= CONNECTIONS_MAX {
            let message =
                format!("{CONNECTIONS_MAX} data connections of this session are open: end some first");
            return Err(Status::new(Code::ResourceExhausted, message));
        }
        let Some(_counted) = self.connections.count_unless_full() else {
            let (peer, most) = (&self.peer.worker, self.connections.most());
            let message = format!(
                "{most} data connections with {peer} are open: end some first, or allow more with \
                 WorkerBuilder::connections_per_peer_max"
            );
            return Err(Status::new(Code::ResourceExhausted, message));
        };
        state.connections.insert(number, Entry { stage: Stage::Opening(Vec::new()), _counted });
        Ok(())
    }

    /// The connection is up: gives the regions that were announced meanwhile, which the caller confirms.
    ///
    /// # Errors
    /// Why the session is over; the caller closes the connection then.
    pub(crate) fn up(&self, number: u32, connection: &Route) -> Result<Vec<u32>, String> {
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        let Some(entry) = state.connections.get_mut(&number) else {
            return Err("the peer ended the connection while it was set up".to_owned());
        };
        let before = std::mem::replace(&mut entry.stage, Stage::Up(connection.clone()));
        let Stage::Opening(waiting) = before else { return Ok(Vec::new()) };
        let Some(data) = connection.data() else { return Ok(Vec::new()) };
        waiting.iter().for_each(|record| data.queue_pair.add_remote_region(region(record)));
        Ok(waiting.iter().map(|record| record.region).collect())
    }

    /// The connection was not set up, or is over.
    pub(crate) fn forget(&self, number: u32) {
        let mut state = self.lock();
        state.connections.remove(&number);
        state.connects.remove(&number);
    }

    /// A live data connection, if there is one.
    pub(crate) fn live_connection(&self) -> Option<Route> {
        let state = self.lock();
        state.connections.values().find_map(|entry| match &entry.stage {
            Stage::Up(connection) if !connection.is_over() => Some(connection.clone()),
            _ => None,
        })
    }

    /// The peer answered a Connect.
    pub(crate) fn answer(&self, number: u32, answer: ConnectAnswer) {
        if let Some(waiting) = self.lock().connects.remove(&number) {
            let _ = waiting.send(answer);
        }
    }

    /// A region of the peer for connection `number`; true when it can be confirmed now.
    ///
    /// # Errors
    /// The peer has announced more than it may.
    pub(crate) fn add_region(&self, number: u32, record: RegionRecord) -> Result<bool, Lost> {
        let mut state = self.lock();
        let known = match state.connections.get(&number).map(|entry| &entry.stage) {
            Some(Stage::Up(connection)) => {
                connection.data().map(|data| data.queue_pair.remote_region_count())
            }
            Some(Stage::Opening(waiting)) => Some(waiting.len()),
            None => None,
        };
        if known.is_some_and(|known| known >= REGIONS_MAX) {
            return Err(Lost::misbehaved(format!(
                "the peer announced more than {REGIONS_MAX} regions for connection {number}"
            )));
        }
        match state.connections.get_mut(&number).map(|entry| &mut entry.stage) {
            Some(Stage::Up(connection)) => {
                let Some(data) = connection.data() else { return Ok(false) };
                data.queue_pair.add_remote_region(region(&record));
                Ok(true)
            }
            Some(Stage::Opening(waiting)) => {
                waiting.push(record);
                Ok(false)
            }
            None => Ok(false),
        }
    }

    /// All data connections that are up.
    pub(crate) fn up_connections(&self) -> Vec<Route> {
        let state = self.lock();
        let up = state.connections.values().filter_map(|entry| match &entry.stage {
            Stage::Up(connection) => Some(connection.clone()),
            Stage::Opening(_) => None,
        });
        up.collect()
    }

    /// The data connection with this number, if it is up.
    pub(crate) fn connection(&self, number: u32) -> Option<Route> {
        match self.lock().connections.get(&number).map(|entry| &entry.stage) {
            Some(Stage::Up(connection)) => Some(connection.clone()),
            _ => None,
        }
    }

    /// A number for a list request, and where its page will come.
    pub(crate) fn ask_list(&self) -> Result<(u32, oneshot::Receiver<ListPage>), String> {
        let (give, page) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        state.lists.retain(|_, waiting| !waiting.is_closed());
        if state.lists.len() >= LISTS_MAX {
            return Err(format!("{LISTS_MAX} list requests to this peer are unanswered"));
        }
        let number = self.number(&mut state);
        state.lists.insert(number, give);
        Ok((number, page))
    }

    /// Room to make one list for the peer, which asks for no more than a peer may.
    pub(crate) fn begin_list(&self) -> Result<OwnedSemaphorePermit, Lost> {
        let room = self.lists_served.clone().try_acquire_owned();
        room.map_err(|_| {
            Lost::misbehaved(format!("the peer has more than {LISTS_MAX} list requests unanswered"))
        })
    }

    /// Waits until no other list is being made for the peer.
    pub(crate) async fn list_turn(&self) -> Option<SemaphorePermit<'_>> {
        self.list_turn.acquire().await.ok()
    }

    /// A page of the peer's list.
    pub(crate) fn give_list(&self, request: u32, page: ListPage) {
        if let Some(waiting) = self.lock().lists.remove(&request) {
            let _ = waiting.send(page);
        }
    }

    /// Makes whoever serves the session end it, for this reason.
    pub(crate) fn condemn(&self, why: Lost) {
        self.lock().over.get_or_insert(why);
        self.ended.send_replace(true);
    }

    /// Ends the session and every transfer over it. The first reason stays.
    pub(crate) fn fail(&self, why: &Lost) -> Vec<Route> {
        self.condemn(why.clone());
        let connections = {
            let mut state = self.lock();
            state.connects.clear();
            state.lists.clear();
            std::mem::take(&mut state.connections)
        };
        let up = connections.into_values().filter_map(|entry| match entry.stage {
            Stage::Up(connection) => Some(connection),
            Stage::Opening(_) => None,
        });
        up.inspect(|connection| connection.fail(why)).collect()
    }

    fn number(&self, state: &mut State) -> u32 {
        state.next = (state.next + 1) & !ACCEPTED;
        if self.dialled { state.next } else { state.next | ACCEPTED }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Data connections that one session may have at once.
const CONNECTIONS_MAX: usize = 16;
