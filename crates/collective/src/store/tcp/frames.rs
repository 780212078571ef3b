//! Reads frames.

use std::{io, sync::Arc, time::Duration};

use tensorwire_fabric::{Runtime, timeout};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{
    guests::{Held, Seat},
    wire::{FRAME_BYTES_MAX, HELLO_BYTES, LENGTH_BYTES, Malformed, frame_length},
};

/// The most bytes read at once. Memory grows as bytes arrive, and not as a frame's length claims.
const READ_BYTES: usize = 64 << 10;

/// The longest frame that is not counted. Records of groups are shorter, so these pass when others use all bytes.
const SMALL_BYTES: usize = 4 << 10;

/// Why no further frame comes.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("it closed the connection")]
    Closed,
    #[error("it did nothing, or held most bytes, while others needed room")]
    NoRoom,
    #[error("it did not complete a frame within {0:?}")]
    HalfSent(Duration),
    #[error("it sent {0}")]
    Malformed(#[from] Malformed),
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
}

/// The bytes of a server for frames that are incomplete or unread, all clients together.
#[derive(Debug, Clone)]
pub(super) struct Room {
    seat: Arc<Seat>,
    most: usize,
}

impl Room {
    /// `most` bytes, or enough for a request and its answer.
    pub(super) fn new(seat: &Arc<Seat>, most: usize) -> Self {
        Self { seat: Arc::clone(seat), most: most.max(3 * FRAME_BYTES_MAX) }
    }

    /// # Errors
    /// [`Ended::NoRoom`].
    pub(super) fn hold(&self, bytes: usize) -> Result<Option<Held>, Ended> {
        let held = (bytes > SMALL_BYTES).then(|| self.seat.hold(bytes, self.most).ok_or(Ended::NoRoom));
        held.transpose()
    }
}

/// Reads frames. A frame that has begun must be complete within `limit`.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    stream: R,
    limit: Duration,
    /// Received bytes that were not returned yet.
    bytes: Vec<u8>,
    /// When the first byte of the incomplete frame was seen.
    begun: Option<Duration>,
    /// Where the bytes of an incomplete frame are counted, in a server.
    room: Option<Room>,
    held: Option<Held>,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(stream: R, limit: Duration, room: Option<Room>) -> Self {
        Self { stream, limit, bytes: Vec::new(), begun: None, room, held: None }
    }

    /// Reads the peer's hello, which must arrive within the limit.
    ///
    /// # Errors
    /// [`Ended`].
    pub(super) async fn hello(&mut self, runtime: &dyn Runtime) -> Result<[u8; HELLO_BYTES], Ended> {
        let mut hello = [0; HELLO_BYTES];
        let read = self.stream.read_exact(&mut hello);
        match timeout(runtime, self.limit, read).await {
            Ok(Ok(_)) => Ok(hello),
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Ended::Closed),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(Ended::HalfSent(self.limit)),
        }
    }

    /// The next frame, without its length.
    ///
    /// # Errors
    /// [`Ended`].
    ///
    /// # Cancel safety
    /// No bytes are lost.
    pub(super) async fn next(&mut self, runtime: &dyn Runtime) -> Result<Vec<u8>, Ended> {
        loop {
            let missing = match frame_length(&self.bytes)? {
                Some(length) if self.bytes.len() - LENGTH_BYTES >= length => return Ok(self.take(length)),
                Some(length) => {
                    if let (Some(room), None) = (&self.room, &self.held) {
                        self.held = room.hold(length)?;
                    }
                    length + LENGTH_BYTES - self.bytes.len()
                }
                None => SMALL_BYTES,
            };
            self.bytes.reserve_exact(missing.min(READ_BYTES));
            if self.read(runtime).await? == 0 {
                return Err(Ended::Closed);
            }
        }
    }

    async fn read(&mut self, runtime: &dyn Runtime) -> Result<usize, Ended> {
        if self.bytes.is_empty() {
            // No frame has begun: an idle peer may stay connected.
            return Ok(self.stream.read_buf(&mut self.bytes).await?);
        }
        let now = runtime.now();
        let left = self.begun.get_or_insert(now).saturating_add(self.limit).saturating_sub(now);
        let read = self.stream.read_buf(&mut self.bytes);
        timeout(runtime, left, read).await.map_err(|_| Ended::HalfSent(self.limit))?.map_err(Ended::from)
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(LENGTH_BYTES + length);
        let mut frame = std::mem::replace(&mut self.bytes, rest);
        frame.drain(..LENGTH_BYTES);
        (self.begun, self.held) = (None, None);
        frame
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tensorwire_fabric::TokioRuntime;
    use tokio::io::AsyncWriteExt;

    use super::{
        super::wire::{FRAME_BYTES_MAX, Request},
        *,
    };

    const LIMIT: Duration = Duration::from_secs(60);

    fn request(value: usize) -> Request {
        Request::Set { key: "k".to_owned(), value: vec![1; value] }
    }

    #[tokio::test]
    async fn frames_come_whole_however_they_were_cut() {
        let runtime = TokioRuntime::current().unwrap();
        let sent = [request(3), request(1 << 20), request(0)];
        let bytes: Vec<u8> = sent.iter().flat_map(|it| it.encode(1)).collect();
        for part in [1 << 12, bytes.len()] {
            let (mut writer, stream) = tokio::io::duplex(1 << 16);
            let mut reader = FrameReader::new(stream, LIMIT, None);
            let write = async {
                for part in bytes.chunks(part) {
                    writer.write_all(part).await.unwrap();
                }
                drop(writer);
            };
            let read = async {
                for sent in &sent {
                    // A dropped read loses nothing.
                    let frame = match reader.next(&runtime).now_or_never() {
                        Some(frame) => frame,
                        None => reader.next(&runtime).await,
                    };
                    assert_eq!(Request::decode(&frame.unwrap()).unwrap(), (1, sent.clone()));
                }
                assert!(matches!(reader.next(&runtime).await, Err(Ended::Closed)));
            };
            tokio::join!(write, read);
        }
    }

    #[tokio::test]
    async fn a_frame_that_does_not_end_in_time_is_refused_but_silence_is_not() {
        let runtime = TokioRuntime::current().unwrap();
        let (mut writer, stream) = tokio::io::duplex(64);
        let mut reader = FrameReader::new(stream, Duration::from_millis(20), None);
        assert!(timeout(&runtime, Duration::from_millis(60), reader.next(&runtime)).await.is_err());
        writer.write_all(&request(3).encode(1)[..5]).await.unwrap();
        assert!(matches!(reader.next(&runtime).await, Err(Ended::HalfSent(_))));
    }

    #[tokio::test]
    async fn a_claimed_length_alone_takes_no_memory() {
        let runtime = TokioRuntime::current().unwrap();
        let (mut writer, stream) = tokio::io::duplex(64);
        writer.write_all(&(FRAME_BYTES_MAX as u32).to_le_bytes()).await.unwrap();
        let mut reader = FrameReader::new(stream, LIMIT, None);
        assert!(reader.next(&runtime).now_or_never().is_none());
        assert!(reader.bytes.capacity() <= 2 * READ_BYTES);
    }
}
