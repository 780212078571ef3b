//! Counters of one connection.

use std::fmt;

use crate::MessageCounts;

/// What a connection has sent and received so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Messages sent.
    pub sent: MessageCounts,
    /// Messages received.
    pub received: MessageCounts,
    /// Encoded bytes of the messages sent, with the counts they carry.
    pub message_bytes_sent: u64,
    /// Encoded bytes of the messages received, with the counts they carry.
    pub message_bytes_received: u64,
    /// Acknowledgements sent, one for each message received; only in mode original.
    pub acknowledgements_sent: u64,
    /// Acknowledgements received.
    pub acknowledgements_received: u64,
    /// Messages of nothing but counts sent.
    pub count_only_sent: u64,
    /// Messages of nothing but counts received.
    pub count_only_received: u64,
    /// ASKs sent.
    pub asks_sent: u64,
    /// ASKs received.
    pub asks_received: u64,
    /// ANSWERs sent, one for each ASK received.
    pub answers_sent: u64,
    /// ANSWERs received.
    pub answers_received: u64,
    /// Larger rings offered to the peer.
    pub rings_offered: u64,
    /// Larger rings of the peer moved to.
    pub rings_moved: u64,
    /// Content writes posted.
    pub contents_sent: u64,
    /// Contents that arrived for an open request.
    pub contents_received: u64,
    /// Bytes of the contents sent.
    pub content_bytes_sent: u64,
    /// Bytes of the contents received.
    pub content_bytes_received: u64,
    /// Contents sent inside META_DATA_RESPONSE.
    pub eager_sent: u64,
    /// Contents received inside META_DATA_RESPONSE, for an open request.
    pub eager_received: u64,
    /// Bytes of the contents sent inside messages.
    pub eager_bytes_sent: u64,
    /// Bytes of the contents received inside messages.
    pub eager_bytes_received: u64,
    /// Loans posted to the peer.
    pub loans_sent: u64,
    /// Views of the peer's values that arrived for an open request.
    pub loans_received: u64,
    /// Bytes of the loans posted.
    pub loan_bytes_sent: u64,
    /// Bytes of the views.
    pub loan_bytes_received: u64,
    /// Checksums computed of values that were sent; one that was remembered is not counted.
    pub checksums_computed: u64,
    /// Contents whose checksums matched.
    pub checksums_matched: u64,
    /// Contents whose checksums did not match.
    pub checksums_mismatched: u64,
    /// Arrivals for unknown or finished requests, and arrivals after the connection's end.
    pub ignored: u64,
}

/// Requests of one side of a connection that wait for an answer. Subscriptions do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// How many wait.
    pub requests: u64,
    /// The number of the oldest one. Numbers grow with each request of the connection, so the same number later is the same request, which
    /// has waited since. No clock is read for a request.
    pub oldest: Option<u64>,
}

impl Waiting {
    /// Of the requests with these numbers.
    pub(crate) fn of(numbers: impl Iterator<Item = u64>) -> Self {
        numbers.fold(Self::default(), |waiting, number| Self {
            requests: waiting.requests + 1,
            oldest: Some(waiting.oldest.map_or(number, |oldest| oldest.min(number))),
        })
    }
}

impl Counters {
    /// Counts a content that is being written.
    pub(crate) fn count_content_sent(&mut self, bytes: u64) {
        self.contents_sent += 1;
        self.content_bytes_sent += bytes;
    }

    /// Counts a content that was sent inside a message.
    pub(crate) fn count_eager_sent(&mut self, bytes: u64) {
        self.eager_sent += 1;
        self.eager_bytes_sent += bytes;
    }

    /// Counts a loan that was posted.
    pub(crate) fn count_loan_sent(&mut self, bytes: u64) {
        self.loans_sent += 1;
        self.loan_bytes_sent += bytes;
    }

    /// Counts a content that has arrived inside a message.
    pub(crate) fn count_eager(&mut self, bytes: u64) {
        tensorwire_testpoints::mark!("content arrived inside a message");
        self.eager_received += 1;
        self.eager_bytes_received += bytes;
    }

    /// Counts a written content that has arrived.
    pub(crate) fn count_content(&mut self, bytes: u64) {
        self.contents_received += 1;
        self.content_bytes_received += bytes;
    }

    /// Counts a loan that has arrived.
    pub(crate) fn count_loan(&mut self, bytes: u64) {
        self.loans_received += 1;
        self.loan_bytes_received += bytes;
    }

    /// Counts a content whose checksum was compared.
    pub(crate) fn count_checksum(&mut self, matches: bool) {
        self.checksums_matched += u64::from(matches);
        self.checksums_mismatched += u64::from(!matches);
    }

    /// Records of flow control that were sent besides the messages of transfers: acknowledgements, messages of nothing but
    /// counts, ASK, ANSWER, and what moving a ring takes.
    pub fn flow_control_sent(&self) -> u64 {
        self.acknowledgements_sent
            + self.count_only_sent
            + self.asks_sent
            + self.answers_sent
            + self.rings_offered
            + self.rings_moved
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "sent {} with {} bytes, {} of flow control, {} contents with {} bytes; ",
            self.sent,
            self.message_bytes_sent,
            self.flow_control_sent(),
            self.contents_sent,
            self.content_bytes_sent,
        )?;
        write!(
            f,
            "received {} with {} bytes, {} acknowledgements, {} counts, {} ASKs, {} ANSWERs, {} contents with {} \
             bytes; ignored {} arrivals",
            self.received,
            self.message_bytes_received,
            self.acknowledgements_received,
            self.count_only_received,
            self.asks_received,
            self.answers_received,
            self.contents_received,
            self.content_bytes_received,
            self.ignored,
        )?;
        if self.loans_sent + self.loans_received > 0 {
            write!(
                f,
                "; lent {} values with {} bytes, views {} with {} bytes",
                self.loans_sent, self.loan_bytes_sent, self.loans_received, self.loan_bytes_received,
            )?;
        }
        if self.checksums_computed + self.checksums_matched + self.checksums_mismatched == 0 {
            return Ok(());
        }
        write!(
            f,
            "; {} checksums computed, {} matched, {} did not",
            self.checksums_computed, self.checksums_matched, self.checksums_mismatched,
        )
    }
}
