//! Counts the bytes and frames of an HTTP/2 connection, below HTTP/2.
//!
//! The HTTP/2 library reads frames without content as fast as they arrive, and logs some of them. So frames are counted
//! before the library sees them, by their nine-byte headers. A peer that is not authenticated may send a limited
//! amount; more waits in the kernel. A peer that sends too many frames without content, or acknowledges a PING that was
//! not sent, is disconnected.

use std::time::{Duration, Instant};

use tensorwire_fabric_tcp::Pace;

/// Maximum number of bytes that are read from a peer before it is authenticated: the preface and all frames.
pub(super) const STRANGER_BYTES: usize = 64 << 10;

/// Maximum number of frames that are read from a peer before it is authenticated. A member may send further frames
/// before its proof is checked.
pub(super) const STRANGER_FRAMES: usize = 256;

/// How many of these frames may have no content. The HTTP/2 library logs the end of a connection with 20 streams that
/// were reset early.
const STRANGER_IDLE_FRAMES: u32 = 16;

/// Rate of frames without content, for every peer: 1,000 per second.
const IDLE_INTERVAL: Duration = Duration::from_millis(1);

/// How many frames without content may arrive at once.
const IDLE_BURST: u32 = 1000;

/// Length of the preface before a client's first frame.
const PREFACE_BYTES: usize = 24;

const HEADER_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

/// A flag of DATA and HEADERS.
const END_STREAM: u8 = 1;
/// A flag of PING.
const ACK: u8 = 1;

/// The counts of a connection, and its limits.
#[derive(Debug)]
pub(super) struct Traffic {
    incoming: Frames,
    outgoing: Frames,
    /// PINGs that were sent and not acknowledged.
    pings: u32,
    /// The bytes and frames of a peer that is not authenticated; `None` once it is.
    stranger: Option<Spent>,
    idle: Pace,
    since: Instant,
}

#[derive(Debug, Default)]
struct Spent {
    bytes: usize,
    frames: usize,
    idle: u32,
}

impl Traffic {
    /// For an accepted connection, whose peer is not authenticated.
    pub(super) fn accepted() -> Self {
        Self::new(Frames::after(PREFACE_BYTES), Frames::after(0), Some(Spent::default()))
    }

    /// For a dialled connection.
    pub(super) fn dialled() -> Self {
        Self::new(Frames::after(0), Frames::after(PREFACE_BYTES), None)
    }

    #[allow(clippy::disallowed_methods)] // time on a socket is real time
    fn new(incoming: Frames, outgoing: Frames, stranger: Option<Spent>) -> Self {
        let idle = Pace::new(IDLE_INTERVAL, IDLE_BURST);
        Self { incoming, outgoing, pings: 0, stranger, idle, since: Instant::now() }
    }

    /// Removes the limits of strangers, because the peer is authenticated.
    pub(super) fn admit(&mut self) {
        self.stranger = None;
    }

    /// How many bytes may be read next; zero if the peer has reached its limit.
    pub(super) fn room(&self) -> usize {
        let Some(Spent { bytes, frames, .. }) = self.stranger else { return usize::MAX };
        // This few bytes cannot contain more frame headers than allowed.
        let of_frames = STRANGER_FRAMES.saturating_sub(frames) * HEADER_BYTES;
        STRANGER_BYTES.saturating_sub(bytes).min(of_frames)
    }

    /// Counts written bytes.
    pub(super) fn sent(&mut self, mut bytes: &[u8]) {
        while let Some(header) = self.outgoing.next(&mut bytes) {
            if header.kind == PING && header.flags & ACK == 0 {
                self.pings = self.pings.saturating_add(1);
            }
        }
    }

    /// Counts read bytes.
    ///
    /// # Errors
    /// The reason why the connection must be closed, as a message for users. HTTP/2 must not see these bytes.
    pub(super) fn received(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        if let Some(spent) = &mut self.stranger {
            spent.bytes += bytes.len();
        }
        while let Some(header) = self.incoming.next(&mut bytes) {
            if let Some(spent) = &mut self.stranger {
                spent.frames += 1;
            }
            if header.kind == PING && header.flags & ACK != 0 {
                let pings = self.pings.checked_sub(1);
                self.pings = pings.ok_or("the peer acknowledged a PING that was not sent")?;
            } else if header.carries_nothing() {
                self.count_idle()?;
            }
        }
        Ok(())
    }

    fn count_idle(&mut self) -> Result<(), String> {
        let what = "frames without content (PING, SETTINGS, RST_STREAM and others)";
        let now = self.since.elapsed();
        self.idle.count(now);
        if !self.idle.wait(now).is_zero() {
            return Err(format!(
                "the peer sent too many {what}: the limit is {IDLE_BURST} at once and 1,000 per second"
            ));
        }
        let Some(spent) = &mut self.stranger else { return Ok(()) };
        spent.idle += 1;
        if spent.idle > STRANGER_IDLE_FRAMES {
            let limit = format!("the limit is {STRANGER_IDLE_FRAMES}");
            return Err(format!("the peer sent too many {what} before it was authenticated: {limit}"));
        }
        Ok(())
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    length: usize,
    kind: u8,
    flags: u8,
}

impl Header {
    fn carries_nothing(self) -> bool {
        match self.kind {
            DATA | HEADERS => self.length == 0 && self.flags & END_STREAM == 0,
            CONTINUATION => self.length == 0,
            // Their number is proportional to the sent bytes.
            WINDOW_UPDATE => false,
            _ => true,
        }
    }
}

/// Finds the frame headers in the bytes of one direction, which arrive in parts of any length.
#[derive(Debug)]
struct Frames {
    /// Bytes until the next header.
    skip: usize,
    header: [u8; HEADER_BYTES],
    /// How many bytes of the header have arrived.
    have: usize,
}

impl Frames {
    fn after(skip: usize) -> Self {
        Self { skip, header: [0; HEADER_BYTES], have: 0 }
    }

    /// The next complete header; `bytes` becomes the rest after it. `None` if no bytes are left.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<Header> {
        *bytes = bytes.split_off(self.skipped(bytes.len())..)?;
        let part = bytes.split_off(..bytes.len().min(HEADER_BYTES - self.have))?;
        self.header[self.have..self.have + part.len()].copy_from_slice(part);
        self.have += part.len();
        if self.have < HEADER_BYTES {
            return None;
        }
        self.have = 0;
        let [a, b, c, kind, flags, ..] = self.header;
        self.skip = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        Some(Header { length: self.skip, kind, flags })
    }

    /// How many of the next `bytes` bytes are not part of a header.
    fn skipped(&mut self, bytes: usize) -> usize {
        let skipped = self.skip.min(bytes);
        self.skip -= skipped;
        skipped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let [_, a, b, c] = u32::try_from(length).unwrap().to_be_bytes();
        [&[a, b, c, kind, flags, 0, 0, 0, 1][..], &vec![0xA5; length]].concat()
    }

    fn stranger() -> Traffic {
        let mut traffic = Traffic::accepted();
        traffic.received(&[b'P'; PREFACE_BYTES]).unwrap();
        traffic
    }

    fn member() -> Traffic {
        let mut traffic = stranger();
        traffic.admit();
        traffic
    }

    /// How many of these frames are accepted, one after another, and the error of the next.
    fn passed(traffic: &mut Traffic, frame: &[u8], most: usize) -> (usize, String) {
        for count in 0..most {
            if let Err(why) = traffic.received(frame) {
                return (count, why);
            }
        }
        (most, String::new())
    }

    #[test]
    fn headers_are_found_however_the_bytes_are_cut() {
        let lengths = [0, 1, 8, 9, 300, 0, 70_000];
        let stream: Vec<u8> =
            lengths.iter().zip(0..).flat_map(|(&length, kind)| frame(kind, kind * 3, length)).collect();
        let expected =
            lengths.iter().zip(0..).map(|(&length, kind)| Header { length, kind, flags: kind * 3 });
        let expected: Vec<Header> = expected.collect();
        for size in (1..40).chain([299, 300, 301, 4096, stream.len()]) {
            let mut frames = Frames::after(PREFACE_BYTES);
            let bytes = [&[0xFF; PREFACE_BYTES][..], &stream].concat();
            let mut found = Vec::new();
            for mut part in bytes.chunks(size) {
                while let Some(header) = frames.next(&mut part) {
                    found.push(header);
                }
                assert!(part.is_empty());
            }
            assert_eq!(found, expected, "in pieces of {size} bytes");
        }
    }

    #[test]
    fn s4_a_ping_that_was_not_sent_cannot_be_acknowledged() {
        for mut traffic in [stranger(), member(), Traffic::dialled()] {
            if traffic.outgoing.skip > 0 {
                traffic.sent(&[b'P'; PREFACE_BYTES]);
            }
            let (asked, answer) = (frame(PING, 0, 8), frame(PING, ACK, 8));
            // In two halves, as a socket may accept it. This side's answers to the peer's PINGs do not count as PINGs.
            traffic.sent(&[&answer[..], &asked[..4]].concat());
            traffic.sent(&asked[4..]);
            let (passed, why) = passed(&mut traffic, &answer, 3);
            assert!(passed == 1 && why.contains("a PING that was not sent"), "{passed}: {why}");
        }
    }

    #[test]
    fn s4_a_stranger_sends_few_frames_that_carry_nothing() {
        let unknown = 0x4D;
        for (kind, flags, length) in [
            (PING, 0, 8),
            (RST_STREAM, 0, 4),
            (SETTINGS, ACK, 0),
            (SETTINGS, 0, 6),
            (DATA, 0, 0),
            (HEADERS, 0, 0),
            (CONTINUATION, 0, 0),
            (unknown, 0, 3),
        ] {
            let frame = frame(kind, flags, length);
            let (passed, why) = passed(&mut stranger(), &frame, 1000);
            assert_eq!(passed, STRANGER_IDLE_FRAMES as usize, "kind {kind}");
            assert!(why.contains("before it was authenticated: the limit is 16"), "{why}");
        }
    }

    #[test]
    fn s4_frames_that_carry_nothing_come_at_a_pace() {
        let rst = frame(RST_STREAM, 0, 4);
        for mut traffic in [member(), Traffic::dialled()] {
            let (passed, why) = passed(&mut traffic, &rst, 1_000_000);
            let paced = traffic.since.elapsed().as_millis() as usize + 1;
            assert!((IDLE_BURST as usize..=IDLE_BURST as usize + paced).contains(&passed), "{passed}");
            assert!(why.contains("1000 at once"), "{why}");
        }
    }

    #[test]
    fn frames_that_carry_something_are_not_paced() {
        let mut traffic = member();
        for frame in [
            frame(DATA, 0, 1),
            frame(DATA, END_STREAM, 0),
            frame(HEADERS, END_STREAM, 20),
            frame(CONTINUATION, 0, 1),
            frame(WINDOW_UPDATE, 0, 4),
        ] {
            assert_eq!(passed(&mut traffic, &frame, 10_000).0, 10_000);
        }
        assert_eq!(traffic.room(), usize::MAX);
    }

    #[test]
    fn s4_a_stranger_has_room_for_so_many_bytes_and_frames() {
        let preface = PREFACE_BYTES;
        for (length, frames, bytes) in [
            (0, 256, preface + 256 * 9..=preface + 256 * 9),
            (1, 256, preface + 255 * 10 + 1..=preface + 256 * 10 + 8),
            (300, 212, 64 << 10..=64 << 10),
        ] {
            let mut traffic = stranger();
            let stream = frame(DATA, END_STREAM, length).repeat(1000);
            let mut sent = 0;
            while traffic.room() > 0 {
                let read = traffic.room().min(4096);
                traffic.received(&stream[sent..sent + read]).unwrap();
                sent += read;
            }
            let spent = traffic.stranger.as_ref().unwrap();
            assert_eq!(spent.frames, frames);
            assert!(bytes.contains(&spent.bytes), "{}", spent.bytes);
            traffic.admit();
            assert_eq!(traffic.room(), usize::MAX);
            assert!(traffic.received(&stream[sent..]).is_ok());
        }
    }
}
