//! `tensorwire bench`'s part of the command line.

use std::{num::NonZeroU64, time::Duration};

use clap::{
    Args, ValueEnum,
    error::{ContextKind, ContextValue},
};
use serde::Serialize;
use tensorwire::settings::Wait;

use super::{Fabric, Secret};
use crate::{console::Console, exit};

/// The port of `--serve`, and of a HOST that is given without one.
const PORT: u16 = 4250;
/// Largest size that can be measured, in bytes.
const SIZE_MAX: u64 = 1 << 30;

const EXAMPLES: &str = "\
Examples:
  tensorwire bench
  tensorwire bench --fabric shm --op pingpong --size 8,4K
  tensorwire bench --op all --json > figures.jsonl

  tensorwire bench --serve --secret-file secret               on host-a
  tensorwire bench host-a --secret-file secret                on another host
  tensorwire bench host-a --secret-file secret --fabric verbs --op write --size 64K,1M

Without HOST a second process of this machine is measured with. Between two hosts the workers choose the best fabric that both \
have, and print why better ones are not used; with --fabric another one is an error.

Figures are those of perftest: the least time, the typical one (median) and the 99th percentile in microseconds for pingpong \
and pull; MB (10^6 bytes) and millions of messages a second for write. A tenth of --time is spent before that to warm up. \
`tensorwire-bench`, of the package tensorwire-benches, measures more, beside what the machine allows.";

/// `tensorwire bench`.
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::help()))]
pub(crate) struct Bench {
    /// Measure with `tensorwire bench --serve` on this host. Without it, with a second process of this machine.
    #[arg(value_name = "HOST[:PORT]", value_parser = address)]
    pub(crate) peer: Option<String>,
    /// Serve measurements to another host until Ctrl-C. Anything beyond loopback needs --secret-file.
    #[arg(long, value_name = "HOST[:PORT]", num_args = 0..=1, default_missing_value = "0.0.0.0", value_parser = address)]
    #[arg(conflicts_with_all = ["peer", "op", "size", "time", "iterations"])]
    pub(crate) serve: Option<String>,
    /// The transports to measure. If a named one cannot be used, that is an error. Default: `auto` between two hosts,
    /// which is RDMA if both have it, otherwise TCP; on one host `shm,tcp`.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) fabric: Vec<Fabric>,
    /// The operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pull")]
    pub(crate) op: Vec<Op>,
    /// Bytes of a tensor, with K, M or G for powers of 1024; several with commas.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "8,4K,64K,1M,16M", value_parser = size)]
    pub(crate) size: Vec<u64>,
    /// How this process waits, and on one host the second one.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "adaptive")]
    pub(crate) wait: Vec<WaitChoice>,
    /// How long to measure each row, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    pub(crate) time: Duration,
    /// Number of operations of each row. It replaces --time.
    #[arg(long, value_name = "N", conflicts_with = "time")]
    pub(crate) iterations: Option<NonZeroU64>,
    #[command(flatten)]
    pub(crate) secret: Secret,
    #[command(flatten)]
    pub(crate) console: Console,
    /// End with the process that started this one.
    #[arg(long, hide = true, requires = "serve")]
    pub(crate) until_stdin_ends: bool,
}

/// The operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Half a round trip of a tensor that both sides send and receive.
    Pingpong,
    /// Whole fetches of a published tensor by its name, one after the other.
    Pull,
    /// Fetches of a published tensor, up to 16 under way: the other side writes the tensors into this side's memory.
    Write,
    /// All of these.
    All,
}

impl Op {
    /// The operations that it includes.
    pub(crate) fn ops(self) -> &'static [Self] {
        match self {
            Self::Pingpong => &[Self::Pingpong],
            Self::Pull => &[Self::Pull],
            Self::Write => &[Self::Write],
            Self::All => &[Self::Pingpong, Self::Pull, Self::Write],
        }
    }
}

/// How a process waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WaitChoice {
    /// Sleeps until it is woken.
    Sleep,
    /// Polls for a short while, then sleeps.
    Adaptive,
    /// Never sleeps.
    Busy,
}

impl WaitChoice {
    pub(crate) fn wait(self) -> Wait {
        match self {
            Self::Sleep => Wait::Sleep,
            Self::Adaptive => Wait::Adaptive,
            Self::Busy => Wait::Busy,
        }
    }
}

/// Options and operations that moved from `tensorwire bench` to `tensorwire-bench`.
const MOVED: &str = "--suite --mode --validate --source --ranks --algorithm --cpus --rounds --round-ms --ops --device \
    --peer-device --plot pull-by-handle pull-by-message outstanding list receives set-up idle all-reduce \
    all-reduce-tensors reduce reduce-scatter all-gather broadcast all-to-all barrier";

/// An error of the command line. It names `tensorwire-bench` if the option or the operation moved there.
pub(crate) fn with_new_home(mut error: clap::Error) -> clap::Error {
    let is_moved = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => MOVED.split_whitespace().any(|moved| moved == text),
        _ => false,
    };
    let is_bench = std::env::args_os().nth(1).is_some_and(|command| command == "bench");
    if is_bench && (is_moved(ContextKind::InvalidArg) || is_moved(ContextKind::InvalidValue)) {
        error.remove(ContextKind::SuggestedArg);
        let tip = "that has moved: run `tensorwire-bench` with the same options, which \
            `cargo build --release -p tensorwire-benches --bin tensorwire-bench` builds";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.to_owned().into()]));
    }
    error
}

fn size(text: &str) -> Result<u64, String> {
    crate::size::size(text, SIZE_MAX, "give a number of bytes from 1 to 1G, for instance 8, 64K, 1M")
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.001..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds from 0.001 to 3600, for instance 0.5".to_owned())
}

/// An address, with the default port of `--serve` if it has no port.
fn address(text: &str) -> Result<String, String> {
    let has_port = text.rfind(':').is_some_and(|colon| !text[colon..].contains(']'));
    super::address(&if has_port { text.to_owned() } else { format!("{text}:{PORT}") })
}

#[cfg(test)]
mod tests {
    use super::{address, seconds, size};

    #[test]
    fn a_host_without_a_port_has_that_of_serve() {
        for (text, expected) in [
            ("host-a", "host-a:4250"),
            ("[::1]", "[::1]:4250"),
            ("[::1]:7", "[::1]:7"),
            ("127.0.0.1:7", "127.0.0.1:7"),
        ] {
            assert_eq!(address(text).unwrap(), expected);
        }
        for wrong in ["", "host-a:", "host-a:port", ":7"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_units_of_1024_and_are_in_range() {
        assert_eq!(["8", "64k", "1G"].map(|text| size(text).unwrap()), [8, 65536, 1 << 30]);
        for text in ["", "K", "0", "-1", "1.5M", "2G"] {
            assert!(size(text).unwrap_err().contains("from 1 to 1G"), "{text}");
        }
    }

    #[test]
    fn times_are_seconds() {
        assert_eq!(seconds("0.25").unwrap().as_millis(), 250);
        for text in ["", "0", "-1", "NaN", "1e9", "long"] {
            assert!(seconds(text).unwrap_err().contains("0.5"), "{text}");
        }
    }
}
