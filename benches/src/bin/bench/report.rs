//! Output: a table for people, or one line of JSON per case for programs.

use std::{fmt, io::Write};

use indicatif::BinaryBytes;
use serde::Serialize;

use super::{
    case::{Case, Compares},
    cpus::Placement,
    error::BenchError,
    measure::{Comparison, Measurement},
    suite::{Goal, Row},
};
use crate::arguments::{AlgorithmChoice, BenchFabric, Checksum, Mode, Op, Source, WaitChoice};

/// One line of `--json`. Times are in nanoseconds per operation; rates are computed from `mean_ns`, which includes all
/// of the time; shares are from 0 to 1.
#[derive(Debug, Serialize)]
struct Line<'row> {
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<&'row str>,
    fabric: BenchFabric,
    op: Op,
    mode: Mode,
    wait: WaitChoice,
    validate: Checksum,
    source: Source,
    size: u64,
    /// Only collectives have ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<AlgorithmChoice>,
    outstanding: usize,
    cpus: &'static str,
    median_ns: f64,
    mean_ns: f64,
    p99_ns: f64,
    bytes_per_s: f64,
    ops_per_s: f64,
    /// CPU time of all processes.
    cpu_ns: f64,
    limit: &'row str,
    limit_median_ns: f64,
    limit_mean_ns: f64,
    limit_bytes_per_s: f64,
    ratio: f64,
    /// The 90 % bootstrap interval of `ratio`.
    ratio_low: f64,
    ratio_high: f64,
    ratio_of: Compares,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    bare: Option<Bare<'row>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<&'row Goal>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
    rounds: usize,
    repeated: usize,
    steal: f64,
    load: f64,
}

/// The limit with only the work on the bytes.
#[derive(Debug, Serialize)]
struct Bare<'row> {
    bare: &'row str,
    bare_mean_ns: f64,
    bare_bytes_per_s: f64,
    bare_ratio: f64,
}

impl<'row> Line<'row> {
    fn new(row: &'row Row, placement: Placement, measured: &'row Measurement) -> Self {
        let (case, limit, bytes) = (&row.case, &measured.limit, row.case.size as f64);
        let goal = row.goal.as_ref();
        Self {
            row: row.name.as_deref(),
            fabric: case.fabric,
            op: case.op,
            mode: case.mode,
            wait: case.wait,
            validate: case.validate,
            source: case.source,
            size: case.size,
            ranks: case.op.is_collective().then_some(case.ranks),
            algorithm: case.algorithm,
            outstanding: measured.outstanding,
            cpus: placement.name,
            median_ns: tenths(measured.median_ns),
            mean_ns: tenths(measured.mean_ns),
            p99_ns: tenths(measured.p99_ns),
            bytes_per_s: per_second(measured.mean_ns, bytes),
            ops_per_s: per_second(measured.mean_ns, 1.0),
            cpu_ns: tenths(measured.cpu_ns),
            limit: &limit.name,
            limit_median_ns: tenths(limit.median_ns),
            limit_mean_ns: tenths(finite(limit.mean_ns)),
            limit_bytes_per_s: per_second(limit.mean_ns, bytes),
            ratio: four_digits(limit.ratio),
            ratio_low: four_digits(limit.ratio_interval.0),
            ratio_high: four_digits(limit.ratio_interval.1),
            ratio_of: measured.compares,
            bare: measured.bare.as_ref().map(|bare| Bare::new(bare, bytes)),
            goal,
            met: goal.map(|goal| goal.is_met(case.size, measured)),
            rounds: measured.rounds,
            repeated: measured.repeated,
            steal: (measured.steal * 1e4).round() / 1e4,
            load: measured.load,
        }
    }
}

impl<'row> Bare<'row> {
    fn new(bare: &'row Comparison, bytes: f64) -> Self {
        Self {
            bare: &bare.name,
            bare_mean_ns: tenths(bare.mean_ns),
            bare_bytes_per_s: per_second(bare.mean_ns, bytes),
            bare_ratio: four_digits(bare.ratio),
        }
    }
}

/// The amount per second, if each operation takes `ns` and has the amount `what`.
fn per_second(ns: f64, what: f64) -> f64 {
    if ns > 0.0 { (what * 1e9 / ns).round() } else { 0.0 }
}

/// JSON has no infinity.
fn finite(ns: f64) -> f64 {
    if ns.is_finite() { ns } else { 0.0 }
}

fn tenths(ns: f64) -> f64 {
    (ns * 10.0).round() / 10.0
}

/// `value` to four significant digits: a ratio can be very small.
fn four_digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// Prints results one by one.
#[derive(Debug)]
pub(super) struct Report {
    json: bool,
    begun: bool,
}

impl Report {
    pub(super) fn new(json: bool) -> Self {
        Self { json, begun: false }
    }

    /// Prints one row.
    pub(super) fn print(
        &mut self,
        row: &Row,
        placement: Placement,
        measured: &Measurement,
    ) -> Result<(), BenchError> {
        let line = Line::new(row, placement, measured);
        let text = if self.json {
            serde_json::to_string(&line).map_err(|error| BenchError::Unexpected(error.to_string()))?
        } else {
            let head = if self.begun { String::new() } else { format!("{}\n", head()) };
            format!("{head}{}", table_row(row, &line))
        };
        self.begun = true;
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(BenchError::Output)
    }
}

/// The table's head. It and its rows have at most 100 columns; `--json` has all figures.
fn head() -> String {
    format!(
        "{:<56} {:>9} {:>6} {:>9} {:>6} {:<3} {:>5}",
        "case", "median", "GB/s", "limit", "ratio", "met", "steal"
    )
}

fn table_row(row: &Row, line: &Line<'_>) -> String {
    format!(
        "{:<56} {:>9} {:>6.2} {:>9} {:>6.2} {:<3} {:>4.1}%",
        row.to_string(),
        time(line.median_ns),
        line.bytes_per_s / 1e9,
        time(line.limit_median_ns),
        line.ratio,
        line.met.map_or("-", yes_or_no),
        line.steal * 100.0
    )
}

fn yes_or_no(is_met: bool) -> &'static str {
    if is_met { "yes" } else { "no" }
}

/// `ns` in a suitable unit.
pub(super) fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.2} µs", ns / 1e3),
        ns => format!("{:.2} ms", ns / 1e6),
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => self.case.fmt(f),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fabric = self.fabric.kind();
        write!(f, "{fabric} {} {}", name(&self.op), BinaryBytes(self.size))?;
        if self.op.is_collective() {
            write!(f, " {} ranks", self.ranks)?;
        }
        if let Some(algorithm) = self.algorithm {
            write!(f, " {}", name(&algorithm))?;
        }
        if self.mode != Mode::Copy {
            write!(f, " {}", name(&self.mode))?;
        }
        if self.source != Source::AsItWas {
            write!(f, " {}", name(&self.source))?;
        }
        write!(f, " {}", name(&self.wait))?;
        if self.validate == Checksum::Off { Ok(()) } else { write!(f, " {}", name(&self.validate)) }
    }
}

/// The name a value has on the command line.
fn name(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{
        AlgorithmChoice, BenchFabric, Case, Checksum, Mode, Op, Source, WaitChoice, four_digits, time,
    };

    #[test]
    fn case_is_named_as_on_the_command_line() {
        let case = Case {
            fabric: BenchFabric::Shm,
            op: Op::Pull,
            mode: Mode::ViewRead,
            wait: WaitChoice::Sleep,
            validate: Checksum::Off,
            source: Source::AsItWas,
            size: 64 << 10,
            ranks: 2,
            algorithm: None,
        };
        assert_eq!(case.to_string(), "shm pull 64.00 KiB view-read sleep");
        let case = Case { validate: Checksum::Xxh3, ..case };
        assert_eq!(case.to_string(), "shm pull 64.00 KiB view-read sleep xxh3");
        let case = Case { mode: Mode::Copy, source: Source::Rewritten, validate: Checksum::Off, ..case };
        assert_eq!(case.to_string(), "shm pull 64.00 KiB rewritten sleep");
        let op = Op::AllReduce;
        let case =
            Case { op, ranks: 4, algorithm: Some(AlgorithmChoice::Ring), source: Source::AsItWas, ..case };
        assert_eq!(case.to_string(), "shm all-reduce 64.00 KiB 4 ranks ring sleep");
    }

    #[test]
    fn small_ratios_keep_their_digits() {
        assert_eq!([1.234_56, 0.000_001_234_56, 0.0].map(four_digits), [1.235, 0.000_001_235, 0.0]);
    }

    #[test]
    fn times_have_the_unit_they_need() {
        assert_eq!([345.2, 4_870.0, 13_800_000.0].map(time), ["345 ns", "4.87 µs", "13.80 ms"]);
    }
}
