//! Coming back to a better fabric.
//!
//! A worker that connected over a lesser fabric, because a better one failed, tries the better one again while the connection is in use. If
//! that succeeds, the new connection is a standby. Each side then uses the standby as soon as it has nothing under way on the old
//! connection, which it retires. When both have retired it, the old connection is closed:
//!
//! ```text
//! dialler: ──STANDBY──▶ set up ──(idle) retire──RETIRED──▶ ┐
//!                                                          ├─▶ close
//! peer:               set up ──(idle) retire──RETIRED───▶  ┘
//! ```
//!
//! So no step is lost, and the values of a step keep their order: those of one connection have all been received before the next
//! one is used. Fetches that wait for a published value are repeated on the new connection. A connection on which a group has its notes is
//! never idle.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::select;
use tensorwire_protocol::{
    Code, Status,
    wire::control::{Connect, ControlFrame},
};

use super::{
    Node,
    connection_setup::{named, refuse},
    fabric_number,
};
use crate::{
    connection::DataConnection,
    error::{Lost, WorkerError},
    peer_memory::enclosure::LocalFabric,
    session::{
        Session,
        known_peer::{KnownPeer, Replaced},
    },
    values::end_signal::unless,
};

/// How long a worker waits before it tries a better fabric, and then between two attempts.
const PAUSE: Duration = Duration::from_secs(2);

/// How often a connection with a standby is checked for transfers under way.
const IDLE_CHECK: Duration = Duration::from_millis(20);

impl Node {
    /// Tries better fabrics until `used` is replaced or ends.
    pub(super) fn seek_better(
        self: &Arc<Self>,
        peer: &KnownPeer,
        session: &Arc<Session>,
        used: &Arc<DataConnection>,
    ) {
        let (node, peer) = (self.clone(), peer.clone());
        let (session, used) = (session.clone(), used.clone());
        let seeking = async move {
            let seek = node.try_better(&peer, &session, &used);
            node.while_used(&session, &used, seek).await;
        };
        self.settings.runtime.spawn("better fabric", Box::pin(seeking));
    }

    /// Runs `work` until it is done, the session or the connection ends, or the worker shuts down.
    async fn while_used(&self, session: &Session, used: &DataConnection, work: impl Future<Output = ()>) {
        let in_session = unless(session.ended(), work);
        let work = unless(self.closing.subscribe(), in_session);
        select(pin!(work), pin!(used.until_end())).await;
    }

    async fn try_better(
        self: &Arc<Self>,
        peer: &KnownPeer,
        session: &Arc<Session>,
        used: &Arc<DataConnection>,
    ) {
        loop {
            self.settings.runtime.sleep(PAUSE).await;
            let mut tried = Vec::new();
            for fabric in self.better(session, used) {
                match self.open_over(fabric, session, Some(used.number())).await {
                    Ok(Some(standby)) => {
                        self.adopt(peer, &standby);
                        if self.replace(peer, session, (used, &standby), tried).await {
                            return;
                        }
                        break;
                    }
                    Ok(None) => {}
                    Err(error) => {
                        log!(DEBUG, peer = peer.name(), transport = %fabric.kind, %error, "still not usable");
                        tried.push(named(fabric.kind, &error));
                    }
                }
            }
        }
    }

    /// The fabrics that this worker prefers to that of `used`, and the peer can use, too.
    fn better<'a>(
        &'a self,
        session: &'a Session,
        used: &DataConnection,
    ) -> impl Iterator<Item = &'a LocalFabric> {
        let offers = |fabric: &LocalFabric| (fabric_number(fabric.kind), fabric.reach.clone());
        let preferred = self.settings.fabrics.iter().take_while(|fabric| fabric.kind != used.kind);
        preferred.filter(move |fabric| session.peer.fabrics.contains(&offers(fabric)))
    }

    /// Uses `standby` in place of `used` once nothing is under way, and closes `used` when the peer does the same. `tried` has the better
    /// fabrics that this worker could not use, which it goes on to try. Returns `false` if one of the connections has ended, or `used` is not
    /// in use any more; then the standby is closed.
    async fn replace(
        self: &Arc<Self>,
        peer: &KnownPeer,
        session: &Arc<Session>,
        (used, standby): (&Arc<DataConnection>, &Arc<DataConnection>),
        tried: Vec<String>,
    ) -> bool {
        let runtime = &self.settings.runtime;
        loop {
            match peer.replace(used, standby) {
                Replaced::Done => break,
                Replaced::Busy => runtime.sleep(IDLE_CHECK).await,
                Replaced::Over => {
                    standby.close(&Lost::gone("the connection that it was to replace is not in use")).await;
                    return false;
                }
            }
        }
        log!(INFO, peer = peer.name(), from = %used.kind, to = %standby.kind, "moved to a better fabric");
        if !tried.is_empty() {
            self.seek_better(peer, session, standby);
        }
        peer.note_not_used(tried);
        // A failure means that the session has ended, which ends both connections.
        let _ = session.send(ControlFrame::Retired { connection: used.number() }).await;
        used.retired_by_peer().await;
        used.close(&Lost::gone(format!("a connection over {} is used instead", standby.kind))).await;
        true
    }

    /// Answers the peer's Standby, whose number the session has registered, and sets up the local side.
    pub(crate) async fn accept_standby(
        self: Arc<Self>,
        session: Arc<Session>,
        replaces: u32,
        offer: Connect,
    ) {
        let number = offer.connection;
        let known = self.known_peer(&session.peer.worker).zip(session.connection(replaces));
        let in_use = known
            .filter(|(peer, used)| peer.uses(used))
            .ok_or_else(|| Status::new(Code::Unavailable, format!("connection {replaces} is not in use")));
        let prepared = in_use.and_then(|in_use| Ok((in_use, self.prepare_for(&offer)?)));
        let ((peer, used), (fabric, half)) = match prepared {
            Ok(prepared) => prepared,
            Err(status) => {
                return refuse(&session, number, status).await;
            }
        };
        match self.accept_over(fabric, &session, half, offer).await {
            Ok(standby) => {
                self.adopt(&peer, &standby);
                let replacing = async {
                    self.replace(&peer, &session, (&used, &standby), Vec::new()).await;
                };
                self.while_used(&session, &used, replacing).await;
            }
            Err(error) => self.give_standby_up(&session, number, &error).await,
        }
    }

    async fn give_standby_up(&self, session: &Session, number: u32, error: &WorkerError) {
        log!(DEBUG, peer = session.peer.worker, %error, "a standby could not be set up");
        session.forget(number);
        self.disown(session, number, error).await;
    }
}
