//! A report, with what follows from the reports before it: rates, and how long requests have waited.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use tensorwire::report::{PeerReport, Traffic, Waiting, WorkerReport};

/// A report and the figures that are computed from it and the one before.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) report: WorkerReport,
    /// The time between the two reports; `None` if there is no earlier one of this life of the worker.
    pub(crate) interval: Option<Duration>,
    /// The rates of all peers together, if the worker tells them.
    pub(crate) total: Option<Rates>,
    /// The figures of each peer of the report, in the same order.
    pub(crate) peers: Vec<Figures>,
    pub(crate) slowest: Option<Slowest>,
}

/// The figures of one peer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Figures {
    pub(crate) rates: Option<Rates>,
    /// How long the oldest request at the peer has waited at least.
    pub(crate) at_peer: Option<Duration>,
    /// How long the peer's oldest request at the worker has waited at least.
    pub(crate) here: Option<Duration>,
}

/// Values and bytes in each second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Rates {
    pub(crate) values_received_per_second: f64,
    pub(crate) bytes_received_per_second: f64,
    pub(crate) values_sent_per_second: f64,
    pub(crate) bytes_sent_per_second: f64,
}

impl Rates {
    fn between(earlier: &Traffic, later: &Traffic, interval: Duration) -> Self {
        let seconds = interval.as_secs_f64();
        // A peer that was forgotten and met again counts from 0.
        let rate = |earlier: u64, later: u64| later.saturating_sub(earlier) as f64 / seconds;
        Self {
            values_received_per_second: rate(earlier.values_received, later.values_received),
            bytes_received_per_second: rate(earlier.bytes_received, later.bytes_received),
            values_sent_per_second: rate(earlier.values_sent, later.values_sent),
            bytes_sent_per_second: rate(earlier.bytes_sent, later.bytes_sent),
        }
    }
}

/// Where a request waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Place {
    /// A request of the worker, at the peer.
    AtPeer,
    /// A request of the peer, at the worker.
    Here,
    /// Data, on the way to the peer: its host acknowledges nothing.
    OnTheWay,
}

/// The longest wait of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slowest {
    pub(crate) peer: String,
    pub(crate) place: Place,
    /// It has lasted at least this long.
    pub(crate) waited: Duration,
}

/// A request that is the oldest one at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Oldest {
    /// The connection, by the number of those that were made.
    connection: u64,
    number: u64,
    /// The worker's clock when it was first seen as the oldest.
    since: Duration,
}

/// What is remembered between two reports.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    before: Option<WorkerReport>,
    oldest: BTreeMap<(String, Place), Oldest>,
}

impl Watch {
    /// The view of the next report.
    pub(crate) fn view(&mut self, report: WorkerReport) -> View {
        let before = self.before.replace(report.clone());
        let before = before.filter(|before| {
            before.incarnation == report.incarnation
                && before.name == report.name
                && before.clock < report.clock
        });
        if before.is_none() {
            self.oldest.clear();
        }
        let interval = before.as_ref().map(|before| report.clock.saturating_sub(before.clock));
        let rates = |earlier: Option<&Traffic>, later: &Traffic| {
            Some(Rates::between(earlier.unwrap_or(&Traffic::default()), later, interval?))
        };
        let total = report
            .total
            .as_ref()
            .and_then(|total| rates(before.as_ref().and_then(|before| before.total.as_ref()), total));
        let known: BTreeMap<&str, &Traffic> = before
            .iter()
            .flat_map(|before| &before.peers)
            .map(|peer| (peer.name.as_str(), &peer.traffic))
            .collect();
        let mut oldest = BTreeMap::new();
        let mut figures = Vec::with_capacity(report.peers.len());
        for peer in &report.peers {
            let mut wait = |place, waiting| self.wait(&mut oldest, (peer, report.clock), (place, waiting));
            let at_peer = wait(Place::AtPeer, peer.waiting_at_peer);
            let here = wait(Place::Here, peer.waiting_here);
            let rates = rates(known.get(peer.name.as_str()).copied(), &peer.traffic);
            figures.push(Figures { rates, at_peer, here });
        }
        self.oldest = oldest;
        let slowest = slowest(&report.peers, &figures);
        View { interval, total, peers: figures, slowest, report }
    }

    /// How long the oldest request has waited at least; `None` if none waits. Notes it in `oldest`.
    fn wait(
        &self,
        oldest: &mut BTreeMap<(String, Place), Oldest>,
        (peer, now): (&PeerReport, Duration),
        (place, waiting): (Place, Waiting),
    ) -> Option<Duration> {
        let (key, connection, number) = ((peer.name.clone(), place), peer.traffic.connects, waiting.oldest?);
        let seen = self.oldest.get(&key);
        let seen = seen.filter(|seen| (seen.connection, seen.number) == (connection, number)).copied();
        let noted = seen.unwrap_or(Oldest { connection, number, since: now });
        oldest.insert(key, noted);
        Some(now.saturating_sub(noted.since))
    }
}

/// The longest wait that has lasted for some time.
fn slowest(peers: &[PeerReport], figures: &[Figures]) -> Option<Slowest> {
    let waits = peers.iter().zip(figures).flat_map(|(peer, figures)| {
        let places =
            [(Place::AtPeer, figures.at_peer), (Place::Here, figures.here), (Place::OnTheWay, peer.stalled)];
        places.map(|(place, waited)| (peer, place, waited.unwrap_or_default()))
    });
    let (peer, place, waited) = waits.max_by_key(|(.., waited)| *waited)?;
    (waited > Duration::ZERO).then(|| Slowest { peer: peer.name.clone(), place, waited })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report at `seconds`, with one peer that has got `values` of 10 bytes, and whose oldest request is `oldest`.
    pub(crate) fn report(seconds: u64, values: u64, oldest: Option<u64>) -> WorkerReport {
        let (mut report, mut peer) = (WorkerReport::default(), PeerReport::default());
        (report.name, report.clock) = ("/job:ps/replica:0/task:0".to_owned(), Duration::from_secs(seconds));
        peer.name = "/job:a/replica:0/task:0".to_owned();
        (peer.traffic.values_sent, peer.traffic.bytes_sent, peer.traffic.connects) = (values, 10 * values, 1);
        (peer.waiting_here.requests, peer.waiting_here.oldest) = (u64::from(oldest.is_some()), oldest);
        report.total = Some(peer.traffic);
        report.peers = vec![peer];
        report
    }

    #[test]
    fn rates_are_those_of_the_time_between_two_reports_by_the_clock_of_the_worker() {
        let mut watch = Watch::default();
        let first = watch.view(report(100, 37, None));
        assert_eq!((first.interval, first.total, first.peers[0].rates), (None, None, None));
        let second = watch.view(report(104, 45, None));
        let rates = second.total.unwrap();
        assert_eq!((rates.values_sent_per_second, rates.bytes_sent_per_second), (2.0, 20.0));
        assert_eq!((second.peers[0].rates, second.interval), (Some(rates), Some(Duration::from_secs(4))));
        // Another life of the worker begins again.
        let mut restarted = report(200, 3, None);
        restarted.incarnation = 7;
        assert_eq!(watch.view(restarted).total, None);
        // A clock that does not go on gives no rate.
        let mut stopped = report(200, 9, None);
        stopped.incarnation = 7;
        assert_eq!(watch.view(stopped).total, None);
    }

    #[test]
    fn a_request_that_stays_the_oldest_has_waited_since_it_was_seen() {
        let mut watch = Watch::default();
        let mut wait = |seconds, oldest, connects| {
            let mut report = report(seconds, 0, oldest);
            report.peers[0].traffic.connects = connects;
            let view = watch.view(report);
            (view.peers[0].here.map(|wait| wait.as_secs()), view.slowest.map(|slowest| slowest.place))
        };
        assert_eq!(wait(10, Some(4), 1), (Some(0), None));
        assert_eq!(wait(13, Some(4), 1), (Some(3), Some(Place::Here)));
        assert_eq!(wait(15, Some(4), 1), (Some(5), Some(Place::Here)));
        // Answered: the next one is the oldest.
        assert_eq!(wait(16, Some(6), 1), (Some(0), None));
        // The same number of another connection.
        assert_eq!(wait(17, Some(6), 2), (Some(0), None));
        assert_eq!(wait(18, None, 2), (None, None));
        assert_eq!(wait(19, Some(6), 2), (Some(0), None));
    }

    #[test]
    fn the_slowest_is_the_longest_wait_of_any_kind() {
        let mut watch = Watch::default();
        watch.view(report(1, 0, Some(1)));
        let mut next = report(3, 0, Some(1));
        next.peers[0].stalled = Some(Duration::from_secs(1));
        let slowest = watch.view(next.clone()).slowest.unwrap();
        assert_eq!((slowest.place, slowest.waited), (Place::Here, Duration::from_secs(2)));
        next.clock += Duration::from_secs(1);
        next.peers[0].stalled = Some(Duration::from_secs(30));
        let slowest = watch.view(next).slowest.unwrap();
        assert_eq!((slowest.place, slowest.waited), (Place::OnTheWay, Duration::from_secs(30)));
    }
}
