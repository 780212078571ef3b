//! One control session: who the peer is, what it announces, and the data connections set up over it.

#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_protocol::{
    Code, Status,
    limits::REGIONS_MAX,
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot, watch};

use crate::{
    control::{Addresses, ControlError, FrameReceiver, FrameSender, handshake::Introduction},
    error::{Lost, PeerLoss},
    link::{
        connection::DataConnection,
        frames::region,
        session_counts::{Connections, Counted},
    },
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
    addresses: Option<Addresses>,
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
    state: Mutex<SessionState>,
}

#[derive(Debug, Default)]
struct SessionState {
    over: Option<Lost>,
    next: u32,
    connections: BTreeMap<u32, OpenConnection>,
    connects: BTreeMap<u32, oneshot::Sender<ConnectAnswer>>,
    lists: BTreeMap<u32, oneshot::Sender<ListPage>>,
    /// By their numbers, pings whose answers are waited for.
    pings: BTreeMap<u64, oneshot::Sender<()>>,
}

impl SessionState {
    /// Connections that are over end by themselves, and no longer count.
    fn forget_ended(&mut self) {
        self.connections
            .retain(|_, entry| !matches!(&entry.stage, Stage::Up(connection) if connection.is_over()));
    }
}

/// A data connection of this session.
#[derive(Debug)]
struct OpenConnection {
    stage: Stage,
    _counted: Counted,
}

#[derive(Debug)]
enum Stage {
    /// Being set up; regions announced meanwhile wait here.
    Opening(Vec<RegionRecord>, Disowned),
    Up(Arc<DataConnection>),
}

/// Both sides of where it is told that the peer could not set a connection up, and why.
#[derive(Debug)]
struct Disowned {
    tell: Option<oneshot::Sender<String>>,
    told: Option<oneshot::Receiver<String>>,
}

impl Stage {
    fn opening() -> Self {
        let (tell, told) = oneshot::channel();
        Self::Opening(Vec::new(), Disowned { tell: Some(tell), told: Some(told) })
    }
}

impl std::fmt::Debug for ListPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ListPage({} entries)", self.entries.len())
    }
}

impl Session {
    pub(crate) fn new(
        peer: Introduction,
        addresses: Option<Addresses>,
        sender: Arc<dyn FrameSender>,
        dialled: bool,
        connections: Arc<Connections>,
    ) -> Arc<Self> {
        Arc::new(Self {
            peer,
            addresses,
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

    pub(crate) fn peer_host(&self) -> Option<IpAddr> {
        self.addresses.map(|addresses| addresses.peer.ip())
    }

    /// Whether this end has dialled the peer.
    pub(crate) fn is_dialled(&self) -> bool {
        self.dialled
    }

    /// The address that this end has dialled the peer at, if it has.
    pub(crate) fn dialled_at(&self) -> Option<SocketAddr> {
        self.addresses.filter(|_| self.dialled).map(|addresses| addresses.peer)
    }

    /// Where the peer is, for people.
    pub(crate) fn whereabouts(&self) -> String {
        whereabouts(&self.peer, self.addresses)
    }

    /// Where the peer says that it listens, as this end can dial it.
    pub(crate) fn listen_address(&self) -> Option<String> {
        let address = self.peer.listen_address.as_ref()?;
        let Ok(listens) = address.parse::<SocketAddr>() else { return Some(address.clone()) };
        if listens.ip().is_unspecified() {
            return self.peer_host().map(|host| SocketAddr::new(host, listens.port()).to_string());
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
            Stage::Up(connection) => Some(connection.queue_pair.stats()),
            Stage::Opening(..) => None,
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
        let entry = OpenConnection { stage: Stage::opening(), _counted: self.connections.count() };
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
                "{most} data connections with {peer} are open: end some first, or allow more with the setting \
                 `connections_per_peer_max`"
            );
            return Err(Status::new(Code::ResourceExhausted, message));
        };
        state.connections.insert(number, OpenConnection { stage: Stage::opening(), _counted });
        Ok(())
    }

    /// The connection is up: gives the regions that were announced meanwhile, which the caller confirms.
    ///
    /// # Errors
    /// Why the session is over; the caller closes the connection then.
    pub(crate) fn up(&self, number: u32, connection: &Arc<DataConnection>) -> Result<Vec<u32>, String> {
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        let Some(entry) = state.connections.get_mut(&number) else {
            return Err("the peer ended the connection while it was set up".to_owned());
        };
        let before = std::mem::replace(&mut entry.stage, Stage::Up(connection.clone()));
        let Stage::Opening(waiting, _) = before else { return Ok(Vec::new()) };
        waiting.iter().for_each(|record| connection.queue_pair.add_remote_region(region(record)));
        Ok(waiting.iter().map(|record| record.region).collect())
    }

    /// Why the peer could not set up the connection with this number, once it says so. Never, if that was asked before or the
    /// connection is not being set up.
    pub(crate) async fn disowned(&self, number: u32) -> String {
        let told = match self.lock().connections.get_mut(&number).map(|entry| &mut entry.stage) {
            Some(Stage::Opening(_, disowned)) => disowned.told.take(),
            _ => None,
        };
        match told {
            Some(told) => match told.await {
                Ok(why) => why,
                // The session has forgotten the connection.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// The peer could not set up the connection with this number.
    pub(crate) fn note_disowned(&self, number: u32, why: String) {
        if let Some(Stage::Opening(_, disowned)) =
            self.lock().connections.get_mut(&number).map(|entry| &mut entry.stage)
            && let Some(tell) = disowned.tell.take()
        {
            let _ = tell.send(why);
        }
    }

    /// The connection was not set up, or is over.
    pub(crate) fn forget(&self, number: u32) {
        let mut state = self.lock();
        state.connections.remove(&number);
        state.connects.remove(&number);
    }

    /// A live data connection, if there is one.
    pub(crate) fn live_connection(&self) -> Option<Arc<DataConnection>> {
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
            Some(Stage::Up(connection)) => connection.queue_pair.remote_region_count(),
            Some(Stage::Opening(waiting, _)) => waiting.len(),
            None => 0,
        };
        if known >= REGIONS_MAX {
            return Err(Lost::misbehaved(format!(
                "the peer announced more than {REGIONS_MAX} regions for connection {number}"
            )));
        }
        match state.connections.get_mut(&number).map(|entry| &mut entry.stage) {
            Some(Stage::Up(connection)) => {
                connection.queue_pair.add_remote_region(region(&record));
                Ok(true)
            }
            Some(Stage::Opening(waiting, _)) => {
                if !tensorwire_testpoints::planted!("a region that is announced during set-up is lost") {
                    waiting.push(record);
                }
                Ok(false)
            }
            None => Ok(false),
        }
    }

    /// All data connections that are up.
    pub(crate) fn up_connections(&self) -> Vec<Arc<DataConnection>> {
        let state = self.lock();
        let up = state.connections.values().filter_map(|entry| match &entry.stage {
            Stage::Up(connection) => Some(connection.clone()),
            Stage::Opening(..) => None,
        });
        up.collect()
    }

    /// The data connection with this number, if it is up.
    pub(crate) fn connection(&self, number: u32) -> Option<Arc<DataConnection>> {
        match self.lock().connections.get(&number).map(|entry| &entry.stage) {
            Some(Stage::Up(connection)) => Some(connection.clone()),
            _ => None,
        }
    }

    /// Where it will be told that the peer has answered the ping with this number.
    pub(crate) fn expect_pong(&self, nonce: u64) -> oneshot::Receiver<()> {
        let (give, answered) = oneshot::channel();
        let mut state = self.lock();
        state.pings.retain(|_, waiting| !waiting.is_closed());
        state.pings.insert(nonce, give);
        answered
    }

    /// The peer answered a ping.
    pub(crate) fn pong(&self, nonce: u64) {
        if let Some(waiting) = self.lock().pings.remove(&nonce) {
            let _ = waiting.send(());
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

    /// Waits until no other list is on its way to the peer over this session.
    pub(crate) async fn list_turn(&self) -> Option<SemaphorePermit<'_>> {
        self.list_turn.acquire().await.ok()
    }

    /// What the peer's sessions share.
    pub(crate) fn connections(&self) -> &Connections {
        &self.connections
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
    pub(crate) fn fail(&self, why: &Lost) -> Vec<Arc<DataConnection>> {
        self.condemn(why.clone());
        let connections = {
            let mut state = self.lock();
            state.connects.clear();
            state.lists.clear();
            state.pings.clear();
            std::mem::take(&mut state.connections)
        };
        let up = connections.into_values().filter_map(|entry| match entry.stage {
            Stage::Up(connection) => Some(connection),
            Stage::Opening(..) => None,
        });
        up.inspect(|connection| connection.fail(why)).collect()
    }

    fn number(&self, state: &mut SessionState) -> u32 {
        state.next = (state.next + 1) & !ACCEPTED;
        if self.dialled { state.next } else { state.next | ACCEPTED }
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a worker is, for people: where it listens, and on which host if that does not tell.
pub(crate) fn whereabouts(worker: &Introduction, addresses: Option<Addresses>) -> String {
    let host = addresses.map(|addresses| addresses.peer.ip());
    let Some(listens) = &worker.listen_address else {
        return host.map_or_else(|| "an unknown address".to_owned(), |host| host.to_string());
    };
    let is_local = listens.parse::<SocketAddr>().is_ok_and(|listens| listens.ip().is_loopback());
    match host.map(|host| host.to_canonical()).filter(|host| is_local && !host.is_loopback()) {
        Some(host) => format!("{listens} of the host {host}"),
        None => listens.clone(),
    }
}

/// Data connections that one session may have at once.
const CONNECTIONS_MAX: usize = 16;
