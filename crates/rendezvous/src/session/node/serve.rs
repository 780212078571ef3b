//! Accepting sessions, and acting on the frames of a session.

use std::{slice, sync::Arc, time::Duration};

use futures::future::join_all;
use tensorwire_fabric::{BoxFuture, timeout};
use tensorwire_protocol::{
    Code, Status, Validation,
    wire::control::{Connect, ControlFrame, ListEntry},
};

use crate::{
    connection::{DataConnection, REASON},
    control::{ControlError, FAREWELL, FrameReceiver},
    error::{Lost, PeerLoss},
    session::{ListPage, Session, counts::Served, node::Node},
    values::{end_signal::unless, published::Edition},
};

/// Entries in one page of a list. A page stays below the frame limit even with the longest names and shapes.
const PAGE_ENTRIES: usize = 256;

/// How many characters of an illegal frame are shown.
const ILLEGAL_FRAME_CHARS: usize = 256;

impl Node {
    /// Accepts sessions that peers open, until the worker is shut down.
    pub(crate) async fn accept_sessions(self: Arc<Self>) {
        let closing = self.closing.subscribe();
        loop {
            match unless(closing.clone(), self.settings.control.accept()).await {
                Some(Ok(session)) => {
                    let node = self.clone();
                    self.settings.control_runtime.spawn("welcome", Box::pin(node.welcome(session)));
                }
                Some(Err(ControlError::Closed)) | None => return,
                Some(Err(error)) => log!(WARN, %error, "a control session could not be accepted"),
            }
        }
    }

    /// Acts on the peer's frames until the session ends, then closes the connections that were set up by it.
    pub(crate) async fn serve_session(
        self: Arc<Self>,
        session: Arc<Session>,
        mut receiver: Box<dyn FrameReceiver>,
        served: Served,
    ) {
        let frames = unless(session.ended(), self.act_on_frames(&session, &mut *receiver));
        let lost = match unless(self.closing.subscribe(), frames).await {
            Some(Some(lost)) => lost,
            Some(None) => session.lost(),
            None => Lost::shut_down_here(),
        };
        let peer = &session.peer.worker;
        if lost.loss == PeerLoss::Misbehaved
            && let Some(left_out) = self.log.line(peer)
        {
            log!(WARN, peer, why = lost.detail, left_out, "closing the session of a misbehaving peer");
        } else {
            log!(DEBUG, peer, why = lost.detail, "session ended");
        }
        if lost.loss == PeerLoss::Goodbye {
            self.take_in(&session.up_connections(), &lost, FAREWELL).await;
        }
        if lost.loss == PeerLoss::NameTaken
            && let Some(peer) = self.known_peer(peer)
        {
            peer.note_refusal(self.settings.runtime.now(), &lost.detail);
        }
        let connections = session.fail(&lost);
        self.say_goodbye(&session, &lost).await;
        session.hang_up();
        for connection in connections {
            connection.close(&lost).await;
        }
        drop(served);
    }

    /// The peer has ended a connection: closes it after data in flight has arrived.
    fn follow(self: &Arc<Self>, connection: Arc<DataConnection>, lost: Lost) {
        let is_over = connection.is_over();
        connection.set_over(&lost);
        if is_over {
            return;
        }
        let node = self.clone();
        let following = async move {
            node.take_in(slice::from_ref(&connection), &lost, REASON).await;
            connection.close(&lost).await;
        };
        self.settings.control_runtime.spawn("follow the peer's end", Box::pin(following));
    }

    /// Waits until the peer has closed `connections`, for at most `limit`, because data that it sent before may still
    /// be in flight.
    async fn take_in(&self, connections: &[Arc<DataConnection>], lost: &Lost, limit: Duration) {
        for connection in connections {
            connection.set_over(lost);
        }
        let ends = join_all(connections.iter().map(|connection| connection.until_end()));
        let _ = timeout(&*self.settings.control_runtime, limit, ends).await;
    }

    async fn act_on_frames(
        self: &Arc<Self>,
        session: &Arc<Session>,
        receiver: &mut dyn FrameReceiver,
    ) -> Lost {
        loop {
            let acted = match session.next_frame(receiver).await {
                Ok(frame) => self.handle(session, frame).await,
                Err(lost) => Err(lost),
            };
            if let Err(lost) = acted {
                return lost;
            }
        }
    }

    /// Sends the peer the reason for the end of the session, unless the peer has ended it.
    async fn say_goodbye(&self, session: &Session, lost: &Lost) {
        match lost.loss {
            PeerLoss::Gone | PeerLoss::Goodbye | PeerLoss::NameTaken | PeerLoss::StepBroken => return,
            _ => {}
        }
        let goodbye = ControlFrame::Goodbye { status: lost.status() };
        if let Ok(sender) = session.sender() {
            // The limit is for a peer that reads nothing.
            let _ = timeout(&*self.settings.control_runtime, FAREWELL, sender.send(goodbye.encode())).await;
        }
    }

    /// Acts on one frame; an error ends the session.
    async fn handle(self: &Arc<Self>, session: &Arc<Session>, frame: ControlFrame) -> Result<(), Lost> {
        match frame {
            ControlFrame::Connect(offer) => return self.set_up(session, None, offer).await,
            ControlFrame::Standby { replaces, offer } => {
                return self.set_up(session, Some(replaces), offer).await;
            }
            ControlFrame::Retired { connection } => {
                session.connection(connection).iter().for_each(|connection| connection.note_retired());
            }
            ControlFrame::Connected(answer) => session.answer(answer.connection, Ok(answer)),
            ControlFrame::Refused { connection, status } => session.answer(connection, Err(status)),
            ControlFrame::Disconnected { connection, status } => match session.connection(connection) {
                Some(connection) => self.follow(connection, Lost::from_peer(&status)),
                None => session.note_disowned(connection, status.message),
            },
            ControlFrame::RegionAdd { connection, region } => {
                let number = region.region;
                if session.add_region(connection, region)? {
                    return reply(session, ControlFrame::RegionAck { connection, region: number }).await;
                }
            }
            ControlFrame::RegionAck { connection, region } => {
                session.region_confirmed(connection, region);
            }
            ControlFrame::RegionRemove { connection, region } => {
                if let Some(connection) = session.connection(connection) {
                    connection.queue_pair.remove_remote_region(tensorwire_fabric::RegionId(region));
                }
            }
            ControlFrame::ListRequest { request, after, with_checksums } => {
                self.answer_list(session, request, (after, with_checksums))?;
            }
            ControlFrame::ListResponse { request, entries, more } => {
                session.give_list(request, ListPage { entries, more });
            }
            ControlFrame::ReportRequest { request } => self.answer_report(session, request)?,
            ControlFrame::ReportResponse { request, report } => session.give_report(request, *report),
            ControlFrame::StoreRequest { request, body } => {
                return session
                    .serve_store(self.store(), (request, body), &*self.settings.control_runtime)
                    .await;
            }
            ControlFrame::StoreResponse { request, body } => session.give_stored(request, body),
            ControlFrame::StoreCancel { request } => session.cancel_stored(request),
            ControlFrame::Ping { nonce } => return reply(session, ControlFrame::Pong { nonce }).await,
            ControlFrame::Pong { nonce } => session.pong(nonce),
            ControlFrame::Goodbye { status } => return Err(farewell(&status)),
            other => {
                // Cut, because the peer chooses the content of some frames.
                let frame: String = format!("{other:?}").chars().take(ILLEGAL_FRAME_CHARS).collect();
                return Err(Lost::misbehaved(format!("the peer sent a frame that is illegal now: {frame}")));
            }
        }
        Ok(())
    }

    /// Sets up the data connection that the peer offers: one for requests, or the standby of the connection `replaces`.
    async fn set_up(
        self: &Arc<Self>,
        session: &Arc<Session>,
        replaces: Option<u32>,
        offer: Connect,
    ) -> Result<(), Lost> {
        if let Err(status) = session.open_for_peer(offer.connection) {
            let refused = ControlFrame::Refused { connection: offer.connection, status };
            return reply(session, refused).await;
        }
        let (node, session) = (self.clone(), session.clone());
        let accepting: BoxFuture<'static, ()> = match replaces {
            None => Box::pin(node.accept_data(session, offer)),
            Some(replaces) => Box::pin(node.accept_standby(session, replaces, offer)),
        };
        self.settings.runtime.spawn("accept connection", accepting);
        Ok(())
    }

    /// Answers the peer's request for a page of the list, in a task of its own, so that pings are answered while checksums are
    /// computed.
    fn answer_list(
        self: &Arc<Self>,
        session: &Arc<Session>,
        request: u32,
        (after, with_checksums): (Option<String>, bool),
    ) -> Result<(), Lost> {
        let node = self.clone();
        self.answer_in_turn(session, async move {
            let ListPage { entries, more } = node.list_page(after.as_deref(), with_checksums).await;
            ControlFrame::ListResponse { request, entries, more }
        })
    }

    /// Answers the peer's request for a report. It counts as a request for a list.
    fn answer_report(self: &Arc<Self>, session: &Arc<Session>, request: u32) -> Result<(), Lost> {
        let (node, reader) = (self.clone(), session.peer.worker.clone());
        self.answer_in_turn(session, async move {
            ControlFrame::ReportResponse { request, report: Box::new(node.report(Some(&reader))) }
        })
    }

    /// Makes and sends an answer in a task of its own: one at a time for a peer, and one at a time on a session.
    fn answer_in_turn(
        self: &Arc<Self>,
        session: &Arc<Session>,
        answer: impl Future<Output = ControlFrame> + Send + 'static,
    ) -> Result<(), Lost> {
        let room = session.begin_list()?;
        let session = session.clone();
        let answering = async move {
            let _turn = session.list_turn().await;
            if !session.is_over() {
                let making = session.connections().listing_turn().await;
                let answer = answer.await;
                drop(making);
                let _ = session.send(answer).await;
            }
            drop(room);
        };
        self.settings.runtime.spawn("list", Box::pin(answering));
        Ok(())
    }

    /// The page of this worker's list that follows the name `after`.
    pub(crate) async fn list_page(&self, after: Option<&str>, with_checksums: bool) -> ListPage {
        let mut page = self.settings.values.published.page(after, PAGE_ENTRIES + 1);
        let more = page.len() > PAGE_ENTRIES;
        page.truncate(PAGE_ENTRIES);
        let mut entries = Vec::with_capacity(page.len());
        for (name, Edition { version, tensor, .. }) in page {
            // Stored with the tensor, so that repeated requests cost one pass over the bytes.
            let checksum = match with_checksums {
                true => tensor.checksums().unwrap_or_default().sum(Validation::Xxh3, tensor.bytes()).await,
                false => None,
            };
            entries.push(ListEntry { name, version, checksum, metadata: tensor.metadata().clone() });
        }
        ListPage { entries, more }
    }
}

async fn reply(session: &Session, frame: ControlFrame) -> Result<(), Lost> {
    session.send(frame).await.map_err(|error| Lost::gone(error.to_string()))
}

fn farewell(status: &Status) -> Lost {
    if status.code == Code::AlreadyExists {
        return Lost::new(PeerLoss::NameTaken, status.message.as_str());
    }
    Lost::new(PeerLoss::Goodbye, format!("the peer sent a goodbye: {status}"))
}
