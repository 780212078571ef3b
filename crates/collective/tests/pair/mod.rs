//! Operations between two ranks outside the collectives, in one process, over shared memory and TCP. Suites have the names of
//! Gloo's tests that check the same.

mod aborted;
mod buffers;
mod exports;
mod many;
mod racing;
mod sendrecv;

use std::time::Duration;

use tensorwire_collective::pair::Sent;

use crate::group::{over_fabrics, over_verbs, possible, ranks, ranks_within, tensor, values};

/// Short, and far more than a message takes.
const SHORT: Duration = Duration::from_millis(200);

/// Waits until all of them are received.
async fn all_received(sent: Vec<Sent>) {
    for sent in sent {
        sent.await.expect("a receipt");
    }
}

/// Element `at` of a test message from `from` to `to`: lost, duplicated or misplaced elements change it.
fn element(from: usize, to: usize, at: usize) -> i32 {
    (from * 1_000_000 + to * 10_000 + at) as i32
}
