//! Accepting sessions: the listener, the gRPC service, and the plane's main task.

use std::{
    convert::Infallible,
    io,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{
    Stream, StreamExt,
    stream::{self, FuturesUnordered},
};
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codegen::{BoxFuture, Service, http},
    server::StreamingService,
    transport::Server,
};

use super::{
    CONNECTION_WINDOW_BYTES, Keepalive, ON_THE_WIRE_MAX, WINDOW_BYTES, closed,
    door::{Guest, GuestStream, Reception},
    frame::{self, Frame},
    handover::Handover,
    session::{OutgoingFrames, Parts, session},
    within,
};
use crate::control::ControlSession;

/// How long a closing plane waits for the goodbyes of its sessions.
const CLOSING: Duration = Duration::from_millis(1500);

/// Maximum size of request headers.
const HEADER_BYTES_MAX: u32 = 8 << 10;

/// A session that waits to be accepted, and its connection.
pub(super) struct Arrival {
    pub(super) session: ControlSession,
    pub(super) guest: Arc<Guest>,
}

/// The state of the plane's main task.
pub(super) struct Host {
    pub(super) listener: TcpListener,
    pub(super) handover: Option<Handover>,
    pub(super) reception: Arc<Reception>,
    pub(super) arrivals: mpsc::Sender<Arrival>,
    pub(super) closing: watch::Receiver<bool>,
    pub(super) tasks: Tasks,
    pub(super) keepalive: Keepalive,
}

impl Host {
    /// Serves until the plane is closed, then waits a limited time for the sessions to end.
    ///
    /// While `running` exists, new session tasks can start; `all_done` ends when it and the tasks are dropped.
    pub(super) async fn run(self, running: mpsc::Sender<()>, mut all_done: mpsc::Receiver<()>) {
        let Self { listener, handover, reception, arrivals, closing, tasks, keepalive } = self;
        let service = Attach { arrivals, closing: closing.clone(), tasks };
        let serving = Server::builder()
            .http2_keepalive_interval(Some(keepalive.interval))
            .http2_keepalive_timeout(Some(keepalive.timeout))
            .http2_max_header_list_size(HEADER_BYTES_MAX)
            .max_concurrent_streams(1)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .serve_with_incoming(service, connections(listener, reception));
        let giving = async {
            if let Some(handover) = handover {
                handover.serve().await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = giving => {}
            () = closed(closing.clone()) => {}
            served = serving => {
                if let Err(error) = served {
                    log!(ERROR, %error, "the control plane stopped listening");
                }
                closed(closing).await;
            }
        }
        drop(running);
        let _ = within(CLOSING, all_done.recv()).await;
        // The last frames of the sessions are in the connections' buffers: let the connections be polled once more.
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
    }
}

/// Tracks the running session tasks. Each task holds a sender, and the receiver ends when all are dropped.
#[derive(Clone)]
pub(super) struct Tasks(pub(super) mpsc::WeakSender<()>);

impl Tasks {
    /// Runs `task` on the plane's runtime, unless the plane is closed.
    #[allow(clippy::disallowed_methods)] // the plane owns its runtime; no simulated task runs there
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Some(running) = self.0.upgrade() else { return };
        tokio::spawn(async move {
            task.await;
            drop(running);
        });
    }
}

/// The connections for sessions, after their peers have sent the first bytes.
fn connections(
    listener: TcpListener,
    reception: Arc<Reception>,
) -> impl Stream<Item = Result<GuestStream, io::Error>> + Send {
    let arriving = FuturesUnordered::new();
    stream::unfold((listener, reception, arriving), |(listener, reception, mut arriving)| async {
        loop {
            tokio::select! {
                Some(arrived) = arriving.next() => if let Some(guest) = arrived {
                    return Some((Ok(guest), (listener, reception, arriving)));
                },
                newcomer = reception.door.accept(&listener) => arriving.push(reception.clone().receive(newcomer)),
            }
        }
    })
}

/// The service of the plane.
#[derive(Clone)]
struct Attach {
    arrivals: mpsc::Sender<Arrival>,
    closing: watch::Receiver<bool>,
    tasks: Tasks,
}

impl Service<http::Request<Body>> for Attach {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(frame::answer(self.clone(), request))
    }
}

impl StreamingService<Frame> for Attach {
    type Response = Frame;
    type ResponseStream = OutgoingFrames;
    type Future = BoxFuture<Response<OutgoingFrames>, Status>;

    fn call(&mut self, request: Request<Streaming<Frame>>) -> Self::Future {
        Box::pin(self.clone().attach(request))
    }
}

impl Attach {
    async fn attach(self, request: Request<Streaming<Frame>>) -> Result<Response<OutgoingFrames>, Status> {
        let guest = request.extensions().get::<Arc<Guest>>().cloned();
        let guest = guest.ok_or_else(|| Status::internal("a connection without a guest"))?;
        // Waits here, within the connection's deadline, while sessions are accepted slowly.
        let place = self.arrivals.reserve().await;
        let place = place.map_err(|_| Status::unavailable("the control plane was closed"))?;
        if !guest.stranger.attach() {
            return Err(Status::failed_precondition("a connection carries one session"));
        }
        let Parts { session, task, outgoing } =
            session(guest.addresses(), Some(guest.clone()), guest.proven.clone());
        self.tasks.spawn(task.run(request.into_inner(), self.closing.clone()));
        place.send(Arrival { session, guest });
        Ok(Response::new(outgoing))
    }
}

// The session checks the limit of a frame and names it in the error. This limit bounds what gRPC buffers.
const _: () = assert!(ON_THE_WIRE_MAX > CONTROL_FRAME_BYTES_MAX);
