//! The command line.

use std::{num::NonZeroU32, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use tensorwire::{FabricKind, collective::Algorithm, settings::Validation};

use crate::size;

/// Bytes of each value when many are outstanding.
const SMALL_BYTES: u64 = 8;

/// Largest size that is measured, in bytes: both processes hold a few buffers of that size.
const SIZE_MAX: u64 = 1 << 30;

/// The options that a suite replaces.
const ROW_OPTIONS: [&str; 10] =
    ["fabric", "op", "size", "wait", "mode", "validate", "source", "cpus", "ranks", "algorithm"];

const EXAMPLES: &str = "\
Examples:
  tensorwire-bench --suite small
  tensorwire-bench --suite all --plot figures.svg
  tensorwire-bench --fabric shm --op pingpong --wait adaptive
  tensorwire-bench --fabric shm,tcp --op pull --size 8,4K,64K,1M,16M,64M
  tensorwire-bench --fabric shm --op pull --size 64K --source as-it-was,rewritten
  tensorwire-bench --op all --size 8,1M --json > figures.jsonl
  tensorwire-bench --fabric shm --op pingpong --cpus one --rounds 31
  tensorwire-bench --fabric verbs --op pingpong,write --size 8,64K --device rxe1 --peer-device rxe2
  tensorwire-bench --fabric shm,tcp --op all-reduce --ranks 2,4 --size 8,1M,64M --wait adaptive
  tensorwire-bench --fabric tcp --op all-reduce --ranks 4 --size 1M --algorithm ring,halving-doubling

Each case runs against a second process, started for it, and in turns against its limit: the same work without tensorwire,
which waits as the case waits and has as many CPUs. `ratio` is the median over the rounds; of times for small operations
(below 1 is faster than the limit), of bandwidths for the others (above 1 is faster than the limit). `bare` is nothing but
the copy, or the reading, without a message. Bandwidths and rates are bytes and operations over the time of a round.
`idle` has no limit: its operations are wake-ups, and its median is the time between two of them, 0 if there are none.

Collectives have no limit, either, but for an all-reduce of two ranks over verbs: the fabric's own writes of as many bytes, in
both directions at once, between the same two processes. Each rank is a process, and times are those of rank 0. `--size` is
what a rank gives (of a broadcast: the root), and the bandwidth is that over the time. The first call is checked, number by
number.";

/// Measures tensorwire on this machine, next to the machine's limits.
#[derive(Debug, Parser)]
#[command(
    name = "tensorwire-bench",
    version,
    max_term_width = 100,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
pub(crate) struct Arguments {
    /// The second process.
    #[command(subcommand)]
    pub(crate) peer: Option<Hidden>,
    #[command(flatten)]
    pub(crate) bench: Bench,
}

/// The subcommand with which this program starts a second process.
#[derive(Debug, Subcommand)]
pub(crate) enum Hidden {
    #[command(name = BenchPeer::COMMAND, hide = true)]
    Peer(BenchPeer),
}

/// What to measure, and for how long.
#[derive(Debug, Clone, Args)]
pub(crate) struct Bench {
    /// Measure the rows of a suite, which have names and goals; `met` says whether a goal is met.
    #[arg(long, value_enum, value_name = "NAME", conflicts_with_all = ROW_OPTIONS)]
    pub(crate) suite: Option<Suite>,
    /// The transports to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,tcp")]
    pub(crate) fabric: Vec<BenchFabric>,
    /// The operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pull")]
    pub(crate) op: Vec<OpChoice>,
    /// Bytes of a tensor or write, with K, M or G for powers of 1024; several with commas.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "8,4K,64K,1M,16M", value_parser = size)]
    pub(crate) size: Vec<u64>,
    /// How both processes wait.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sleep")]
    pub(crate) wait: Vec<WaitChoice>,
    /// How a pull receives its tensor.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "copy")]
    pub(crate) mode: Vec<Mode>,
    /// Checksums with which pulls and receives validate tensors.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "off")]
    pub(crate) validate: Vec<Checksum>,
    /// What happens to the source of a pull before each pull. The same happens to the limit's source.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "as-it-was")]
    pub(crate) source: Vec<Source>,
    /// The numbers of ranks of a collective.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2", value_parser = clap::value_parser!(u32).range(2..=8))]
    pub(crate) ranks: Vec<u32>,
    /// The algorithm of an all-reduce; by default chosen by the number of elements and ranks.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) algorithm: Vec<AlgorithmChoice>,
    /// Where the processes run. `auto` is `two`, but `free` from 16 MiB on, where a second core may help to copy. With `two`, the
    /// ranks of a collective take turns on two CPUs.
    #[arg(long, value_enum, default_value_t = CpuChoice::Auto)]
    pub(crate) cpus: CpuChoice,
    /// Rounds of a case; each measures tensorwire and its limits once.
    #[arg(long, value_name = "N", default_value = "9")]
    pub(crate) rounds: NonZeroU32,
    /// Approximate duration of a round, in milliseconds.
    #[arg(long, value_name = "MS", default_value = "300")]
    pub(crate) round_ms: NonZeroU32,
    /// Operations per round and side, instead of as many as fit into its time. Rounded up if operations are done in
    /// batches.
    #[arg(long, value_name = "N", conflicts_with = "round_ms")]
    pub(crate) ops: Option<NonZeroU32>,
    /// RDMA device of this process; by default the first that works.
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// RDMA device of the second process; by default the same.
    #[arg(long, value_name = "NAME", requires = "device")]
    pub(crate) peer_device: Option<String>,
    /// Print one JSON object per case instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also draw the rows as a chart: the time of an operation, of its limit and of its goal, on one logarithmic scale.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// A group of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// Up to 64 KiB, over shared memory and TCP.
    Small,
    /// From 1 MiB, over shared memory and TCP.
    Large,
    /// Shared memory.
    Shm,
    /// TCP over loopback.
    Tcp,
    /// RDMA: needs a device and perftest.
    Verbs,
    /// All except `verbs`.
    All,
}

/// Options of the hidden second process; everything else comes over the control stream.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct BenchPeer {
    /// The CPU to run on.
    #[arg(long)]
    pub(crate) cpu: Option<usize>,
}

impl BenchPeer {
    /// The subcommand.
    pub(crate) const COMMAND: &'static str = "peer";
}

/// The fabrics that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BenchFabric {
    /// Shared memory.
    Shm,
    /// TCP over loopback.
    Tcp,
    /// RDMA, between two devices of this machine or on one. Compared with the programs of perftest.
    Verbs,
}

impl BenchFabric {
    pub(crate) fn kind(self) -> FabricKind {
        match self {
            Self::Shm => FabricKind::SHM,
            Self::Tcp => FabricKind::TCP,
            Self::Verbs => FabricKind::VERBS,
        }
    }
}

/// The operations on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OpChoice {
    /// Writes with immediate in one direction, several under way.
    Write,
    /// Half a round trip of a write with immediate.
    Pingpong,
    /// Whole pulls of a published tensor by a worker, one after the other.
    Pull,
    /// Like `pull`, by a handle that is made once.
    PullByHandle,
    /// Like `pull-by-handle`, of a tensor that is in no catalogue, so that each pull asks the other process.
    PullByMessage,
    /// Pages at random places of an arena, in transfers of many; `--size` is the size of a page.
    Pages,
    /// Pulls of 8 bytes with 64 outstanding, per pull.
    Outstanding,
    /// Pulls of 8 bytes in lists of 64, per pull.
    List,
    /// Receives of a step with 10,000 outstanding, per receive.
    Receives,
    /// Connecting a new worker and its first fetch.
    SetUp,
    /// Wake-ups of a connected, idle worker, without those of its liveness checks.
    Idle,
    /// All of the above.
    All,
    /// The sum of the 32-bit floats of all ranks, for all ranks.
    #[value(alias = "all_reduce")]
    AllReduce,
    /// The same of tensors in the memory of the pool, which can be lent without a copy.
    #[value(alias = "all_reduce_tensors")]
    AllReduceTensors,
    /// The sum for rank 0 alone.
    Reduce,
    /// The sum. Each rank gets its part.
    #[value(alias = "reduce_scatter")]
    ReduceScatter,
    /// The tensors of all ranks, for all ranks.
    #[value(alias = "all_gather")]
    AllGather,
    /// The tensor of rank 0, for all ranks.
    Broadcast,
    /// A part of each rank's tensor for each rank.
    #[value(alias = "all_to_all")]
    AllToAll,
    /// No rank continues before all have arrived.
    Barrier,
}

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Op {
    Write,
    Pingpong,
    Pull,
    PullByHandle,
    PullByMessage,
    Pages,
    Outstanding,
    List,
    Receives,
    SetUp,
    Idle,
    AllReduce,
    AllReduceTensors,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Barrier,
}

impl Op {
    /// The operations between two processes.
    pub(crate) const PAIRS: [Self; 11] = [
        Self::Write,
        Self::Pingpong,
        Self::Pull,
        Self::PullByHandle,
        Self::PullByMessage,
        Self::Pages,
        Self::Outstanding,
        Self::List,
        Self::Receives,
        Self::SetUp,
        Self::Idle,
    ];

    /// The size of an operation that is measured once, and not once per size.
    pub(crate) fn own_size(self) -> Option<u64> {
        match self {
            Self::Outstanding | Self::List | Self::Receives | Self::SetUp | Self::Idle => Some(SMALL_BYTES),
            Self::Barrier => Some(0),
            _ => None,
        }
    }

    /// Whether the ranks of a group do it together.
    pub(crate) fn is_collective(self) -> bool {
        self.is_reduction()
            || matches!(self, Self::AllGather | Self::Broadcast | Self::AllToAll | Self::Barrier)
    }

    /// Whether it combines the numbers of all ranks.
    pub(crate) fn is_reduction(self) -> bool {
        matches!(self, Self::AllReduce | Self::AllReduceTensors | Self::Reduce | Self::ReduceScatter)
    }
}

impl OpChoice {
    /// The operations that it includes.
    pub(crate) fn ops(self) -> &'static [Op] {
        match self {
            Self::Write => &[Op::Write],
            Self::Pingpong => &[Op::Pingpong],
            Self::Pull => &[Op::Pull],
            Self::PullByHandle => &[Op::PullByHandle],
            Self::PullByMessage => &[Op::PullByMessage],
            Self::Pages => &[Op::Pages],
            Self::Outstanding => &[Op::Outstanding],
            Self::List => &[Op::List],
            Self::SetUp => &[Op::SetUp],
            Self::Receives => &[Op::Receives],
            Self::Idle => &[Op::Idle],
            Self::All => &Op::PAIRS,
            Self::AllReduce => &[Op::AllReduce],
            Self::AllReduceTensors => &[Op::AllReduceTensors],
            Self::Reduce => &[Op::Reduce],
            Self::ReduceScatter => &[Op::ReduceScatter],
            Self::AllGather => &[Op::AllGather],
            Self::Broadcast => &[Op::Broadcast],
            Self::AllToAll => &[Op::AllToAll],
            Self::Barrier => &[Op::Barrier],
        }
    }
}

/// The checksums that the option accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Checksum {
    /// None.
    Off,
    /// CRC-32C.
    Crc32c,
    /// XXH3, of 64 bits.
    Xxh3,
}

impl Checksum {
    pub(crate) fn validation(self) -> Validation {
        match self {
            Self::Off => Validation::Off,
            Self::Crc32c => Validation::Crc32c,
            Self::Xxh3 => Validation::Xxh3,
        }
    }
}

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AlgorithmChoice {
    /// Each rank sends all others all its elements.
    Exchange,
    /// Each rank reads the others' elements in place: over shared memory only.
    Views,
    /// Around a ring.
    Ring,
    /// Between pairs: halves, then quarters, and so on.
    #[value(alias = "halving_doubling")]
    HalvingDoubling,
    /// Between pairs: all that a rank has.
    Doubling,
    /// Within each host, then around a ring of hosts. The ranks that are measured are on one host over shared memory, and each on
    /// a host of its own over other fabrics.
    Hierarchical,
}

impl AlgorithmChoice {
    pub(crate) fn algorithm(self) -> Algorithm {
        match self {
            Self::Exchange => Algorithm::Exchange,
            Self::Views => Algorithm::Views,
            Self::Ring => Algorithm::Ring,
            Self::HalvingDoubling => Algorithm::HalvingDoubling,
            Self::Doubling => Algorithm::Doubling,
            Self::Hierarchical => Algorithm::Hierarchical,
        }
    }
}

/// How a process waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WaitChoice {
    /// Sleeps until it is woken.
    Sleep,
    /// Polls for a short while, then sleeps.
    Adaptive,
    /// Never sleeps.
    Busy,
}

/// How a pull hands its tensor over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// As a copy in memory of the puller.
    Copy,
    /// As a view of the server's memory, read-only.
    View,
    /// As a view that the puller reads once.
    ViewRead,
}

/// The source of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// Published once, and not written since.
    AsItWas,
    /// Published again, with other bytes, before each pull.
    Rewritten,
}

/// Where the two processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CpuChoice {
    /// Chosen for each case.
    Auto,
    /// Each on a CPU of its own.
    Two,
    /// Both on one.
    One,
    /// Where the scheduler puts them.
    Free,
}

fn size(text: &str) -> Result<u64, String> {
    size::size(text, SIZE_MAX, "give a number of bytes from 1 to 1G, for instance 8, 64K, 1M")
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_units_of_1024() {
        let read = ["8", "4K", "64k", "1M", "1G"].map(|text| size(text).unwrap());
        assert_eq!(read, [8, 4096, 65536, 1 << 20, 1 << 30]);
    }

    #[test]
    fn sizes_out_of_range_or_without_a_number_are_refused() {
        for text in ["", "K", "0", "-1", "1.5M", "2G", "1T", "99999999999999999999", "18014398509481985K"] {
            let error = size(text).unwrap_err();
            assert!(error.contains("from 1 to 1G"), "{text}: {error}");
        }
    }
}
