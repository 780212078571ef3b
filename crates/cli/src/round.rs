//! The messages and bytes of one round of a pull, from the worker's counters.

use std::{fmt, time::Duration};

use indicatif::{BinaryBytes, HumanCount};
use serde::Serialize;
use tensorwire::{PeerInfo, fabric::Counters};

use crate::{plan::Plan, watch::seconds};

/// The counters at the beginning of a round.
#[derive(Debug)]
pub(crate) struct Round {
    /// `None` if there is only one round.
    number: Option<u32>,
    before: Option<PeerInfo>,
}

impl Round {
    /// Begins round `number`, before its first fetch. `None` if rounds have no numbers.
    pub(crate) fn begin(number: Option<u32>, before: Option<PeerInfo>) -> Self {
        Self { number, before }
    }

    /// The report after the last fetch; with its counts if there is `memory_bytes`.
    pub(crate) fn end(
        &self,
        after: Option<&PeerInfo>,
        moved: &Moved,
        elapsed: Duration,
        memory_bytes: Option<u64>,
    ) -> RoundReport {
        let counts = after.zip(memory_bytes);
        RoundReport {
            number: self.number,
            tensors: moved.tensors,
            bytes: moved.bytes,
            resumed: moved.resumed,
            elapsed,
            transport: after.and_then(|info| info.transport).map(|kind| kind.to_string()),
            counts: counts.map(|(after, memory_bytes)| self.counts(after, memory_bytes)),
        }
    }

    fn counts(&self, after: &PeerInfo, memory_bytes: u64) -> Counts {
        let before = self.before.as_ref().map(|info| (info.fabric, info.counters)).unwrap_or_default();
        // The counters of a new connection begin at 0.
        Counts {
            sent: Sent::between(&before.1, &after.counters),
            received: Received::between(&before.1, &after.counters),
            bytes_in: after.fabric.bytes_received.saturating_sub(before.0.bytes_received),
            bytes_out: after.fabric.bytes_sent.saturating_sub(before.0.bytes_sent),
            validated: after.counters.checksums_matched.saturating_sub(before.1.checksums_matched),
            memory_bytes,
        }
    }
}

/// The tensors of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    tensors: usize,
    bytes: u64,
    /// Tensors that the output had before.
    resumed: usize,
}

impl Moved {
    /// Of the tensors `wanted` of the plan.
    pub(crate) fn of(plan: &Plan, wanted: &[usize]) -> Self {
        let pieces = wanted.iter().filter_map(|&at| plan.layout.pieces.get(at));
        let bytes = pieces.fold(0, |bytes: u64, piece| bytes.saturating_add(piece.bytes));
        Self { tensors: wanted.len(), bytes, resumed: plan.layout.pieces.len() - wanted.len() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What a round has moved.
#[derive(Debug, Serialize)]
pub(crate) struct RoundReport {
    #[serde(skip)]
    number: Option<u32>,
    tensors: usize,
    bytes: u64,
    resumed: usize,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    elapsed: Duration,
    transport: Option<String>,
    /// Of `--stats`.
    #[serde(rename = "stats")]
    counts: Option<Counts>,
}

impl fmt::Display for RoundReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, tensors, bytes, resumed, elapsed, transport, counts } = self;
        match number {
            None => f.write_str("pulled")?,
            Some(number) => write!(f, "round {number}:")?,
        }
        let (rate, seconds) = (*bytes as f64 / elapsed.as_secs_f64().max(1e-9), elapsed.as_secs_f64());
        let transport = transport.as_deref().unwrap_or("no transport");
        let (bytes, rate) = (BinaryBytes(*bytes), BinaryBytes(rate as u64));
        write!(f, " {tensors} tensors, {bytes} in {seconds:.3} s, {rate}/s over {transport}")?;
        if *resumed > 0 {
            write!(f, ", and found {resumed} complete")?;
        }
        writeln!(f)?;
        counts.iter().try_for_each(|counts| counts.fmt(f))
    }
}

/// Messages, bytes and memory of a round.
#[derive(Debug, Serialize)]
struct Counts {
    sent: Sent,
    received: Received,
    bytes_in: u64,
    bytes_out: u64,
    validated: u64,
    memory_bytes: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes_in, bytes_out) = (HumanCount(self.bytes_in), HumanCount(self.bytes_out));
        writeln!(f, "  sent     {}", self.sent)?;
        writeln!(f, "  received {}", self.received)?;
        writeln!(f, "  fabric   {bytes_in} bytes in, {bytes_out} bytes out")?;
        if self.validated > 0 {
            writeln!(f, "  validated {}", HumanCount(self.validated))?;
        }
        writeln!(f, "  memory   {} bytes", self.memory_bytes)
    }
}

/// Messages between two readings of counters, of the kinds that a client sends.
#[derive(Debug, PartialEq, Serialize)]
struct Sent {
    tensor_request: u64,
    tensor_re_request: u64,
    cancel: u64,
}

impl Sent {
    fn between(before: &Counters, after: &Counters) -> Self {
        let (before, after) = (before.sent, after.sent);
        Self {
            tensor_request: after.tensor_request.saturating_sub(before.tensor_request),
            tensor_re_request: after.tensor_re_request.saturating_sub(before.tensor_re_request),
            cancel: after.cancel.saturating_sub(before.cancel),
        }
    }
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor_request, tensor_re_request, cancel } = self;
        write!(f, "TENSOR_REQUEST {tensor_request}, TENSOR_RE_REQUEST {tensor_re_request}, CANCEL {cancel}")
    }
}

/// The same, of the kinds that a client receives.
#[derive(Debug, PartialEq, Serialize)]
struct Received {
    meta_data_response: u64,
    error_status: u64,
    cancel_ack: u64,
}

impl Received {
    fn between(before: &Counters, after: &Counters) -> Self {
        let (before, after) = (before.received, after.received);
        Self {
            meta_data_response: after.meta_data_response.saturating_sub(before.meta_data_response),
            error_status: after.error_status.saturating_sub(before.error_status),
            cancel_ack: after.cancel_ack.saturating_sub(before.cancel_ack),
        }
    }
}

impl fmt::Display for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { meta_data_response, error_status, cancel_ack } = self;
        write!(
            f,
            "META_DATA_RESPONSE {meta_data_response}, ERROR_STATUS {error_status}, CANCEL_ACK {cancel_ack}"
        )
    }
}

#[cfg(test)]
mod tests {
    use tensorwire::fabric::Counters;

    use super::{Received, Sent};

    #[test]
    fn kinds_that_did_not_occur_are_shown_as_zero() {
        let before = Counters::default();
        let mut after = before;
        after.sent.tensor_request = 3;
        after.received.error_status = 1;
        assert_eq!(
            Sent::between(&before, &after).to_string(),
            "TENSOR_REQUEST 3, TENSOR_RE_REQUEST 0, CANCEL 0"
        );
        assert_eq!(
            Received::between(&before, &after).to_string(),
            "META_DATA_RESPONSE 0, ERROR_STATUS 1, CANCEL_ACK 0"
        );
    }
}
