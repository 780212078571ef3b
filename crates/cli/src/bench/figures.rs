//! The results of a benchmark, as lines of a table or of JSON.

use std::time::Duration;

use serde_json::json;
use tensorwire::FabricKind;

use crate::arguments::bench::{Op, WaitChoice};

/// Maximum number of operations of a row: their times take 80 MB.
const ITERATIONS_MAX: u64 = 10_000_000;

/// How long a row is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Length {
    pub(super) time: Duration,
    /// Operations, instead of a time.
    pub(super) iterations: Option<u64>,
}

impl Length {
    /// A tenth of this length.
    pub(super) fn warm_up(self) -> Self {
        Self { time: self.time / 10, iterations: self.iterations.map(|count| count.div_ceil(10)) }
    }

    /// Whether `count` operations in the time `spent` are enough.
    pub(super) fn is_over(self, count: u64, spent: Duration) -> bool {
        let is_over = self.iterations.map_or(spent >= self.time, |wanted| count >= wanted);
        count > 0 && (is_over || count >= ITERATIONS_MAX)
    }
}

/// Times of operations.
#[derive(Debug, Default)]
pub(super) struct Samples {
    ns: Vec<f64>,
}

impl Samples {
    pub(super) fn add(&mut self, time: Duration) {
        self.ns.push(time.as_nanos() as f64);
    }

    /// Half of each time: one direction of a round trip.
    pub(super) fn halves(mut self) -> Self {
        self.ns.iter_mut().for_each(|ns| *ns /= 2.0);
        self
    }

    /// The quantiles `wanted`, each a time that was measured.
    fn quantiles<const N: usize>(&self, wanted: [f64; N]) -> [f64; N] {
        let mut sorted = self.ns.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = |q: f64| ((sorted.len() as f64 * q).ceil() as usize).max(1) - 1;
        wanted.map(|q| sorted.get(rank(q)).copied().unwrap_or(0.0))
    }
}

/// The result of a row.
#[derive(Debug)]
pub(super) enum Figures {
    Latency(Samples),
    Bandwidth { iterations: u64, time: Duration },
}

/// The parameters of a row.
#[derive(Debug)]
pub(super) struct Row<'a> {
    pub(super) op: Op,
    pub(super) size: u64,
    pub(super) wait: WaitChoice,
    pub(super) address: &'a str,
    pub(super) transport: Option<FabricKind>,
    pub(super) not_used: &'a [String],
}

impl Row<'_> {
    fn fabric(&self) -> String {
        self.transport.map_or_else(|| "no transport".to_owned(), |kind| kind.to_string())
    }

    /// The line of `--json`. Times in nanoseconds.
    pub(super) fn json(&self, figures: &Figures) -> String {
        let (iterations, spent_ns) = match figures {
            Figures::Latency(samples) => (samples.ns.len() as u64, samples.ns.iter().sum()),
            Figures::Bandwidth { iterations, time } => (*iterations, time.as_nanos() as f64),
        };
        let mean_ns = spent_ns / iterations as f64;
        let mut line = json!({
            "op": self.op, "fabric": self.fabric(), "not_used": self.not_used, "wait": self.wait,
            "peer": self.address, "size": self.size, "iterations": iterations, "mean_ns": mean_ns,
            "bytes_per_s": self.size as f64 / mean_ns * 1e9, "ops_per_s": 1e9 / mean_ns,
        });
        if let Figures::Latency(samples) = figures {
            let quantiles = samples.quantiles([0.0, 0.5, 0.99]);
            for (name, ns) in ["min_ns", "median_ns", "p99_ns"].into_iter().zip(quantiles) {
                line[name] = ns.into();
            }
        }
        format!("{line}\n")
    }

    /// A line of a table, with the table's head if it is the first.
    pub(super) fn text(&self, figures: &Figures, is_first: bool) -> String {
        let (columns, line) = match figures {
            Figures::Latency(samples) => {
                let [min, typical, p99] = samples.quantiles([0.0, 0.5, 0.99]).map(|ns| ns / 1e3);
                let line = format!("{:>11}  {min:>11.2}  {typical:>15.2}  {p99:>11.2}", samples.ns.len());
                ("t_min[usec]  t_typical[usec]    99%[usec]", line)
            }
            Figures::Bandwidth { iterations, time } => {
                let rate = *iterations as f64 / time.as_secs_f64() / 1e6;
                let line = format!("{iterations:>11}  {:>18.2}  {rate:>13.6}", rate * self.size as f64);
                ("BW average[MB/sec]  MsgRate[Mpps]", line)
            }
        };
        let line = format!("{:>11}  {line}\n", self.size);
        if !is_first {
            return line;
        }
        format!("{}\n{:>11}  {:>11}  {columns}\n{line}", self.title(), "#bytes", "#iterations")
    }

    fn title(&self) -> String {
        let mut title = format!("{:?} over {}, {:?}", self.op, self.fabric(), self.wait).to_lowercase();
        title += &format!(", with {}", self.address);
        if self.not_used.is_empty() {
            return title;
        }
        format!("{title}; not used: {}", self.not_used.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Length, Samples};

    #[test]
    fn quantiles_are_times_that_were_measured() {
        let mut samples = Samples::default();
        (1..=100).rev().for_each(|ns| samples.add(Duration::from_nanos(2 * ns)));
        assert_eq!(samples.quantiles([0.0, 0.5, 0.99]), [2.0, 100.0, 198.0]);
        assert_eq!(samples.halves().quantiles([0.5]), [50.0]);
    }

    #[test]
    fn a_row_ends_by_its_operations_or_by_its_time_and_has_at_least_one() {
        let second = Duration::from_secs(1);
        let timed = Length { time: second, iterations: None };
        assert!(timed.is_over(1, second) && !timed.is_over(1, second / 2) && !timed.is_over(0, second));
        assert!(timed.warm_up().is_over(1, second / 10));
        let counted = Length { time: second, iterations: Some(5) };
        assert!(counted.is_over(5, Duration::ZERO) && !counted.is_over(4, second));
        assert!(counted.warm_up().is_over(1, Duration::ZERO));
    }
}
