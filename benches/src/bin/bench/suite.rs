//! Suites: rows with a name and a goal. The table is `suite.tsv`, beside this file.

use std::fmt;

use clap::{Parser, ValueEnum};
use serde::{Serialize, Serializer};

use super::{
    case::{Case, cases},
    error::BenchError,
    measure::Measurement,
};
use crate::arguments::{Bench, CpuChoice, Suite};

/// Name, suites, arguments of `tensorwire-bench`, goal; between tabs.
const TABLE: &str = include_str!("suite.tsv");

/// A measurement that is printed as one line.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// Only rows of a suite have one.
    pub(super) name: Option<String>,
    pub(super) case: Case,
    pub(super) cpus: CpuChoice,
    pub(super) goal: Option<Goal>,
}

/// The quantity that a goal limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    /// The median time of an operation, in nanoseconds.
    Time,
    /// CPU time of both processes per operation, in nanoseconds.
    Cpu,
    /// Bytes a second.
    Bandwidth,
    /// Operations a second.
    Rate,
    /// The value of the table's column `ratio`.
    Ratio,
}

/// The goal of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Goal {
    quantity: Quantity,
    is_most: bool,
    value: f64,
    text: String,
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Goal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl Goal {
    /// Parses `<= 0.25 us`, `>= 28 GB/s`, `>= 1.5 M/s`, `<= 0 /s`, `ratio >= 0.9` or `cpu <= 2 us`.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (quantity, relation, number, scale) = match *words.as_slice() {
            ["ratio", relation, number] => (Quantity::Ratio, relation, number, 1.0),
            ["cpu", relation, number, unit] => (Quantity::Cpu, relation, number, time_unit(unit)?),
            [relation, number, "GB/s"] => (Quantity::Bandwidth, relation, number, 1e9),
            [relation, number, "M/s"] => (Quantity::Rate, relation, number, 1e6),
            [relation, number, "/s"] => (Quantity::Rate, relation, number, 1.0),
            [relation, number, unit] => (Quantity::Time, relation, number, time_unit(unit)?),
            _ => return None,
        };
        let is_most = match relation {
            "<=" => true,
            ">=" => false,
            _ => return None,
        };
        let value = number.parse::<f64>().ok()? * scale;
        let text = text.replace("<=", "≤").replace(">=", "≥").replace(" us", " µs");
        Some(Self { quantity, is_most, value, text })
    }

    /// Whether `measured`, of operations of `bytes` bytes, reaches the goal.
    pub(super) fn is_met(&self, bytes: u64, measured: &Measurement) -> bool {
        let rate = if measured.mean_ns > 0.0 { 1e9 / measured.mean_ns } else { 0.0 };
        let reached = match self.quantity {
            Quantity::Time => measured.median_ns,
            Quantity::Cpu => measured.cpu_ns,
            Quantity::Bandwidth => rate * bytes as f64,
            Quantity::Rate => rate,
            Quantity::Ratio => measured.limit.ratio,
        };
        if self.is_most { reached <= self.value } else { reached >= self.value }
    }

    /// The longest time of an operation of `bytes` bytes that reaches the goal, in nanoseconds; `None` if the goal
    /// limits something else.
    pub(super) fn time_ns(&self, bytes: u64, measured: &Measurement) -> Option<f64> {
        match self.quantity {
            Quantity::Time => Some(self.value),
            Quantity::Bandwidth => Some(bytes as f64 / self.value * 1e9),
            Quantity::Rate if self.value > 0.0 => Some(1e9 / self.value),
            Quantity::Ratio => Some(measured.limit.time_at_ratio(self.value, measured.compares)),
            Quantity::Rate | Quantity::Cpu => None,
        }
    }
}

fn time_unit(unit: &str) -> Option<f64> {
    match unit {
        "ns" => Some(1.0),
        "us" => Some(1e3),
        "ms" => Some(1e6),
        _ => None,
    }
}

/// A row's arguments, parsed like those of the command.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct RowArguments {
    #[command(flatten)]
    bench: Bench,
}

/// The rows of a command line: those of its suite, or those of its options.
pub(super) fn rows(arguments: &Bench) -> Result<Vec<Row>, BenchError> {
    let Some(suite) = arguments.suite else {
        let row = |case| Row { name: None, case, cpus: arguments.cpus, goal: None };
        return Ok(cases(arguments).into_iter().map(row).collect());
    };
    let rows: Result<Vec<_>, _> = table().map(|line| parse(line).map(|row| (line, row))).collect();
    Ok(rows?.into_iter().filter(|(line, _)| belongs(line, suite)).map(|(_, row)| row).collect())
}

fn table() -> impl Iterator<Item = &'static str> {
    TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn belongs(line: &str, suite: Suite) -> bool {
    let words = line.split('\t').nth(1).unwrap_or_default();
    let name = suite.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    match suite {
        Suite::All => !words.split(',').any(|word| word == "verbs"),
        _ => words.split(',').any(|word| word == name),
    }
}

fn parse(line: &str) -> Result<Row, BenchError> {
    let wrong = || BenchError::Unexpected(format!("a row of the suites: {line}"));
    let fields: Vec<&str> = line.split('\t').collect();
    let [name, _, arguments, goal] = *fields.as_slice() else { return Err(wrong()) };
    let bench = RowArguments::try_parse_from(arguments.split_whitespace()).map_err(|_| wrong())?.bench;
    let [case] = *cases(&bench).as_slice() else { return Err(wrong()) };
    let goal = if goal == "-" { None } else { Some(Goal::parse(goal).ok_or_else(wrong)?) };
    Ok(Row { name: Some(name.to_owned()), case, cpus: bench.cpus, goal })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Goal, Quantity, Suite, belongs, parse, table};

    #[test]
    fn every_row_has_a_name_of_its_own_one_case_and_a_suite() {
        let mut names = HashSet::new();
        for line in table() {
            let row = parse(line).unwrap();
            row.case.check().unwrap();
            assert!(names.insert(row.name.unwrap()), "twice: {line}");
            let suites = [Suite::Small, Suite::Large, Suite::Shm, Suite::Tcp, Suite::Verbs];
            assert!(suites.into_iter().any(|suite| belongs(line, suite)), "in no suite: {line}");
            assert_ne!(belongs(line, Suite::All), belongs(line, Suite::Verbs), "{line}");
        }
        assert!(names.len() > 30);
    }

    #[test]
    fn goals_have_units() {
        let read = |text| Goal::parse(text).map(|goal| (goal.quantity, goal.is_most, goal.value));
        assert_eq!(read("<= 0.25 us"), Some((Quantity::Time, true, 250.0)));
        assert_eq!(read(">= 28 GB/s"), Some((Quantity::Bandwidth, false, 28e9)));
        assert_eq!(read(">= 1.5 M/s"), Some((Quantity::Rate, false, 1.5e6)));
        assert_eq!(read("ratio >= 0.9"), Some((Quantity::Ratio, false, 0.9)));
        assert_eq!(read("cpu <= 2 us"), Some((Quantity::Cpu, true, 2000.0)));
        for wrong in ["", "<= 2", "= 2 us", "<= two us", "<= 2 parsec", "ratio < 1"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
