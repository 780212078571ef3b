//! What a process holds.

use std::{collections::BTreeMap, fs};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tensorwire_rendezvous::Worker;

use super::BLOCK;

/// What must be as before, once as much is going on as before.
pub(crate) type Gauges = BTreeMap<String, u64>;

/// The pools, and the size of their blocks.
const BLOCKS: [(&str, u64); 4] =
    [("source", BLOCK as u64), ("receive", BLOCK as u64), ("ring", 1 << 20), ("message", 1 << 20)];

/// This process's mappings.
fn mappings() -> u64 {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64
}

/// This process's open descriptors, by what they are of.
fn descriptors() -> Gauges {
    let mut kinds = Gauges::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap().map_while(Result::ok) {
        // The one of the directory itself is gone.
        let Ok(target) = fs::read_link(entry.path()).map(|target| target.to_string_lossy().into_owned())
        else {
            continue;
        };
        if !target.starts_with("/proc/") {
            let kind = target.split([':', '(']).next().unwrap_or_default().trim().replace(' ', "_");
            *kinds.entry(format!("fd.{kind}")).or_insert(0) += 1;
        }
    }
    kinds
}

/// The number in line `name` of the process's status: KiB where it is memory.
pub(crate) fn status(pid: &str, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// What the worker reports to a metrics recorder.
pub(crate) fn recorded(worker: &Worker) -> Gauges {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || worker.record_metrics());
    let gauge = |(key, _, _, value): (metrics_util::CompositeKey, _, _, DebugValue)| {
        let DebugValue::Gauge(value) = value else { return None };
        let key = key.key();
        let pool = key.labels().find(|label| label.key() == "pool").map(|label| label.value().to_owned());
        let name = key.name().trim_start_matches("tensorwire_");
        Some((pool.map_or_else(|| name.to_owned(), |pool| format!("{pool}.{name}")), value.0 as u64))
    };
    snapshotter.snapshot().into_vec().into_iter().filter_map(gauge).collect()
}

/// What this process holds now.
pub(crate) fn gauges(worker: &Worker) -> Gauges {
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks() as u64;
    let own = [
        ("mappings", mappings()),
        ("tasks", tasks),
        ("threads", status("self", "Threads").unwrap()),
        ("rss_anon_kib", status("self", "RssAnon").unwrap()),
        ("rss_kib", status("self", "VmRSS").unwrap()),
    ];
    let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
    let mut all: Gauges = descriptors().into_iter().chain(own).chain(recorded(worker)).collect();
    // Each block is one; pools keep theirs, and their caps bound them.
    let blocks: u64 = BLOCKS
        .iter()
        .map(|(pool, bytes)| all.get(&format!("{pool}.pool_block_bytes")).map_or(0, |held| held / bytes))
        .sum();
    all.entry("fd./memfd".to_owned()).and_modify(|memfds| *memfds -= blocks);
    all
}

/// As one line.
pub(crate) fn told(gauges: &Gauges) -> String {
    gauges.iter().map(|(name, value)| format!(" {name}={value}")).collect()
}

/// From one line.
pub(crate) fn heard(line: &str) -> Gauges {
    let pair = |word: &str| {
        let (name, value) = word.split_once('=').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    line.split_ascii_whitespace().map(pair).collect()
}
