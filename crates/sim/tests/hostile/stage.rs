//! What all actors of one run share.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tensorwire_protocol::{Mode, Validation};
use tensorwire_rendezvous::Trust;
use tensorwire_sim::{Handle, NodeId, Rng};

/// Settings that the seed draws.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) honest: usize,
    pub(super) rogues: usize,
    /// Lives of each rogue, one after the other.
    pub(super) lives: usize,
    /// Deeds of each data connection of a rogue.
    pub(super) deeds: usize,
    pub(super) mode: Mode,
    pub(super) depth: u32,
    pub(super) requests_max: u32,
    pub(super) contents_max: u32,
    pub(super) eager_bytes_max: u32,
    pub(super) ring_bytes: u32,
    pub(super) validation: Validation,
    pub(super) trust: Vec<Trust>,
    /// The first rogue also uses the name of the last worker at the first worker. Then these two workers cannot rely on
    /// each other.
    pub(super) impostor: bool,
}

impl Setup {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let honest = 2 + rng.below(2);
        let hostile_of_4 = rng.pick([0, 2, 4, 4]);
        let drawn = |rng: &mut Rng| if rng.chance(hostile_of_4, 4) { Trust::Hostile } else { Trust::Cluster };
        Self {
            honest,
            rogues: 1 + usize::from(rng.chance(1, 4)),
            lives: 1 + rng.below(2),
            deeds: rng.pick([2, 10, 30]),
            mode: rng.pick([Mode::Original, Mode::Counted, Mode::Counted, Mode::Counted]),
            depth: rng.pick([4, 5, 12, 64]),
            requests_max: rng.pick([1, 2, 5, 64]),
            contents_max: rng.pick([1, 2, 64]),
            eager_bytes_max: rng.pick([0, 64, 4096]),
            ring_bytes: rng.pick([8 << 10, 9000, 64 << 10]),
            validation: rng.pick([Validation::Off, Validation::Off, Validation::Crc32c, Validation::Xxh3]),
            trust: (0..honest).map(|_| drawn(rng)).collect(),
            impostor: honest > 2 && rng.chance(1, 4),
        }
    }
}

/// What the scenario knows to be true.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// Transfers by number: their lengths.
    pub(super) lengths: Vec<usize>,
    /// By worker and name: what was published there, oldest first.
    pub(super) published: BTreeMap<(usize, usize), Vec<u64>>,
    /// Receives and fetches between honest workers that succeeded.
    pub(super) transfers: u64,
    /// Those from a rogue.
    pub(super) taken_from_rogues: u64,
    /// Operations of honest workers with rogues.
    pub(super) operations_with_rogues: u64,
    /// Sessions and data connections that rogues tried to set up.
    pub(super) attempts: u64,
    /// Present nodes of the honest workers.
    pub(super) nodes: Vec<NodeId>,
    /// What rogues did, by name.
    pub(super) deeds: BTreeMap<&'static str, u64>,
    /// Rogues that still run.
    pub(super) rogues_at_work: usize,
}

/// Shared by all tasks of a run.
#[derive(Debug, Clone)]
pub(super) struct Stage {
    pub(super) handle: Handle,
    pub(super) setup: Arc<Setup>,
    truth: Arc<Mutex<Truth>>,
}

impl Stage {
    pub(super) fn new(handle: &Handle, setup: Setup) -> Self {
        Self { handle: handle.clone(), setup: Arc::new(setup), truth: Arc::default() }
    }

    pub(super) fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap()
    }

    pub(super) fn new_transfer(&self, length: usize) -> u64 {
        let mut truth = self.truth();
        truth.lengths.push(length);
        truth.lengths.len() as u64 - 1
    }

    /// Records a deed of a rogue.
    pub(super) fn did(&self, deed: &'static str) {
        *self.truth().deeds.entry(deed).or_default() += 1;
    }

    /// Whether two honest workers can rely on each other.
    pub(super) fn may_rely(&self, one: usize, other: usize) -> bool {
        let last = self.setup.honest - 1;
        !(self.setup.impostor && (one.min(other), one.max(other)) == (0, last))
    }
}

pub(super) fn name(worker: usize) -> String {
    format!("/job:w/replica:0/task:{worker}")
}

pub(super) fn device(worker: usize) -> String {
    format!("{}/device:CPU:0", name(worker))
}

pub(super) fn address(worker: usize) -> String {
    format!("w{worker}:1")
}

pub(super) fn rogue_name(rogue: usize) -> String {
    format!("/job:rogue/replica:0/task:{rogue}")
}

pub(super) fn rogue_device(rogue: usize) -> String {
    format!("{}/device:CPU:0", rogue_name(rogue))
}

pub(super) fn rogue_address(rogue: usize) -> String {
    format!("rogue{rogue}:1")
}

/// The channel of notes that honest workers open with rogues.
pub(super) const NOTES: u64 = 7;

/// The arena that each honest worker exposes as `kv`.
pub(super) const PAGES: u32 = 8;
pub(super) const PAGE_BYTES: usize = 64;

/// Deadline of each operation of an honest worker.
pub(super) const LIMIT: Duration = Duration::from_secs(5);
