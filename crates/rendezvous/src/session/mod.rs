//! Control sessions, the data connections that a session sets up, and the state of each peer. This file has the session itself.

pub(crate) mod counts;
pub(crate) mod known_peer;
pub(crate) mod node;
pub(crate) mod peers;
pub(crate) mod store;
#[cfg(test)]
pub(crate) mod tests;
mod unanswered;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tensorwire_protocol::{
    Code, Status,
    limits::REGIONS_MAX,
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot, watch};

use self::{store::StoreResponse, unanswered::Unanswered};
use crate::{
    connection::DataConnection,
    control::{Addresses, ControlError, FrameReceiver, FrameSender, dialable, handshake::Introduction},
    error::{Lost, PeerLoss},
    peer_memory::region_record::region,
    session::counts::{Connections, Counted},
    values::end_signal::unless,
};

/// The peer's answer to a Connect.
pub(crate) type ConnectAnswer = Result<Connect, Status>;
/// One page of the peer's list.
pub(crate) struct ListPage {
    pub(crate) entries: Vec<ListEntry>,
    pub(crate) more: bool,
}

/// Set in connection numbers that the accepting side of the session chooses, so that both sides can choose numbers
/// independently.
const ACCEPTED: u32 = 1 << 31;

/// Maximum number of unanswered requests for lists and reports on one session, in each direction.
const LISTS_MAX: usize = 64;

/// An authenticated control session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) peer: Introduction,
    addresses: Option<Addresses>,
    /// `None` once the outgoing direction was ended.
    sender: Mutex<Option<Arc<dyn FrameSender>>>,
    dialled: bool,
    /// The number of received frames.
    frames: AtomicU64,
    ended: watch::Sender<bool>,
    /// Limits the lists that the peer requests.
    lists_served: Arc<Semaphore>,
    /// Shared by all sessions with the peer.
    connections: Arc<Connections>,
    /// One page, or answer of the store, is made and sent at a time, so that a peer that requests many and reads none uses the
    /// memory of one.
    list_turn: Semaphore,
    /// Limits the requests of the peer that wait in this worker's store.
    waiting: Arc<Semaphore>,
    state: Mutex<SessionState>,
}

#[derive(Debug, Default)]
struct SessionState {
    over: Option<Lost>,
    next: u32,
    connections: BTreeMap<u32, OpenConnection>,
    connects: BTreeMap<u32, oneshot::Sender<ConnectAnswer>>,
    /// Requests for the peer's list and report.
    unanswered: BTreeMap<u32, Unanswered>,
    /// Unanswered pings whose answers a task waits for, by their numbers.
    pings: BTreeMap<u64, oneshot::Sender<()>>,
    /// Unanswered requests to the peer's store.
    asked: BTreeMap<u32, oneshot::Sender<StoreResponse>>,
    /// Requests of the peer that wait in this worker's store. Dropping a sender ends one.
    waits: BTreeMap<u32, oneshot::Sender<()>>,
}

impl SessionState {
    /// Removes connections that have failed. They end by themselves.
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

impl OpenConnection {
    fn new(counted: Counted) -> Self {
        Self { stage: Stage::Opening(Opening::new()), _counted: counted }
    }

    fn up(&self) -> Option<&Arc<DataConnection>> {
        match &self.stage {
            Stage::Up(connection) => Some(connection),
            Stage::Opening(..) => None,
        }
    }
}

#[derive(Debug)]
enum Stage {
    Opening(Opening),
    Up(Arc<DataConnection>),
}

/// What has come for a connection that is being set up.
#[derive(Debug)]
struct Opening {
    /// The regions that the peer has announced.
    announced: Vec<RegionRecord>,
    /// Regions of this side that the peer has confirmed: requests of the peer are answered before the connection is up.
    confirmed: Vec<u32>,
    disowned: Disowned,
}

/// A channel for the reason why the peer could not set up a connection.
#[derive(Debug)]
struct Disowned {
    tell: Option<oneshot::Sender<String>>,
    told: Option<oneshot::Receiver<String>>,
}

impl Opening {
    fn new() -> Self {
        let (tell, told) = oneshot::channel();
        let disowned = Disowned { tell: Some(tell), told: Some(told) };
        Self { announced: Vec::new(), confirmed: Vec::new(), disowned }
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
            waiting: Arc::new(Semaphore::new(store::STORE_WAITS_MAX)),
            connections,
            state: Mutex::default(),
        })
    }

    /// Whether this worker dialled the peer.
    pub(crate) fn is_dialled(&self) -> bool {
        self.dialled
    }

    /// The address at which this worker dialled the peer, if it did.
    pub(crate) fn dialled_at(&self) -> Option<SocketAddr> {
        self.addresses.filter(|_| self.dialled).map(|addresses| addresses.peer)
    }

    /// This worker's address on the session's connection.
    pub(crate) fn own_address(&self) -> Option<SocketAddr> {
        self.addresses.map(|addresses| addresses.own)
    }

    /// The peer's address, for error messages.
    pub(crate) fn whereabouts(&self) -> String {
        whereabouts(&self.peer, self.addresses)
    }

    /// The peer's announced listen address, in a form that this worker can dial.
    pub(crate) fn listen_address(&self) -> Option<String> {
        let address = self.peer.listen_address.as_ref()?;
        Some(dialable(address, self.addresses.map(|addresses| addresses.peer)))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }

    /// Why the session ended.
    pub(crate) fn lost(&self) -> Lost {
        self.lock().over.clone().unwrap_or_else(|| Lost::gone("the control session is over"))
    }

    pub(crate) fn why_over(&self) -> String {
        self.lost().detail
    }

    /// A receiver that becomes true when the session ends.
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

    /// Grows with every sign that the peer's process runs: frames, arrivals, and bytes that it wrote. Completions of
    /// this worker's own writes do not count, because the peer's kernel or adapter produces them without its process.
    pub(crate) fn signs_of_life(&self) -> u64 {
        let state = self.lock();
        let up = state.connections.values().filter_map(OpenConnection::up);
        let moved = up.map(|connection| connection.queue_pair.stats());
        let moved = moved.map(|stats| stats.arrivals.wrapping_add(stats.bytes_received));
        moved.fold(self.frames.load(Ordering::Relaxed), u64::wrapping_add)
    }

    /// Ends data connections whose path is lost. See [`DataConnection::watch_path`].
    pub(crate) fn watch_paths(&self, step: Duration, bound: Duration) {
        let up: Vec<_> = self.lock().connections.values().filter_map(OpenConnection::up).cloned().collect();
        up.iter().for_each(|connection| connection.watch_path(step, bound));
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// [`ControlError::Lost`] also when the session ends first: a peer that reads nothing stops the sender, and the transport of a
    /// session that has ended may still be open.
    pub(crate) async fn send(&self, frame: ControlFrame) -> Result<(), ControlError> {
        let sender = self.sender()?;
        let sent = unless(self.ended(), sender.send(frame.encode())).await;
        sent.unwrap_or_else(|| Err(ControlError::Lost { detail: self.why_over() }))
    }

    /// The sender, unless the outgoing direction was ended.
    pub(crate) fn sender(&self) -> Result<Arc<dyn FrameSender>, ControlError> {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sender.ok_or_else(|| ControlError::Lost { detail: self.why_over() })
    }

    /// Ends the outgoing direction of a session that has ended. The peer waits for this, so a session that is merely
    /// still referenced would delay the peer's shutdown.
    pub(crate) fn hang_up(&self) {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Registers a connection that this worker sets up. Returns its number, and the receiver of the peer's answer.
    pub(crate) fn open(&self) -> Result<(u32, oneshot::Receiver<ConnectAnswer>), String> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        state.forget_ended();
        let number = self.number(&mut state);
        let entry = OpenConnection::new(self.connections.count());
        state.connections.insert(number, entry);
        state.connects.insert(number, answer);
        Ok((number, answered))
    }

    /// Registers a connection that the peer sets up.
    ///
    /// # Errors
    /// The number is in use, or the peer has the maximum number of connections.
    pub(crate) fn open_for_peer(&self, number: u32) -> Result<(), Status> {
        let mut state = self.lock();
        state.forget_ended();
        let ours = (number & ACCEPTED == 0) == self.dialled;
        if ours || state.connections.contains_key(&number) {
            let message = format!(
                "connection number {number} cannot be used: it is in use, or reserved for the other side"
            );
            return Err(Status::new(Code::InvalidArgument, message));
        }
        if state.connections.len() >= CONNECTIONS_MAX {
            let message =
                format!("{CONNECTIONS_MAX} data connections of this session are open: close some first");
            return Err(Status::new(Code::ResourceExhausted, message));
        }
        let Some(counted) = self.connections.count_unless_full() else {
            let (peer, most) = (&self.peer.worker, self.connections.most());
            let message = format!(
                "{most} data connections with {peer} are open: close some first, or allow more with the setting \
                 `connections_per_peer_max`"
            );
            return Err(Status::new(Code::ResourceExhausted, message));
        };
        state.connections.insert(number, OpenConnection::new(counted));
        Ok(())
    }

    /// Marks a connection as up. Returns the regions that the peer has announced so far, for the caller to confirm.
    ///
    /// # Errors
    /// Why the session or the connection has ended. Then the caller closes the connection.
    pub(crate) fn up(&self, number: u32, connection: &Arc<DataConnection>) -> Result<Vec<u32>, String> {
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        let Some(entry) = state.connections.get_mut(&number) else {
            return Err("the peer ended the connection while it was set up".to_owned());
        };
        let before = std::mem::replace(&mut entry.stage, Stage::Up(connection.clone()));
        let Stage::Opening(Opening { announced, confirmed, .. }) = before else { return Ok(Vec::new()) };
        announced.iter().for_each(|record| connection.queue_pair.add_remote_region(region(record)));
        drop(state);
        confirmed.into_iter().for_each(|region| connection.announcer.confirm(region));
        Ok(announced.iter().map(|record| record.region).collect())
    }

    /// Waits until the peer reports that it could not set up the connection, and returns the reason. Never completes
    /// for a connection that is not being set up, or on a second call.
    pub(crate) async fn disowned(&self, number: u32) -> String {
        let told = match self.lock().connections.get_mut(&number).map(|entry| &mut entry.stage) {
            Some(Stage::Opening(opening)) => opening.disowned.told.take(),
            _ => None,
        };
        match told {
            Some(told) => match told.await {
                Ok(why) => why,
                // The connection was removed.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// Stores the peer's report that it could not set up the connection.
    pub(crate) fn note_disowned(&self, number: u32, why: String) {
        if let Some(Stage::Opening(opening)) =
            self.lock().connections.get_mut(&number).map(|entry| &mut entry.stage)
            && let Some(tell) = opening.disowned.tell.take()
        {
            let _ = tell.send(why);
        }
    }

    /// Removes a connection that was not set up or has ended.
    pub(crate) fn forget(&self, number: u32) {
        let mut state = self.lock();
        state.connections.remove(&number);
        state.connects.remove(&number);
    }

    /// A live data connection that is not retired, if there is one.
    pub(crate) fn live_connection(&self) -> Option<Arc<DataConnection>> {
        let state = self.lock();
        state.connections.values().filter_map(OpenConnection::up).find(|up| up.is_usable()).cloned()
    }

    /// Stores the peer's answer to a Connect.
    pub(crate) fn answer(&self, number: u32, answer: ConnectAnswer) {
        if let Some(waiting) = self.lock().connects.remove(&number) {
            let _ = waiting.send(answer);
        }
    }

    /// Adds a region of the peer to connection `number`. True if it can be confirmed now.
    ///
    /// # Errors
    /// The peer has announced too many regions.
    pub(crate) fn add_region(&self, number: u32, record: RegionRecord) -> Result<bool, Lost> {
        let mut state = self.lock();
        let known = match state.connections.get(&number).map(|entry| &entry.stage) {
            Some(Stage::Up(connection)) => connection.queue_pair.remote_region_count(),
            Some(Stage::Opening(opening)) => opening.announced.len(),
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
            Some(Stage::Opening(opening)) => {
                if !tensorwire_testpoints::planted!("a region that is announced during set-up is lost") {
                    opening.announced.push(record);
                }
                Ok(false)
            }
            None => Ok(false),
        }
    }

    /// The peer has confirmed a region of this side for connection `number`.
    pub(crate) fn region_confirmed(&self, number: u32, region: u32) {
        let mut state = self.lock();
        let Some(entry) = state.connections.get_mut(&number) else { return };
        match &mut entry.stage {
            Stage::Up(connection) => {
                let connection = connection.clone();
                drop(state);
                connection.announcer.confirm(region);
            }
            // More than there are regions mean nothing.
            Stage::Opening(opening) if opening.confirmed.len() < REGIONS_MAX => {
                opening.confirmed.push(region);
            }
            Stage::Opening(_) => {}
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

    /// A receiver for the answer to the ping with this number.
    pub(crate) fn expect_pong(&self, nonce: u64) -> oneshot::Receiver<()> {
        let (give, answered) = oneshot::channel();
        let mut state = self.lock();
        state.pings.retain(|_, waiting| !waiting.is_closed());
        state.pings.insert(nonce, give);
        answered
    }

    /// Stores the answer to a ping.
    pub(crate) fn pong(&self, nonce: u64) {
        if let Some(waiting) = self.lock().pings.remove(&nonce) {
            let _ = waiting.send(());
        }
    }

    /// Counts a request of the peer for a list or a report. Fails if the peer has too many unanswered ones.
    pub(crate) fn begin_list(&self) -> Result<OwnedSemaphorePermit, Lost> {
        let room = self.lists_served.clone().try_acquire_owned();
        room.map_err(|_| {
            let detail = format!(
                "the peer has more than {LISTS_MAX} list requests or requests for reports unanswered"
            );
            Lost::misbehaved(detail)
        })
    }

    /// Waits until no other page or answer is being made or sent on this session.
    pub(crate) async fn list_turn(&self) -> Option<SemaphorePermit<'_>> {
        self.list_turn.acquire().await.ok()
    }

    /// The state that all sessions with the peer share.
    pub(crate) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// Lets the task that serves the session end it, for this reason.
    pub(crate) fn condemn(&self, why: Lost) {
        self.lock().over.get_or_insert(why);
        self.ended.send_replace(true);
    }

    /// Ends the session and every transfer of its connections. The first reason is used.
    pub(crate) fn fail(&self, why: &Lost) -> Vec<Arc<DataConnection>> {
        self.condemn(why.clone());
        let connections = {
            let mut state = self.lock();
            state.connects.clear();
            state.unanswered.clear();
            state.pings.clear();
            state.asked.clear();
            state.waits.clear();
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

/// The address of a worker, for error messages: its listen address, with the host if that is a loopback address.
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

/// Maximum number of data connections of one session.
const CONNECTIONS_MAX: usize = 16;
