//! What was measured, for people and for programs.

use std::{collections::BTreeMap, fmt};

use serde_json::{Value, json};

use super::{WORKERS, transport::Transport};

/// The rounds of one transport, in seconds.
#[derive(Debug)]
pub(crate) struct Row {
    uses: String,
    pulls: Vec<f64>,
    pushes: Vec<f64>,
    exchanges: Vec<f64>,
    steps: Vec<f64>,
}

impl Row {
    /// No rounds yet, over the fabric that `uses` names.
    pub(crate) const fn new(uses: String) -> Self {
        Self { uses, pulls: Vec::new(), pushes: Vec::new(), exchanges: Vec::new(), steps: Vec::new() }
    }

    /// A round with or without the server's arithmetic.
    pub(crate) fn note(&mut self, with_update: bool, (pull, push): (f64, f64)) {
        if with_update {
            self.steps.push(pull + push);
        } else {
            self.pulls.push(pull);
            self.pushes.push(push);
            self.exchanges.push(pull + push);
        }
    }
}

/// All rows.
#[derive(Debug)]
pub(crate) struct Outcome {
    parameters: usize,
    tensors: usize,
    rounds: u64,
    rows: BTreeMap<Transport, Row>,
}

impl Outcome {
    pub(crate) fn new(sizes: &[usize], rounds: u64, rows: BTreeMap<Transport, Row>) -> Self {
        Self { parameters: sizes.iter().sum(), tensors: sizes.len(), rounds, rows }
    }

    /// How many times longer gRPC takes, round by round in the median.
    fn factor(&self, row: &Row, part: impl Fn(&Row) -> &[f64]) -> f64 {
        let grpc = self.rows.get(&Transport::Grpc).map_or(&[][..], &part);
        median(grpc.iter().zip(part(row)).map(|(grpc, own)| grpc / own))
    }

    /// One object.
    pub(crate) fn json(&self) -> Value {
        let row = |(transport, row): (&Transport, &Row)| {
            json!({
                "transport": transport.to_string(),
                "uses": row.uses,
                "pull_s": median(row.pulls.iter().copied()),
                "push_s": median(row.pushes.iter().copied()),
                "exchange_s": median(row.exchanges.iter().copied()),
                "exchange_factor": self.factor(row, |row| &row.exchanges),
                "step_s": median(row.steps.iter().copied()),
                "step_factor": self.factor(row, |row| &row.steps),
            })
        };
        json!({
            "parameters": self.parameters,
            "tensors": self.tensors,
            "workers": WORKERS,
            "rounds": self.rounds,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, tensors, rounds, .. } = self;
        let megabytes = *parameters as f64 * size_of::<f32>() as f64 / 1e6;
        writeln!(
            f,
            "{parameters} parameters in {tensors} tensors ({megabytes:.1} MB), {WORKERS} workers, {rounds} rounds; medians"
        )?;
        writeln!(
            f,
            "| way | uses | pull all | push all | together | gRPC ÷ this | with the update | gRPC ÷ this |"
        )?;
        write!(f, "| --- | --- | --- | --- | --- | --- | --- | --- |")?;
        for (transport, row) in &self.rows {
            let ms = |times: &[f64]| format!("{:.1} ms", median(times.iter().copied()) * 1e3);
            write!(
                f,
                "\n| {transport} | {} | {} | {} | {} | {:.2} | {} | {:.2} |",
                row.uses,
                ms(&row.pulls),
                ms(&row.pushes),
                ms(&row.exchanges),
                self.factor(row, |row| &row.exchanges),
                ms(&row.steps),
                self.factor(row, |row| &row.steps),
            )?;
        }
        Ok(())
    }
}

/// The middle one, or the mean of both; NaN of none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        even if even.is_multiple_of(2) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Outcome, Row};
    use crate::bench::transport::Transport;

    #[test]
    fn factors_are_medians_of_the_rounds_ratios() {
        let row = |rounds: [f64; 3]| {
            let mut row = Row::new("shm".to_owned());
            rounds.into_iter().for_each(|round| row.note(false, (round, round)));
            row.note(true, (1.0, 2.0));
            row
        };
        let rows = BTreeMap::from([
            (Transport::Auto, row([1.0, 2.0, 1.0])),
            (Transport::Grpc, row([3.0, 8.0, 9.0])),
        ]);
        let outcome = Outcome::new(&[10, 20], 3, rows);
        let json = outcome.json();
        assert_eq!(json["rows"][0]["exchange_factor"], 4.0);
        assert_eq!(json["rows"][0]["pull_s"], 1.0);
        assert_eq!(json["rows"][1]["step_factor"], 1.0);
        assert!(outcome.to_string().contains("| auto | shm | 1000.0 ms"), "{outcome}");
    }
}
