//! A session: the two halves that its user holds, and the task that connects them to a gRPC stream.
//!
//! The halves are used on the user's runtime, the task and the stream run on the plane's, with bounded channels
//! between. The task decides how a session ends ([`SessionEnd`]).

use std::{error::Error, fmt, sync::Arc};

use futures::{Stream, stream};
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::{limits::CONTROL_FRAME_BYTES_MAX, text::escaped};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tonic::{Status, Streaming};

use super::{closed, door::Guest, frame::Frame, within};
use crate::control::{
    Addresses, ControlError, ControlSession, FAREWELL, FrameReceiver, FrameSender, ProvenPeer,
};

/// Maximum number of buffered frames per direction, and of their bytes: one of maximum length, or several short ones.
const QUEUE_FRAMES: usize = 8;
const QUEUE_BYTES: usize = CONTROL_FRAME_BYTES_MAX;

/// A frame, with its share of the queue's bytes.
struct Queued {
    data: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

/// Limits the bytes in a queue.
#[derive(Clone)]
struct QueueRoom(Arc<Semaphore>);

impl QueueRoom {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUE_BYTES)))
    }

    /// Waits until there is room for `data`. Cancel-safe.
    async fn queue(&self, data: Vec<u8>) -> Queued {
        let bytes = u32::try_from(data.len().clamp(1, QUEUE_BYTES)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        Queued { _room: self.0.clone().acquire_many_owned(bytes).await.ok(), data }
    }
}

const DAMAGED: &str = "a frame of the peer was damaged in transit: its checksum differs";

/// How the incoming direction ended.
#[derive(Debug, Clone)]
enum SessionEnd {
    /// It has not ended.
    Open,
    /// The peer ended it in order.
    Orderly,
    /// The peer or the connection is lost.
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

/// The state of the outgoing direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outgoing {
    /// Frames are accepted and sent.
    Running,
    /// No more frames are accepted; those already accepted are sent.
    Finishing,
    /// The direction ends at once, with an error.
    Aborted,
}

/// The parts of a new session.
pub(super) struct Parts {
    /// For the user.
    pub(super) session: ControlSession,
    /// For the plane's runtime.
    pub(super) task: SessionTask,
    /// The outgoing stream.
    pub(super) outgoing: OutgoingFrames,
}

/// Frames for the peer, with the goodbye at the end. `Err` aborts the stream.
pub(super) type OutgoingFrames = stream::BoxStream<'static, Result<Frame, Status>>;

/// Makes a session over the connection between `addresses`. `guest` is the connection of an accepted session; `proven`
/// is what TLS has proven about the peer.
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

/// The frames of `frames`, until `control` changes.
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
    // If the state is still `Running`, the task was dropped with the plane's runtime.
    if *control.borrow() != Outgoing::Finishing {
        return Err(Status::aborted("the session was aborted"));
    }
    frames.close();
    Ok(frames.recv().await.map(|frame| frame.data))
}

async fn stopped(mut control: watch::Receiver<Outgoing>) {
    let _ = control.wait_for(|it| *it != Outgoing::Running).await;
}

/// The session's task on the plane's runtime.
pub(super) struct SessionTask {
    incoming: mpsc::Sender<Queued>,
    room: QueueRoom,
    end: watch::Sender<SessionEnd>,
    outgoing: watch::Sender<Outgoing>,
    guest: Option<Arc<Guest>>,
}

impl SessionTask {
    /// Passes frames from `stream` to the user until the session has ended in both directions.
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
            // The user dropped both halves, so the outgoing frames end by themselves.
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
                    // If the user has dropped the receiving half, frames are discarded, because the sending half may
                    // still be in use.
                    let _ = self.incoming.send(self.room.queue(frame.data).await).await;
                }
                Ok(None) => {
                    return SessionEnd::Lost("the peer closed the connection without a goodbye".to_owned());
                }
                Err(status) => return SessionEnd::Lost(lost_text(&status)),
            }
        }
    }
}

/// Waits a limited time until accepted frames are sent and the peer has ended its direction.
async fn farewell(stream: &mut Streaming<Frame>, outgoing: &watch::Sender<Outgoing>) {
    let _ = within(FAREWELL, async {
        outgoing.closed().await;
        while let Ok(Some(_)) = stream.message().await {}
    })
    .await;
}

/// Whether the checksum is wrong. Without this check, a changed bit could make two workers set up a connection with
/// different parameters.
fn is_damaged(frame: &Frame) -> bool {
    frame.checksum.is_some_and(|checksum| checksum != crc32c::crc32c(&frame.data))
}

fn oversize(bytes: usize) -> String {
    format!("the peer sent a frame of {bytes} bytes, the limit is {CONTROL_FRAME_BYTES_MAX}")
}

/// The error message for a failed stream: the text of the peer or the operating system. The library's text about HTTP/2
/// goes to the log.
fn lost_text(status: &Status) -> String {
    log!(DEBUG, why = causes(status), "the stream of a control session failed");
    let text = match status.code() {
        tonic::Code::OutOfRange => {
            return format!("the peer sent a frame above {CONTROL_FRAME_BYTES_MAX} bytes");
        }
        tonic::Code::Aborted => "the peer aborted the session",
        _ => "the peer or the connection is lost",
    };
    let mut innermost: &dyn Error = status;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    let cause = match status.source() {
        Some(_) => innermost.to_string(),
        // The status came from the peer.
        None => status.message().to_owned(),
    };
    match cause.contains(ENDED) {
        true => format!("{text}: the connection was closed"),
        false => format!("{text}: {}", escaped(&cause)),
    }
}

/// The library's text for a connection that ended without an error of the operating system.
const ENDED: &str = "broken pipe";

/// An error with all its causes, in one line and escaped, because it may contain text of the peer.
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
                // The task was dropped with the plane's runtime.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s5_what_a_peer_says_in_a_status_of_grpc_is_escaped() {
        let status = Status::unavailable("x\u{1b}[2J\nFORGED\u{202e}");
        assert_eq!(causes(&status), r"x\u{1b}[2J\nFORGED\u{202e}");
        assert!(lost_text(&status).ends_with(r": x\u{1b}[2J\nFORGED\u{202e}"));
    }
}
