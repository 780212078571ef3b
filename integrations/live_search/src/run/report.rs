//! What a run has measured.

use std::{
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::{
    model::Checks,
    run::{load::Sample, recall::Recall},
    service::Stats,
};

/// All of it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// By the services' answers before the training, and after it.
    pub(crate) before: Recall,
    pub(crate) after: Recall,
    /// How many versions were committed.
    pub(crate) versions: usize,
    pub(crate) moved: Vec<Moved>,
    pub(crate) latencies: Vec<Latency>,
    pub(crate) checks: Checks,
    pub(crate) trainer: Recovery,
    pub(crate) service: Recovery,
    /// How often a service noticed that the trainer had come back with an older version.
    pub(crate) went_back: u64,
    pub(crate) queries: Queries,
}

/// The bytes that versions took.
#[derive(Debug, Serialize)]
pub(crate) struct Moved {
    service: String,
    /// Versions that this service took since it started.
    versions: usize,
    /// Bytes of the first of them, and of a later one: the median.
    first: u64,
    each: u64,
    bytes_of_version: u64,
}

impl Moved {
    pub(crate) fn of(stats: &[Stats]) -> Vec<Self> {
        let of_one = |stats: &Stats| {
            let mut later: Vec<u64> = stats.bytes_moved.iter().skip(1).copied().collect();
            later.sort_unstable();
            Self {
                service: stats.service.clone(),
                versions: stats.bytes_moved.len(),
                first: stats.bytes_moved.first().copied().unwrap_or(0),
                each: later.get(later.len() / 2).copied().unwrap_or(0),
                bytes_of_version: stats.bytes_of_version,
            }
        };
        stats.iter().map(of_one).collect()
    }
}

/// How long queries took.
#[derive(Debug, Serialize)]
pub(crate) struct Latency {
    what: &'static str,
    queries: usize,
    /// Versions that were committed meanwhile.
    versions: usize,
    p50_ms: f64,
    p99_ms: f64,
}

impl Latency {
    pub(crate) fn of(what: &'static str, samples: &[Sample], versions: usize) -> Self {
        let mut took: Vec<Duration> = samples.iter().map(|sample| sample.ended - sample.sent).collect();
        took.sort_unstable();
        let at = |part: f64| {
            let place = ((took.len() as f64 * part) as usize).min(took.len().saturating_sub(1));
            took.get(place).map_or(0.0, Duration::as_secs_f64) * 1e3
        };
        Self { what, queries: took.len(), versions, p50_ms: at(0.5), p99_ms: at(0.99) }
    }
}

/// What happened from a SIGKILL to the answer that shows that it is over.
#[derive(Debug, Serialize)]
pub(crate) struct Recovery {
    pub(crate) seconds: f64,
    /// The newest version that was answered with before, and that of the answer.
    held: u64,
    pub(crate) version: u64,
    /// Queries that each service answered meanwhile.
    answered: [usize; 2],
    queries: Queries,
}

impl Recovery {
    pub(crate) fn of(killed: Instant, over: &Sample, held: u64, meanwhile: &[Sample]) -> Self {
        let by = |service| {
            meanwhile.iter().filter(|sample| sample.answer.is_some_and(|answer| answer.0 == service)).count()
        };
        Self {
            seconds: (over.ended - killed).as_secs_f64(),
            held,
            version: over.version(),
            answered: [by(0), by(1)],
            queries: Queries::of(meanwhile),
        }
    }
}

/// What came of queries.
#[derive(Debug, Serialize)]
pub(crate) struct Queries {
    sent: usize,
    /// Those that no service answered.
    failed: usize,
    /// Those that the other service answered, because the first one did not.
    went_on: usize,
}

impl Queries {
    pub(crate) fn of(samples: &[Sample]) -> Self {
        let failed = samples.iter().filter(|sample| sample.answer.is_none()).count();
        let went_on = samples.iter().filter(|sample| sample.went_on).count() - failed;
        Self { sent: samples.len(), failed, went_on }
    }
}

pub(crate) fn sum(checks: impl Iterator<Item = Checks>) -> Checks {
    checks.fold(Checks::default(), |sum, one| Checks {
        made: sum.made + one.made,
        differences: sum.differences + one.differences,
    })
}

/// An error if what the example promises did not happen.
///
/// # Errors
/// A version was mixed, or a query failed.
pub(crate) fn is_sound(report: &Report) -> Result<()> {
    let Checks { made, differences } = report.checks;
    ensure!(
        made > 0 && differences == 0,
        "{differences} of {made} comparisons with the probe found a mixed version"
    );
    ensure!(report.queries.failed == 0, "{} queries were answered by no service", report.queries.failed);
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows().iter().try_for_each(|(what, value)| writeln!(f, "{what:<38} {value}"))
    }
}

impl Report {
    fn rows(&self) -> Vec<(String, String)> {
        let Self { before, after, versions, moved, latencies, checks, .. } = self;
        let size = bytes(moved.iter().map(|moved| moved.bytes_of_version).max().unwrap_or(0));
        let mut rows = vec![
            row(
                "recall@10, held-out packages",
                format!("{:.3} before, {:.3} after", before.at_10, after.at_10),
            ),
            row("recall@1, held-out packages", format!("{:.3} before, {:.3} after", before.at_1, after.at_1)),
            row("versions committed", format!("{versions}, of {size} each")),
        ];
        rows.extend(moved.iter().map(Moved::row));
        rows.extend(latencies.iter().map(Latency::row));
        let Checks { made, differences } = checks;
        rows.push(row(
            "mixed versions",
            format!("{differences}; the probe was compared {made} times, in all bits"),
        ));
        let by = [moved.first(), moved.get(1)].map(|moved| moved.map_or("", |moved| &moved.service));
        rows.extend(self.trainer.rows("trainer killed: newer version after", by));
        rows.push(row(
            "  came back at an older version",
            format!("noticed by {} services, which kept theirs", self.went_back),
        ));
        rows.extend(self.service.rows("service killed: current again after", by));
        let Queries { sent, failed, .. } = self.queries;
        rows.push(row("all queries", format!("{sent} sent, {failed} failed")));
        rows
    }
}

fn row(what: &str, value: String) -> (String, String) {
    (what.to_owned(), value)
}

impl Moved {
    fn row(&self) -> (String, String) {
        let Self { service, versions, first, each, .. } = self;
        row(
            &format!("moved to {service}"),
            format!("{} for a version, {} for the first ({versions} versions)", bytes(*each), bytes(*first)),
        )
    }
}

impl Latency {
    fn row(&self) -> (String, String) {
        let Self { what, queries, versions, p50_ms, p99_ms } = self;
        let value =
            format!("p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms ({queries} queries, {versions} versions)");
        row(&format!("queries, {what}"), value)
    }
}

impl Recovery {
    /// `by` are the names of the services.
    fn rows(&self, what: &str, by: [&str; 2]) -> [(String, String); 2] {
        let Self { seconds, held, version, answered: [first, second], queries } = self;
        let Queries { went_on, failed, .. } = queries;
        let [one, other] = by;
        [
            row(what, format!("{seconds:.2} s (version {held}, then {version})")),
            row(
                "  answered meanwhile",
                format!(
                    "{first} by {one}, {second} by {other}; {went_on} went on to the other one, {failed} failed"
                ),
            ),
        ]
    }
}

/// A number of bytes for people.
fn bytes(count: u64) -> String {
    match count {
        0..=9_999 => format!("{count} B"),
        10_000..=9_999_999 => format!("{:.2} MB", count as f64 / 1e6),
        _ => format!("{:.1} MB", count as f64 / 1e6),
    }
}
