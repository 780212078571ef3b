//! The tables.

use std::collections::BTreeMap;

use crate::{
    Arguments, Measured,
    measure::{Flow, Loss},
};

pub(crate) fn print_flows(arguments: &Arguments, measured: &[Measured]) {
    println!(
        "| stream | frames ahead | fast: written/s | read/s | GiB/s | slow: written/s | read/s | missing | counted | behind | torn |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for Measured { row, fast, slow, failure, .. } in measured {
        let row = format!("| {} | {} |", row.words().join(", "), row.ahead);
        match failure {
            Some(failure) if slow.is_empty() => println!("{row} failed: {failure} |"),
            _ => println!("{row} {} |", figures(arguments, fast, slow)),
        }
    }
    println!();
}

fn figures(arguments: &Arguments, fast: &[Flow], slow: &[Flow]) -> String {
    let median = |flows: &[Flow], of: fn(&Flow) -> f64| middle(flows.iter().map(of).collect());
    let read = median(fast, |flow| flow.read);
    let missing: u64 = slow.iter().map(|flow| flow.missing).sum();
    let came: u64 = slow.iter().map(|flow| flow.came as u64).sum();
    let counted: u64 = slow.iter().map(|flow| flow.counted).sum();
    let behind: Vec<f64> = slow.iter().flat_map(|flow| &flow.behind).map(|&frames| frames as f64).collect();
    let most = behind.iter().copied().fold(0.0, f64::max);
    let torn: u64 = fast.iter().chain(slow).map(|flow| flow.torn).sum();
    [
        format!("{:.0}", median(fast, |flow| flow.written)),
        format!("{read:.0}"),
        format!("{:.1}", read * arguments.mebibytes as f64 / 1024.0),
        format!("{:.0}", median(slow, |flow| flow.written)),
        format!("{:.0}", median(slow, |flow| flow.read)),
        format!("{:.0} %", 100.0 * missing as f64 / (missing + came).max(1) as f64),
        match (missing, counted) {
            (0, 0) => "–".to_owned(),
            (_, 0) => "by nobody".to_owned(),
            (missing, counted) if missing == counted => "all".to_owned(),
            _ => format!("{counted} of {missing}"),
        },
        format!("{:.0}, at most {most:.0}", middle(behind)),
        torn.to_string(),
    ]
    .join(" | ")
}

pub(crate) fn print_losses(measured: &[Measured]) {
    println!("| stream | frames ahead | kills | last frame after | then | torn |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for Measured { row, losses, failure, .. } in measured {
        let row = format!("| {} | {} |", row.words().join(", "), row.ahead);
        if losses.is_empty() {
            println!("{row} not measured: {} |", failure.as_deref().unwrap_or("no kills"));
            continue;
        }
        let last = range(losses.iter().map(|loss| loss.last_frame));
        let torn: u64 = losses.iter().map(|loss| loss.torn).sum();
        println!("{row} {} | {last} | {} | {torn} |", losses.len(), signs(losses));
    }
}

/// All signs, each with its times.
fn signs(losses: &[Loss]) -> String {
    let mut signs: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (words, after) in losses.iter().flat_map(|loss| &loss.signs) {
        signs.entry(words).or_default().push(*after);
    }
    let mut all: Vec<String> = signs
        .into_iter()
        .map(|(words, times)| format!("{words} ({} times, {})", times.len(), range(times.into_iter())))
        .collect();
    if !all.iter().any(|sign| sign.starts_with("the stream")) {
        all.insert(0, "silence".to_owned());
    }
    let hangs = losses.iter().filter(|loss| loss.hangs).count();
    if hangs > 0 {
        all.push(format!("{hangs} hung"));
    }
    all.join("; ")
}

fn range(values: impl Iterator<Item = f64> + Clone) -> String {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let most = values.fold(f64::NEG_INFINITY, f64::max);
    format!("{least:.1} to {most:.1} ms")
}

/// The median.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
