//! The messages and bytes of one round of a pull, from the worker's counters.

use std::{fmt::Write, time::Duration};

use indicatif::{BinaryBytes, HumanCount};
use tensorwire::{PeerInfo, fabric::Counters};

use crate::plan::Plan;

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

    /// The report to print after the last fetch.
    pub(crate) fn end(
        &self,
        after: Option<&PeerInfo>,
        plan: &Plan,
        elapsed: Duration,
        stats: bool,
    ) -> String {
        let bytes = plan.layout.data_bytes();
        let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-9);
        let transport = after.and_then(|info| info.transport);
        let mut text = format!(
            "{} {} tensors, {} in {:.3} s, {}/s over {}",
            self.number.map_or_else(|| "pulled".to_owned(), |number| format!("round {number}:")),
            plan.layout.pieces.len(),
            BinaryBytes(bytes),
            elapsed.as_secs_f64(),
            BinaryBytes(rate as u64),
            transport.map_or_else(|| "no transport".to_owned(), |kind| kind.to_string()),
        );
        if let Some(after) = after.filter(|_| stats) {
            // Writing to a String does not fail.
            let _ = self.write_stats(&mut text, after);
        }
        text
    }

    fn write_stats(&self, text: &mut String, after: &PeerInfo) -> std::fmt::Result {
        let before = self.before.as_ref().map(|info| (info.fabric, info.counters)).unwrap_or_default();
        write!(text, "\n  sent     {}", sent(&before.1, &after.counters))?;
        write!(text, "\n  received {}", received(&before.1, &after.counters))?;
        // The counters of a new connection begin at 0.
        let received = after.fabric.bytes_received.saturating_sub(before.0.bytes_received);
        let sent = after.fabric.bytes_sent.saturating_sub(before.0.bytes_sent);
        write!(text, "\n  fabric   {} bytes in, {} bytes out", HumanCount(received), HumanCount(sent))?;
        let matched = after.counters.checksums_matched.saturating_sub(before.1.checksums_matched);
        if matched == 0 { Ok(()) } else { write!(text, "\n  validated {}", HumanCount(matched)) }
    }
}

/// Messages between two readings of counters, of the kinds that a client sends.
fn sent(before: &Counters, after: &Counters) -> String {
    let (before, after) = (before.sent, after.sent);
    let requests = after.tensor_request.saturating_sub(before.tensor_request);
    let re_requests = after.tensor_re_request.saturating_sub(before.tensor_re_request);
    let cancels = after.cancel.saturating_sub(before.cancel);
    format!("TENSOR_REQUEST {requests}, TENSOR_RE_REQUEST {re_requests}, CANCEL {cancels}")
}

fn received(before: &Counters, after: &Counters) -> String {
    let (before, after) = (before.received, after.received);
    let metadata = after.meta_data_response.saturating_sub(before.meta_data_response);
    let errors = after.error_status.saturating_sub(before.error_status);
    let cancels = after.cancel_ack.saturating_sub(before.cancel_ack);
    format!("META_DATA_RESPONSE {metadata}, ERROR_STATUS {errors}, CANCEL_ACK {cancels}")
}

#[cfg(test)]
mod tests {
    use tensorwire::fabric::Counters;

    use super::{received, sent};

    #[test]
    fn kinds_that_did_not_occur_are_shown_as_zero() {
        let before = Counters::default();
        let mut after = before;
        after.sent.tensor_request = 3;
        after.received.error_status = 1;
        assert_eq!(sent(&before, &after), "TENSOR_REQUEST 3, TENSOR_RE_REQUEST 0, CANCEL 0");
        assert_eq!(received(&before, &after), "META_DATA_RESPONSE 0, ERROR_STATUS 1, CANCEL_ACK 0");
    }
}
