//! Descriptions of all metrics, and the durations of operations. `docs/src/metrics.md` has the labels.

use std::time::Duration;

use tensorwire_fabric::Runtime;

#[cfg(not(feature = "metrics"))]
use crate::unmetered::{
    Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, histogram, is_recorded,
};
#[cfg(feature = "metrics")]
use metrics::{
    Histogram, IntoF64, Unit, counter, describe_counter, describe_gauge, describe_histogram, histogram,
};
#[cfg(feature = "metrics")]
use std::cell::Cell;

const COUNTERS: [(&str, Unit, &str); 11] = [
    ("tensorwire_transfers_total", Unit::Count, "Values received and sent"),
    ("tensorwire_bytes_total", Unit::Bytes, "Bytes of values received and sent"),
    ("tensorwire_errors_total", Unit::Count, "Receives and fetches that failed"),
    ("tensorwire_connects_total", Unit::Count, "Data connections made by either side"),
    ("tensorwire_encrypted_connects_total", Unit::Count, "Data connections made that are encrypted"),
    (
        "tensorwire_reconnects_total",
        Unit::Count,
        "Data connections made that were not the first with the peer",
    ),
    ("tensorwire_closes_total", Unit::Count, "Data connections that ended in order"),
    ("tensorwire_losses_total", Unit::Count, "Data connections that were lost"),
    (WHOLE_CONTENTS, Unit::Count, "Contents of sets that came whole, because their deltas could not be used"),
    ("tensorwire_copies_total", Unit::Count, "Copies of payload bytes by this process"),
    ("tensorwire_copied_bytes_total", Unit::Bytes, "Payload bytes that this process copied"),
];

const GAUGES: [(&str, Unit, &str); 9] = [
    ("tensorwire_pool_block_bytes", Unit::Bytes, "Memory of the pool taken from the system"),
    ("tensorwire_pool_huge_bytes", Unit::Bytes, "Memory of the pool in huge pages"),
    ("tensorwire_pool_used_bytes", Unit::Bytes, "Memory of the pool in use"),
    (
        "tensorwire_pool_leaked_bytes",
        Unit::Bytes,
        "Memory of the pool that is never reused because a peer might still write it",
    ),
    (
        "tensorwire_pool_retired_bytes",
        Unit::Bytes,
        "Memory of the pool that peers still view after their connection ended",
    ),
    ("tensorwire_pool_waiting", Unit::Count, "Tasks that wait for memory of the pool"),
    ("tensorwire_peers", Unit::Count, "Peers that are connected, dialled, named or held"),
    ("tensorwire_peers_connected", Unit::Count, "Peers with a data connection"),
    ("tensorwire_sessions", Unit::Count, "Control sessions that are open"),
];

const WHOLE_CONTENTS: &str = "tensorwire_set_whole_contents_total";

/// Counts a content of a set that comes whole for `why`, although the peer has deltas of it.
pub(crate) fn count_whole_content(why: &'static str) {
    counter!(WHOLE_CONTENTS, "why" => why).increment(1);
}

const SECONDS: &str = "tensorwire_receive_seconds";

/// Describes each metric to the recorder of the `metrics` crate, if one is installed.
pub(crate) fn describe() {
    for (name, unit, text) in COUNTERS {
        describe_counter!(name, unit, text);
    }
    for (name, unit, text) in GAUGES {
        describe_gauge!(name, unit, text);
    }
    describe_histogram!(SECONDS, Unit::Seconds, "Time from the call of a receive or fetch to its value");
}

/// Durations of fetches and receives, from the call to the value. Without a recorder, the clock is not read: two readings
/// take a fifth of the time in which a small value is found in a catalogue.
#[derive(Debug)]
pub(crate) struct Times {
    are_recorded: bool,
    fetch: Histogram,
    fetch_many: Histogram,
    recv: Histogram,
    recv_many: Histogram,
    pages: Histogram,
    call: Histogram,
}

/// An operation whose time is recorded.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Timed {
    Fetch,
    FetchMany,
    Recv,
    RecvMany,
    Pages,
    Call,
}

impl Times {
    pub(crate) fn new() -> Self {
        let of = |operation: &'static str| histogram!(SECONDS, "operation" => operation);
        let fetch = of("fetch");
        Self {
            are_recorded: is_recorded(&fetch),
            fetch,
            fetch_many: of("fetch_many"),
            recv: of("recv"),
            recv_many: of("recv_many"),
            pages: of("pages"),
            call: of("call"),
        }
    }

    /// The start time of an operation; `None` if no recorder takes its duration.
    pub(crate) fn begin(&self, clock: &dyn Runtime) -> Option<Duration> {
        self.are_recorded.then(|| clock.now())
    }

    /// Records an operation that began at `begun` and has succeeded.
    pub(crate) fn end(&self, operation: Timed, begun: Option<Duration>, clock: &dyn Runtime) {
        let Some(begun) = begun else { return };
        let times = match operation {
            Timed::Fetch => &self.fetch,
            Timed::FetchMany => &self.fetch_many,
            Timed::Recv => &self.recv,
            Timed::RecvMany => &self.recv_many,
            Timed::Pages => &self.pages,
            Timed::Call => &self.call,
        };
        times.record(clock.now().saturating_sub(begun));
    }
}

/// Whether a recorder takes the values of `histogram`: only a recorded value is converted to its number. This records
/// nothing.
#[cfg(feature = "metrics")]
fn is_recorded(histogram: &Histogram) -> bool {
    struct Asked<'a>(&'a Cell<bool>);

    impl IntoF64 for Asked<'_> {
        fn into_f64(self) -> f64 {
            self.0.set(true);
            0.0
        }
    }

    let asked = Cell::new(false);
    histogram.record_many(Asked(&asked), 0);
    asked.get()
}
