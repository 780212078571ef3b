//! Work requests that are posted to the device in one call.

use std::fmt;

use tensorwire_fabric::SlotKey;

use super::message::Message;

/// Work requests in one call.
pub(super) const BATCH: usize = 16;

/// Ranges of memory in one call.
pub(super) const RANGES: usize = 32;

/// The most ranges of memory in one work request; fewer if the device takes fewer. A higher limit makes every entry of
/// the device's queue larger.
pub(super) const RANGES_OF_REQUEST: usize = 16;

/// An operation without a completion of its own ends at the next completion of the call, if at most this many bytes are
/// posted in between. On a network of 100 Gbit/s they take 5 µs, about as long as a completion with its event.
const SIGNAL_BYTES: u64 = 64 << 10;

/// A range of local bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LocalRange {
    pub(super) address: u64,
    pub(super) length: u64,
    /// The local key of their region.
    pub(super) key: u32,
}

// Without the key: keys are never logged.
impl fmt::Debug for LocalRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalRange")
            .field("address", &self.address)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Write,
    Read,
}

/// A one-sided write or read that is one work request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) direction: Direction,
    /// Bytes of all its local ranges together.
    pub(super) length: u64,
    /// Address of the first byte at the peer.
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    pub(super) immediate: Option<u32>,
}

// Without the key: keys are never logged.
impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("direction", &self.direction)
            .field("length", &self.length)
            .field("remote", &self.remote)
            .field("immediate", &self.immediate)
            .finish_non_exhaustive()
    }
}

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Transfer(Transfer),
    /// A message without bytes. It arrives by another opcode than a write with immediate.
    Message(Message),
}

/// The part of an operation that a request executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// A part that other parts follow: a piece, or a message that carries the length of earlier pieces.
    Piece,
    /// The last part of the operation in that slot, which has `bytes` bytes in all.
    End { key: SlotKey, bytes: u64 },
    /// One of the connection's own messages was delivered.
    Signal(Message),
}

/// A work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) work: Work,
    pub(super) part: Part,
    /// Whether the request asks for a completion. One that does not ends with the next one that does.
    pub(super) is_signaled: bool,
}

impl Request {
    fn bytes(&self) -> u64 {
        match self.work {
            Work::Transfer(transfer) => transfer.length,
            Work::Message(_) => 0,
        }
    }
}

/// The requests of one call, with their ranges. Reused, so that posting allocates nothing.
#[derive(Debug)]
pub(super) struct Doorbell {
    limit: usize,
    requests: Vec<(Request, usize)>,
    /// The ranges of all requests, one after the other.
    ranges: Vec<LocalRange>,
}

impl Doorbell {
    pub(super) fn new() -> Self {
        Self { limit: 0, requests: Vec::with_capacity(BATCH), ranges: Vec::with_capacity(RANGES) }
    }

    /// Empties the doorbell. It then takes at most `limit` requests.
    pub(super) fn begin(&mut self, limit: usize) {
        self.limit = limit.min(BATCH);
        self.requests.clear();
        self.ranges.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The requests, each with the number of its ranges.
    pub(super) fn requests(&self) -> impl DoubleEndedIterator<Item = (&Request, usize)> {
        self.requests.iter().map(|(request, ranges)| (request, *ranges))
    }

    pub(super) fn ranges(&self) -> &[LocalRange] {
        &self.ranges
    }

    /// Bytes of all requests.
    pub(super) fn bytes(&self) -> u64 {
        self.requests.iter().map(|(request, _)| request.bytes()).sum()
    }

    /// Requests that ask for a completion.
    pub(super) fn signals(&self) -> usize {
        self.requests.iter().filter(|(request, _)| request.is_signaled).count()
    }

    /// Adds a request; `false` if there is no room for it.
    pub(super) fn push(&mut self, request: Request, ranges: &[LocalRange]) -> bool {
        let has_room = self.requests.len() < self.limit && self.ranges.len() + ranges.len() <= RANGES;
        if has_room {
            self.requests.push((request, ranges.len()));
            self.ranges.extend_from_slice(ranges);
        }
        has_room
    }

    /// Like [`push`](Self::push), for a request of several ranges.
    pub(super) fn push_gathered(
        &mut self,
        request: Request,
        first: &LocalRange,
        rest: &[LocalRange],
    ) -> bool {
        let count = 1 + rest.len();
        let has_room = self.requests.len() < self.limit && self.ranges.len() + count <= RANGES;
        if has_room {
            self.requests.push((request, count));
            self.ranges.push(*first);
            self.ranges.extend_from_slice(rest);
        }
        has_room
    }

    /// Decides which requests ask for a completion. The last one does, so that every request ends by a completion. The
    /// last part of an operation does, too, if more than [`SIGNAL_BYTES`] follow it before the next completion.
    pub(super) fn mark_signals(&mut self) {
        let mut behind = None;
        for (request, _) in self.requests.iter_mut().rev() {
            let is_awaited = !matches!(request.part, Part::Piece);
            request.is_signaled = behind.is_none_or(|bytes| is_awaited && bytes > SIGNAL_BYTES);
            let after = behind.filter(|_| !request.is_signaled).unwrap_or(0);
            behind = Some(after + request.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of these requests are signaled. For each request, `requests` has its bytes and whether it ends an
    /// operation.
    fn signals(requests: &[(u64, bool)]) -> Vec<bool> {
        let mut doorbell = Doorbell::new();
        doorbell.begin(BATCH);
        for &(length, is_end) in requests {
            let transfer =
                Transfer { direction: Direction::Write, length, remote: 0, remote_key: 0, immediate: None };
            let end = Part::End { key: SlotKey::from_bits(0), bytes: length };
            let part = if is_end { end } else { Part::Piece };
            assert!(doorbell.push(Request { work: Work::Transfer(transfer), part, is_signaled: false }, &[]));
        }
        doorbell.mark_signals();
        doorbell.requests().map(|(request, _)| request.is_signaled).collect()
    }

    #[test]
    fn the_last_of_a_call_is_signaled_whatever_it_is() {
        assert_eq!(signals(&[(8, true)]), [true]);
        assert_eq!(signals(&[(8, true), (8, true), (8, true)]), [false, false, true]);
        assert_eq!(signals(&[(8, true), (8, false)]), [false, true]);
    }

    #[test]
    fn an_operation_does_not_wait_for_a_large_one_behind_it() {
        let large = SIGNAL_BYTES + 1;
        assert_eq!(signals(&[(8, true), (large, true)]), [true, true]);
        assert_eq!(signals(&[(8, true), (SIGNAL_BYTES, true)]), [false, true]);
        // The bytes of small requests add up, and the sum starts again after a signaled one.
        let half = SIGNAL_BYTES / 2;
        assert_eq!(signals(&[(1, true), (half, true), (half, true)]), [false, false, true]);
        assert_eq!(
            signals(&[(1, true), (half, true), (large, true), (half, true)]),
            [false, true, false, true]
        );
    }

    #[test]
    fn pieces_ask_for_nothing() {
        let large = 1 << 30;
        assert_eq!(signals(&[(large, false), (large, false), (large, true)]), [false, false, true]);
        assert_eq!(
            signals(&[(large, false), (1, true), (large, false), (5, true)]),
            [false, true, false, true]
        );
    }

    #[test]
    fn no_more_goes_into_a_call_than_the_device_takes_at_once() {
        let mut doorbell = Doorbell::new();
        doorbell.begin(usize::MAX);
        let range = LocalRange { address: 1, length: 1, key: 0 };
        let message =
            Request { work: Work::Message(Message::Farewell), part: Part::Piece, is_signaled: false };
        assert!(doorbell.push_gathered(message, &range, &[range; RANGES - 1]));
        assert!(!doorbell.push(message, &[range]) && doorbell.push(message, &[]));
        doorbell.begin(usize::MAX);
        let count = std::iter::repeat_with(|| doorbell.push(message, &[])).take_while(|&taken| taken).count();
        assert_eq!(count, BATCH);
    }
}
