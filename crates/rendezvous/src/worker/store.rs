//! Carries the requests of a store that a worker serves. The crate of groups defines their content. This module is not
//! for users.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use tensorwire_protocol::wire::control::ControlFrame;
use tokio::sync::Semaphore;

use crate::{
    control::host_and_port,
    error::{Lost, PeerLoss, WorkerError},
    session::{Session, node::session_setup::Verify, store::StoreService},
    worker::Worker,
};

/// The reason why a store has not answered.
#[doc(hidden)]
#[derive(Debug)]
pub enum Unanswered {
    /// The request was not sent.
    NotSent(WorkerError),
    /// The session ended before the answer.
    Broken(String),
    /// The worker at the address serves no store.
    NotServed,
}

/// The store of the worker at an address.
#[doc(hidden)]
#[derive(Debug)]
pub struct StoreAddress {
    worker: Worker,
    address: String,
    /// Limits the sessions that are opened at once to one.
    dialling: Semaphore,
}

impl StoreAddress {
    /// The store that the worker at `address` serves.
    pub fn new(worker: &Worker, address: &str) -> Self {
        Self { worker: worker.clone(), address: address.to_owned(), dialling: Semaphore::new(1) }
    }

    /// The worker that asks.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Sends `request` and returns the answer.
    ///
    /// # Errors
    /// [`Unanswered`].
    ///
    /// # Cancel safety
    /// If dropped, the request may or may not be executed. A waiting request ends.
    pub async fn ask(&self, request: Vec<u8>) -> Result<Vec<u8>, Unanswered> {
        let session = self.session().await.map_err(Unanswered::NotSent)?;
        let (number, answer) = session.ask_store().map_err(|lost| Unanswered::Broken(self.reason(&lost)))?;
        let asked = Asked { worker: &self.worker, session: &session, number };
        let sent = session.send(ControlFrame::StoreRequest { request: number, body: request }).await;
        // A session that ends gives the more precise reason.
        let answer = match sent {
            Ok(()) => answer.await.ok(),
            Err(_) => None,
        };
        let Some(answer) = answer else { return Err(Unanswered::Broken(self.reason(&session.lost()))) };
        drop(asked);
        answer.ok_or(Unanswered::NotServed)
    }

    /// The address of this machine on the session, if there is one.
    pub fn own_address(&self) -> Option<IpAddr> {
        Some(self.live_session()?.own_address()?.ip())
    }

    /// Ends the session with a worker of another job, because the session would occupy that worker's name.
    pub fn hang_up(&self) {
        if let Some(session) = self.live_session() {
            session.condemn(Lost::new(PeerLoss::ShutDownHere, "the store there is another job's"));
        }
    }

    fn live_session(&self) -> Option<Arc<Session>> {
        self.worker.node.peer_by_address(&self.address)?.live_session()
    }

    async fn session(&self) -> Result<Arc<Session>, WorkerError> {
        let _turn = self.dialling.acquire().await;
        self.worker.check_runs()?;
        match self.live_session() {
            Some(session) => Ok(session),
            // By its address, because the worker there may have another name than the last one.
            None => Ok(self.worker.node.dial(&self.address, Verify::Host).await?.0),
        }
    }

    fn reason(&self, lost: &Lost) -> String {
        match lost.loss {
            PeerLoss::NameTaken => {
                format!("another worker has the name {} there: {}", self.worker.name(), lost.detail)
            }
            _ => lost.detail.clone(),
        }
    }
}

/// Cancels its request when dropped.
struct Asked<'a> {
    worker: &'a Worker,
    session: &'a Arc<Session>,
    number: u32,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.session.forget_asked(self.number) {
            let (session, request) = (Arc::clone(self.session), self.number);
            let cancel = async move { drop(session.send(ControlFrame::StoreCancel { request }).await) };
            self.worker.node.control_runtime().spawn("cancel store request", Box::pin(cancel));
        }
    }
}

#[doc(hidden)]
impl Worker {
    /// Serves a store to the peers, until `service` or the worker is dropped. False if this worker serves one already.
    pub fn serve_store(&self, service: &Arc<dyn StoreService>) -> bool {
        self.node.serve_store(service)
    }

    /// Whether this worker listens at `address`.
    pub fn listens_at(&self, address: &str) -> bool {
        self.node.is_own_address(address)
    }

    /// The maximum number of open sessions.
    pub fn sessions_max(&self) -> usize {
        self.node.sessions().most()
    }

    /// The address at which this worker reaches the store at `address`, whose addresses are `found`: `address` itself,
    /// or loopback, if this machine has that address and the worker hands its secret over on loopback.
    ///
    /// # Errors
    /// The worker has no secret for another machine.
    pub fn reach_store(&self, address: &str, found: &[SocketAddr]) -> Result<String, &'static str> {
        if !self.node.hands_secret_over() {
            return Ok(address.to_owned());
        }
        match local(address, found) {
            Some(local) => Ok(local),
            // Dialling reports a name that cannot be resolved.
            None if found.is_empty() => Ok(address.to_owned()),
            None => Err(
                "it is on another machine, and this worker has no secret: give all ranks the same secret file \
                 (TENSORWIRE_SECRET_FILE), or TLS",
            ),
        }
    }
}

/// The address on which a worker without a secret listens, or which it dials, for `address`, whose addresses are
/// `found`: loopback with the same port, unless `address` is a loopback address already. `None` if another machine has
/// the address.
pub(crate) fn local(address: &str, found: &[SocketAddr]) -> Option<String> {
    let is_loopback = |found: &SocketAddr| found.ip().to_canonical().is_loopback();
    // The operating system binds only to addresses of this machine.
    let is_own = |found: &SocketAddr| {
        let mut any_port = *found;
        any_port.set_port(0);
        UdpSocket::bind(any_port).is_ok()
    };
    match found {
        [] => None,
        found if found.iter().all(is_loopback) => Some(address.to_owned()),
        found if found.iter().any(is_own) => {
            let port = host_and_port(address).ok()?.1;
            Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string())
        }
        _ => None,
    }
}
