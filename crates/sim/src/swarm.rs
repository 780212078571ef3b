//! The settings of a world that its seed decides before it starts.

use std::time::Duration;

use tensorwire_fabric::QueuePairConfig;

use crate::Rng;

/// When a write may complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Completions {
    /// Once all bytes are at the target, as with a NIC that waits for acknowledgements.
    AfterDelivery,
    /// Once every source byte was read, as with a socket: the bytes may still be under way.
    AfterReading,
    /// Each connection draws one of the two.
    Mixed,
}

/// The knobs of one world. Every seed draws its own ("swarm testing"), because average settings reach few
/// corner cases.
#[derive(Debug, Clone)]
pub struct Swarm {
    /// How likely a ready task is picked, relative to the other weights.
    pub task_weight: u32,
    /// How likely a step of a write is picked.
    pub wire_weight: u32,
    /// How likely a control frame is delivered.
    pub control_weight: u32,
    /// How likely a due timer fires.
    pub timer_weight: u32,
    /// Most pieces a write is cut into; at least 1.
    pub pieces_max: usize,
    /// Pieces of one byte each, for as many bytes as `pieces_max` allows.
    pub tiny_pieces: bool,
    /// A logical write is split into work requests of at most this many bytes.
    pub piece_bytes_max: u64,
    /// Whether the fabric writes many ranges at once.
    pub vectored: bool,
    /// Of 65,536 pieces of contents, how many arrive with one bit flipped, until
    /// [`Handle::flip_bits`](crate::Handle::flip_bits) changes that. Only for scenarios that validate checksums.
    pub flips_of_65536: u32,
    /// Of 256 pieces, how many land in the same step that reads them.
    pub direct_of_256: u32,
    /// When completions are reported.
    pub completions: Completions,
    /// Longest delay before a write's next step.
    pub latency_max: Duration,
    /// Longest delay before a control frame is delivered.
    pub control_latency_max: Duration,
    /// Of 256 delays, how many are drawn up to [`stall_max`](Self::stall_max) instead.
    pub stall_of_256: u32,
    /// Longest stall.
    pub stall_max: Duration,
    /// Longest time until a surviving peer sees that a connection is lost.
    pub detection_max: Duration,
    /// Of 256 steps, how many let a little time pass although something else is enabled.
    pub jitter_of_256: u32,
    /// Longest time that such a step lets pass.
    pub jitter_max: Duration,
    /// Of 256 accesses to a board, before how many the peer's process polls one of its tasks.
    pub turns_of_256: u32,
    /// Depths for the harness to use.
    pub depths: QueuePairConfig,
    /// Views of one process's memory that another may hold at once, through all their connections.
    pub leases_max: u32,
    /// Sleeps at least this long are deadlines: they are not progress (see [`World`](crate::World)).
    pub deadline_at_least: Duration,
    /// A run of more events than this counts as endless.
    pub events_max: u64,
}

/// The default limit of a work request.
const PIECE_BYTES_MAX: u64 = 1 << 30;

impl Swarm {
    /// The settings that `rng` draws.
    pub fn draw(rng: &mut Rng) -> Self {
        let micros = Duration::from_micros;
        Self {
            task_weight: rng.pick([1, 4, 16]),
            wire_weight: rng.pick([1, 4, 16]),
            control_weight: rng.pick([1, 4, 16]),
            timer_weight: rng.pick([1, 4, 16]),
            pieces_max: rng.pick([1, 2, 5, 16]),
            tiny_pieces: rng.chance(1, 4),
            piece_bytes_max: PIECE_BYTES_MAX,
            vectored: true,
            flips_of_65536: 0,
            direct_of_256: rng.pick([0, 64, 256]),
            completions: rng.pick([
                Completions::AfterDelivery,
                Completions::AfterReading,
                Completions::Mixed,
            ]),
            latency_max: rng.pick([Duration::ZERO, micros(1), micros(50), micros(5000)]),
            control_latency_max: rng.pick([Duration::ZERO, micros(20), micros(2000), micros(50_000)]),
            stall_of_256: rng.pick([0, 1, 16]),
            stall_max: micros(20_000),
            detection_max: rng.pick([micros(10), micros(5_000), micros(200_000)]),
            jitter_of_256: rng.pick([0, 4, 32]),
            jitter_max: micros(20),
            depths: QueuePairConfig {
                send_depth: rng.pick([4, 5, 7, 16, 64]),
                receive_depth: rng.pick([4, 5, 7, 16, 64]),
            },
            leases_max: rng.pick([0, 1, 3, 64]),
            turns_of_256: rng.pick([0, 16, 128]),
            deadline_at_least: Duration::from_secs(1),
            events_max: 5_000_000,
        }
    }

    /// No delays, whole writes, equal weights: for tests of one rule.
    pub fn calm() -> Self {
        Self {
            task_weight: 1,
            wire_weight: 1,
            control_weight: 1,
            timer_weight: 1,
            pieces_max: 1,
            tiny_pieces: false,
            piece_bytes_max: PIECE_BYTES_MAX,
            vectored: true,
            flips_of_65536: 0,
            direct_of_256: 256,
            completions: Completions::AfterDelivery,
            latency_max: Duration::ZERO,
            control_latency_max: Duration::ZERO,
            stall_of_256: 0,
            stall_max: Duration::ZERO,
            detection_max: Duration::from_micros(10),
            jitter_of_256: 0,
            jitter_max: Duration::ZERO,
            depths: QueuePairConfig { send_depth: 8, receive_depth: 8 },
            leases_max: 64,
            turns_of_256: 0,
            deadline_at_least: Duration::from_secs(1),
            events_max: 5_000_000,
        }
    }

    /// A delay of up to `max`, or now and then a stall.
    pub(crate) fn delay(&self, rng: &mut Rng, max: Duration) -> Duration {
        let max = if rng.chance(self.stall_of_256, 256) { self.stall_max } else { max };
        rng.duration(max)
    }
}
