//! The figures of each way, and their output.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use crate::model::{Model, descend};

/// The way that the others are compared with.
pub(crate) const TONIC: &str = "tonic";

/// The average times of a step in each round.
pub(crate) struct Figures {
    way: &'static str,
    pulls: Vec<Duration>,
    pushes: Vec<Duration>,
}

impl Figures {
    pub(crate) fn of(way: &'static str) -> Self {
        Self { way, pulls: Vec::new(), pushes: Vec::new() }
    }

    pub(crate) fn add(&mut self, (pull, push): (Duration, Duration)) {
        self.pulls.push(pull);
        self.pushes.push(push);
    }

    fn steps(&self) -> Vec<Duration> {
        self.pulls.iter().zip(&self.pushes).map(|(&pull, &push)| pull + push).collect()
    }

    /// For each round, tonic's time divided by this way's.
    fn ratios(&self, tonic: &Self) -> Vec<f64> {
        let mut ratios: Vec<f64> = tonic
            .steps()
            .iter()
            .zip(self.steps())
            .map(|(tonic, ours)| tonic.as_secs_f64() / ours.as_secs_f64())
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The update alone, in memory of this process: the part of a step that no transport can shorten.
pub(crate) fn update_alone(model: Model) -> Duration {
    let (mut after, before): (Vec<_>, Vec<_>) = (model.filled(0.0).collect(), model.filled(1.0).collect());
    let update = || {
        let begun = Instant::now();
        for (after, before) in after.iter_mut().zip(&before) {
            descend(black_box(after), black_box(before), black_box(before));
        }
        begun.elapsed()
    };
    median(std::iter::repeat_with(update).take(9).collect())
}

/// Prints a row for each way; `update` is the result of [`update_alone`].
pub(crate) fn print(model: Model, figures: &[Figures], update: Duration, json: bool) {
    let Some(tonic) = figures.iter().find(|figures| figures.way == TONIC) else { return };
    let (name, tensors, bytes) = (model.name(), model.sizes().len(), model.bytes());
    if !json {
        println!("{name}: {tensors} tensors, {bytes} bytes; update alone {}", text(update));
        println!("| way | pull | push and update | step | tonic's step ÷ this | least, most |");
        println!("| --- | --- | --- | --- | --- | --- |");
    }
    for figures in figures {
        let ratios = figures.ratios(tonic);
        let (Some(least), Some(most)) = (ratios.first(), ratios.last()) else { continue };
        let (way, ratio) = (figures.way, ratios[ratios.len() / 2]);
        let times = [figures.pulls.clone(), figures.pushes.clone(), figures.steps()].map(median);
        if json {
            let [pull_ns, push_ns, step_ns] = times.map(nanos);
            let line = serde_json::json!({
                "model": name, "tensors": tensors, "bytes": bytes, "way": way, "rounds": ratios.len(),
                "pull_ns": pull_ns, "push_ns": push_ns, "step_ns": step_ns, "update_alone_ns": nanos(update),
                "ratio": ratio, "ratio_least": least, "ratio_most": most,
            });
            println!("{line}");
        } else {
            let [pull, push, step] = times.map(text);
            println!("| {way} | {pull} | {push} | {step} | {ratio:.2} | {least:.2}, {most:.2} |");
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn text(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1e3 { format!("{micros:.1} µs") } else { format!("{:.2} ms", micros / 1e3) }
}
