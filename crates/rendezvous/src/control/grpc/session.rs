//! One session: the two halves its user holds, and the task that joins them to a gRPC stream.
//!
//! The halves live on the user's runtime, the task and the stream on the plane's; bounded channels are
//! between. The task decides how a session ends and says so in [`SessionEnd`].

use std::{error::Error, fmt, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tensorwire_protocol::{limits::CONTROL_FRAME_BYTES_MAX, text::escaped};
use tensorwire_verbs_reactor::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tonic::{Status, Streaming};

use super::{closed, door::Guest, within};
use crate::control::{
    Addresses, ControlError, ControlSession, FrameReceiver, FrameSender, ProvenPeer, generated::Frame,
};

/// Frames buffered per direction, and their bytes: a largest frame, or several small ones.
const QUEUE_FRAMES: usize = 8;
const QUEUE_BYTES: usize = CONTROL_FRAME_BYTES_MAX;

/// A frame, and its room among the bytes of its queue.
struct Queued {
    data: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

/// A queue's room for bytes.
#[derive(Clone)]
struct QueueRoom(Arc<Semaphore>);

impl QueueRoom {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUE_BYTES)))
    }

    /// Waits until there is room for `data`. Cancel-safe.
    async fn queue(&self, data: Vec<u8>) -> Queued {
        let bytes = u32::try_from(data.len().clamp(1, QUEUE_BYTES)).unwrap_or(u32::MAX);
        // It is never closed.
        Queued { _room: self.0.clone().acquire_many_owned(bytes).await.ok(), data }
    }
}

const DAMAGED: &str = "a frame of the peer's was damaged on its way: its checksum is another";

/// How long an ended session waits for the peer to end it too.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why nothing more arrives.
#[derive(Debug, Clone)]
enum SessionEnd {
    /// Not yet.
    Open,
    /// The peer ended its direction.
    Orderly,
    /// The peer, or the way to it, is gone.
    Lost(String),
    /// This plane was closed.
    Closed,
}

impl SessionEnd {
    fn error(&self) -> ControlError {
        match self {
            Self::Closed => ControlError::Closed,
            Self::Lost(detail) => ControlError::Lost { detail: detail.clone() },
            Self::Open | Self::Orderly => ControlError::Lost { detail: "the peer ended the session".into() },
        }
    }
}

/// What is left of a direction to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outgoing {
    /// Frames are taken and sent.
    Running,
    /// No more are taken; those already taken are sent.
    Finishing,
    /// Ends at once, with an error.
    Aborted,
}

/// The parts of a new session.
pub(super) struct Parts {
    /// For the user.
    pub(super) session: ControlSession,
    /// For the plane's runtime.
    pub(super) task: SessionTask,
    /// What is sent to the peer.
    pub(super) outgoing: OutgoingFrames,
}

/// Frames for the peer, the goodbye last. `Err` aborts the stream.
pub(super) type OutgoingFrames = stream::BoxStream<'static, Result<Frame, Status>>;

/// Makes a session over the connection between `addresses`. `guest` is the connection it came in by, if it did; `proven` what TLS has shown of the peer.
pub(super) fn session(
    addresses: Addresses,
    guest: Option<Arc<Guest>>,
    proven: Option<Arc<ProvenPeer>>,
) -> Parts {
    let (outgoing_sender, outgoing) = mpsc::channel(QUEUE_FRAMES);
    let (incoming_sender, incoming) = mpsc::channel(QUEUE_FRAMES);
    let (end_sender, end) = watch::channel(SessionEnd::Open);
    let (control_sender, control) = watch::channel(Outgoing::Running);
    let sender = GrpcSender {
        frames: outgoing_sender,
        room: QueueRoom::new(),
        end: end.clone(),
        guest: guest.clone(),
        proven,
    };
    let sender = Arc::new(sender);
    let receiver = Box::new(GrpcReceiver { frames: incoming, end });
    Parts {
        session: ControlSession { sender, receiver, addresses: Some(addresses) },
        task: SessionTask {
            incoming: incoming_sender,
            room: QueueRoom::new(),
            end: end_sender,
            outgoing: control_sender,
            guest,
        },
        outgoing: Box::pin(outgoing_frames(outgoing, control)),
    }
}

/// The frames of `frames`, as long as `control` lets them.
fn outgoing_frames(
    frames: mpsc::Receiver<Queued>,
    control: watch::Receiver<Outgoing>,
) -> impl Stream<Item = Result<Frame, Status>> + Send {
    stream::unfold(Some((frames, control)), |open| async {
        let (mut frames, control) = open?;
        match next_outgoing(&mut frames, &control).await {
            Ok(Some(data)) => {
                let checksum = Some(crc32c::crc32c(&data));
                Some((Ok(Frame { data, goodbye: false, checksum }), Some((frames, control))))
            }
            Ok(None) => Some((Ok(Frame { data: Vec::new(), goodbye: true, checksum: None }), None)),
            Err(status) => Some((Err(status), None)),
        }
    })
}

async fn next_outgoing(
    frames: &mut mpsc::Receiver<Queued>,
    control: &watch::Receiver<Outgoing>,
) -> Result<Option<Vec<u8>>, Status> {
    tokio::select! {
        biased;
        () = stopped(control.clone()) => {}
        frame = frames.recv() => return Ok(frame.map(|frame| frame.data)),
    }
    // Still running means that the task is gone, because the plane's runtime is going away.
    if *control.borrow() != Outgoing::Finishing {
        return Err(Status::aborted("the session was aborted"));
    }
    frames.close();
    Ok(frames.recv().await.map(|frame| frame.data))
}

async fn stopped(mut control: watch::Receiver<Outgoing>) {
    let _ = control.wait_for(|it| *it != Outgoing::Running).await;
}

/// Runs on the plane's runtime as long as the session.
pub(super) struct SessionTask {
    incoming: mpsc::Sender<Queued>,
    room: QueueRoom,
    end: watch::Sender<SessionEnd>,
    outgoing: watch::Sender<Outgoing>,
    guest: Option<Arc<Guest>>,
}

impl SessionTask {
    /// Moves frames from `stream` to the user until the session has ended in both directions.
    pub(super) async fn run(self, mut stream: Streaming<Frame>, closing: watch::Receiver<bool>) {
        let finished = tokio::select! {
            biased;
            () = closed(closing.clone()) => Some(SessionEnd::Closed),
            () = self.end.closed() => None,
            end = self.receive(&mut stream) => Some(end),
        };
        let Self { incoming, end, outgoing, guest, .. } = self;
        if let Some(finished) = &finished {
            end.send_replace(finished.clone());
        }
        drop(incoming);
        match finished {
            Some(SessionEnd::Lost(detail)) => {
                log!(DEBUG, detail, "control session lost");
                outgoing.send_replace(Outgoing::Aborted);
            }
            Some(SessionEnd::Closed) => {
                outgoing.send_replace(Outgoing::Finishing);
                farewell(&mut stream, &outgoing).await;
            }
            // The user dropped both halves; the outgoing frames end by themselves.
            None => farewell(&mut stream, &outgoing).await,
            Some(SessionEnd::Orderly | SessionEnd::Open) => {
                tokio::select! {
                    () = end.closed() => {}
                    () = outgoing.closed() => {}
                    () = closed(closing.clone()) => {
                        end.send_replace(SessionEnd::Closed);
                        outgoing.send_replace(Outgoing::Finishing);
                    }
                }
                let _ = within(FAREWELL, outgoing.closed()).await;
            }
        }
        if let Some(guest) = guest {
            guest.stranger.leave();
        }
    }

    /// Receives until the peer ends its direction or is lost.
    async fn receive(&self, stream: &mut Streaming<Frame>) -> SessionEnd {
        loop {
            match stream.message().await {
                Ok(Some(frame)) if frame.goodbye => return SessionEnd::Orderly,
                Ok(Some(frame)) if frame.data.len() > CONTROL_FRAME_BYTES_MAX => {
                    return SessionEnd::Lost(oversize(frame.data.len()));
                }
                Ok(Some(frame)) if is_damaged(&frame) => return SessionEnd::Lost(DAMAGED.to_owned()),
                Ok(Some(frame)) => {
                    // A user who dropped the receiving half still may send: what arrives is discarded.
                    let _ = self.incoming.send(self.room.queue(frame.data).await).await;
                }
                Ok(None) => return SessionEnd::Lost("the peer is gone, without a goodbye".to_owned()),
                Err(status) => return SessionEnd::Lost(lost_text(&status)),
            }
        }
    }
}

/// Lets frames on their way out leave, and the peer end its direction, for a bounded time.
async fn farewell(stream: &mut Streaming<Frame>, outgoing: &watch::Sender<Outgoing>) {
    let _ = within(FAREWELL, async {
        outgoing.closed().await;
        while let Ok(Some(_)) = stream.message().await {}
    })
    .await;
}

/// A bit that changes on the way can make two workers agree on a connection of which each knows something else.
fn is_damaged(frame: &Frame) -> bool {
    frame.checksum.is_some_and(|checksum| checksum != crc32c::crc32c(&frame.data))
}

fn oversize(bytes: usize) -> String {
    format!("the peer sent a frame of {bytes} bytes, the limit is {CONTROL_FRAME_BYTES_MAX}")
}

/// What a stream's failure means to people.
fn lost_text(status: &Status) -> String {
    let mut text = match status.code() {
        tonic::Code::OutOfRange => format!("the peer sent a frame above {CONTROL_FRAME_BYTES_MAX} bytes"),
        tonic::Code::Aborted => "the peer aborted the session".to_owned(),
        _ => "the peer ended, or the way to it broke".to_owned(),
    };
    text.push_str(": ");
    text.push_str(&causes(status));
    text
}

/// An error with all its causes, in one line: what the peer says in them is escaped.
pub(super) fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = match error.downcast_ref::<tonic::Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    };
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    escaped(&text).into_owned()
}

struct GrpcSender {
    frames: mpsc::Sender<Queued>,
    room: QueueRoom,
    end: watch::Receiver<SessionEnd>,
    guest: Option<Arc<Guest>>,
    proven: Option<Arc<ProvenPeer>>,
}

impl GrpcSender {
    async fn send_frame(&self, data: Vec<u8>) -> Result<(), ControlError> {
        if data.len() > CONTROL_FRAME_BYTES_MAX {
            return Err(ControlError::FrameTooLarge { bytes: data.len() });
        }
        let place = async {
            let queued = self.room.queue(data).await;
            self.frames.reserve().await.map(|place| place.send(queued))
        };
        tokio::select! {
            biased;
            () = broken(self.end.clone()) => {}
            sent = place => if sent.is_ok() {
                return Ok(());
            },
        }
        Err(self.end.borrow().error())
    }
}

async fn broken(mut end: watch::Receiver<SessionEnd>) {
    let _ = end.wait_for(|end| matches!(end, SessionEnd::Lost(_) | SessionEnd::Closed)).await;
}

impl FrameSender for GrpcSender {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        Box::pin(self.send_frame(frame))
    }

    fn admitted(&self) {
        if let Some(guest) = &self.guest {
            guest.stranger.admit();
        }
    }

    fn proven(&self) -> Option<&ProvenPeer> {
        self.proven.as_deref()
    }
}

impl fmt::Debug for GrpcSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcSender").field("end", &*self.end.borrow()).finish_non_exhaustive()
    }
}

struct GrpcReceiver {
    frames: mpsc::Receiver<Queued>,
    end: watch::Receiver<SessionEnd>,
}

impl FrameReceiver for GrpcReceiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(async {
            if let Some(frame) = self.frames.recv().await {
                return Ok(Some(frame.data));
            }
            match &*self.end.borrow() {
                SessionEnd::Orderly => Ok(None),
                // The task went away with the plane's runtime.
                SessionEnd::Open => Err(ControlError::Closed),
                end => Err(end.error()),
            }
        })
    }
}

impl fmt::Debug for GrpcReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcReceiver").field("end", &*self.end.borrow()).finish_non_exhaustive()
    }
}
