//! A process that got a connection and then sends arbitrary bytes. It ends only its own connection: an honest one
//! continues, and memory and descriptors stay bounded.
//!
//! Three processes: the test starts the victim, whose memory and descriptors are counted, and the victim starts the
//! hostile one.

use std::{
    cell::Cell,
    fs,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use futures::future::{Either, join, select};
use tensorwire_fabric::{
    Access, ConnectParams, FabricError, Immediate, LossCause, PeerViolation, QueuePair, RemoteRegion, Role,
    Runtime, timeout,
};
use tensorwire_fabric_tcp::TcpConfig;
use tensorwire_memory::GrantEnd;

use super::{
    deeds::{self, Act, Known},
    raw::{Local, accept},
};
use crate::{
    contract::pair::{RegisteredPool, STEP_LIMIT, checksum, immediate, pattern, step, yield_once},
    process::{Other, alone, part},
};

/// Size of the memory that the hostile process may write.
const GRANTED: usize = 64 << 10;

/// Size of each honest transfer.
const HONEST: usize = 100_000;

/// Honest transfers that must complete after each deed.
const GOES_ON: u64 = 10;

/// How much the victim's memory may grow at its peak, regardless of the bytes that it gets.
const GROWTH_MAX: u64 = 24 << 20;

/// How the connection must end.
#[derive(Debug, Clone, Copy)]
enum Ends {
    /// Because the peer broke this rule.
    Broken(PeerViolation),
    /// Because no receive was free.
    NotReady,
    /// For this cause.
    Lost(LossCause),
    /// By the hostile process's own refusal.
    Refused,
    /// By any rule or loss.
    Somehow,
    /// Not by the deed: the victim closes it at any time.
    AtOurWish,
}

fn assert_ends(deed: &str, error: &FabricError, ends: Ends) {
    let as_expected = match (error, ends) {
        (FabricError::PeerMisbehaved { violation, .. }, Ends::Broken(rule)) => *violation == rule,
        (FabricError::PeerLost { cause, .. }, Ends::Lost(expected)) => *cause == expected,
        (FabricError::ReceiverNotReady { .. }, Ends::NotReady | Ends::Somehow)
        | (FabricError::RemoteRefused { .. }, Ends::Refused | Ends::Somehow)
        | (FabricError::PeerMisbehaved { .. } | FabricError::PeerLost { .. }, Ends::Somehow) => true,
        _ => false,
    };
    assert!(as_expected, "{deed}: expected {ends:?}, not: {error}");
}

/// A value of `/proc/self/status` in bytes.
fn status_bytes(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Checks that memory stays bounded from the moment when this is made.
struct Bounds {
    descriptors: usize,
    resident: u64,
}

impl Bounds {
    fn now() -> Self {
        fs::write("/proc/self/clear_refs", "5").unwrap();
        Self { descriptors: open_descriptors(), resident: status_bytes("VmRSS") }
    }

    /// Checks the bounds once the last connection is gone.
    async fn assert_bounded(&self, local: &Local) {
        let peak = status_bytes("VmHWM").saturating_sub(self.resident);
        // The sanitizer delays the reuse of freed memory.
        assert!(cfg!(asan) || peak < GROWTH_MAX, "{peak} bytes more were resident");
        let closed = async {
            while open_descriptors() > self.descriptors {
                yield_once().await;
            }
        };
        if timeout(&*local.runtime, STEP_LIMIT, closed).await.is_err() {
            let links =
                fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| fs::read_link(entry.path()));
            panic!(
                "more than {} descriptors stay open: {:?}",
                self.descriptors,
                links.flatten().collect::<Vec<_>>()
            );
        }
    }
}

/// A connection of the victim's domain with an honest peer, which transfers bytes without pause.
struct Honest {
    /// The pool of memory that the hostile process does not know.
    receive: RegisteredPool,
    peer: Local,
    here: QueuePair,
    there: QueuePair,
    transfers: Cell<u64>,
}

impl Honest {
    async fn new(victim: &Local) -> Self {
        let peer = Local::new(victim.runtime.clone());
        let (here, there) = connect(victim, &peer).await;
        let receive = RegisteredPool::new(&victim.domain, "honest", Access::RECEIVE, 16 << 20);
        Self { receive, peer, here, there, transfers: Cell::new(0) }
    }

    async fn transfer(&self) {
        let round = self.transfers.get();
        let grant = self.receive.grant(HONEST);
        self.there.add_remote_region(grant.region);
        let source = self.peer.source.filled(HONEST, round);
        let write = self.there.write_imm(source, grant.range, Immediate(7));
        let both = join(write, self.here.next_arrival());
        let (written, arrived) = self.peer.step("an honest transfer", both).await;
        written.unwrap();
        assert_eq!(immediate(arrived.unwrap()), (7, HONEST as u64));
        assert_eq!(checksum(&grant.take()), checksum(&pattern(HONEST, round)), "honest bytes were spoilt");
        self.transfers.set(round + 1);
    }

    /// Waits for `transfers` more transfers.
    async fn goes_on(&self, runtime: &Arc<dyn Runtime>, transfers: u64) {
        let goal = self.transfers.get() + transfers;
        let reached = async {
            while self.transfers.get() < goal {
                yield_once().await;
            }
        };
        step(runtime, "the honest transfers", reached).await;
    }

    /// Transfers until `suffering` is over.
    async fn beside(&self, suffering: Pin<&mut impl Future<Output = ()>>) {
        let transfers = pin!(async {
            loop {
                self.transfer().await;
                // On loopback all of it may have been ready at once.
                yield_once().await;
            }
        });
        match select(suffering, transfers).await {
            Either::Left(_) => {}
            Either::Right((never, _)) => never,
        }
        assert!(self.here.failure().is_none() && self.there.failure().is_none());
    }
}

async fn connect(acceptor: &Local, dialer: &Local) -> (QueuePair, QueuePair) {
    let (accepting, dialing) = (acceptor.prepare(), dialer.prepare());
    let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit: STEP_LIMIT };
    let accept = params(dialing.connection_data(), Role::Acceptor);
    let dial = params(accepting.connection_data(), Role::Dialer);
    let both = join(accepting.connect(accept), dialing.connect(dial));
    let (accepted, dialed) = acceptor.step("an honest connection", both).await;
    (accepted.unwrap().spawn(&*acceptor.runtime), dialed.unwrap().spawn(&*dialer.runtime))
}

/// The victim of the hostile process.
struct Victim {
    local: Local,
    other: Other,
    exposed: RegisteredPool,
}

impl Victim {
    fn new(local: Local, path: &str, deed: &str) -> Self {
        let other = Other::start_as(path, deed);
        let exposed = RegisteredPool::new(&local.domain, "exposed", Access::READABLE, 4 << 20);
        Self { local, other, exposed }
    }

    async fn hear(&mut self, what: &str) -> String {
        self.other.hear_meanwhile(&self.local.runtime, what).await
    }

    /// One connection, its deed and its end.
    async fn suffer(&mut self, honest: &Honest, deed: &str, ends: Ends, round: u64) {
        let grant = self.local.receive.grant(GRANTED);
        let guard = self.local.receive.filled(4096, 5);
        let exposed = self.exposed.filled(GRANTED, 6);
        let readable: RemoteRegion = self.exposed.region(exposed.block().unwrap());
        let prepared = self.local.prepare();
        let known = Known {
            data: prepared.connection_data(),
            region: grant.region,
            range: grant.range,
            readable,
            offset: exposed.offset() as u64,
        };
        let exposure = exposed.expose();
        self.other.tell(&format!("{round} {}", known.describe()));
        let queue_pair = self.local.step("accepting the hostile process", accept(prepared)).await.unwrap();
        assert_eq!(self.hear(deed).await, "in");
        if matches!(ends, Ends::AtOurWish) {
            honest.goes_on(&self.local.runtime, 5 * GOES_ON).await;
            assert!(queue_pair.failure().is_none(), "{deed}: {:?}", queue_pair.failure());
        } else {
            let error = self.end_of(&queue_pair, matches!(ends, Ends::NotReady)).await;
            assert_ends(deed, &error, ends);
        }
        self.local.step("the close", queue_pair.close()).await;
        // What it still sends fills the socket's buffer, until the socket is gone.
        drop(queue_pair);
        honest.goes_on(&self.local.runtime, GOES_ON).await;
        assert_eq!(self.hear(deed).await, "out");
        assert!(guard[..] == pattern(4096, 5)[..], "{deed}: memory that was not granted changed");
        assert!(exposed[..] == pattern(GRANTED, 6)[..], "{deed}: memory that was only readable changed");
        grant.granted.end(GrantEnd::QueuePairDrained).expect("nothing touches the memory any more");
        drop(exposure);
    }

    /// The first error; arrivals before it are taken, unless `leave` is set.
    async fn end_of(&self, queue_pair: &QueuePair, leave: bool) -> FabricError {
        let ended = async {
            while queue_pair.failure().is_none() {
                if leave {
                    yield_once().await;
                } else if let Err(error) = queue_pair.next_arrival().await {
                    return error;
                }
            }
            queue_pair.failure().unwrap()
        };
        self.local.step("the end of the hostile connection", ended).await
    }
}

async fn suffer(path: &str, deed: &'static str, ends: Ends, rounds: u64, runtime: Arc<dyn Runtime>) {
    let mut victim = Victim::new(Local::new(runtime.clone()), path, deed);
    let honest = Honest::new(&victim.local).await;
    let suffering = pin!(async {
        victim.suffer(&honest, deed, ends, 0).await;
        let bounds = Bounds::now();
        for round in 1..rounds {
            victim.suffer(&honest, deed, ends, round).await;
        }
        bounds.assert_bounded(&victim.local).await;
    });
    honest.beside(suffering).await;
}

/// One test for each deed: what the hostile process does, and how its connection must end.
macro_rules! deeds {
    ($($test:ident: $deed:ident x $rounds:literal => $ends:expr,)*) => {$(
        #[test]
        fn $test() {
            let (path, deed) = (concat!("tcp::hostile_process::", stringify!($test)), stringify!($deed));
            if part() == deed {
                return deeds::commit(deeds::$deed as Act);
            }
            alone(path, move |runtime| Box::pin(suffer(path, deed, $ends, $rounds, runtime)));
        }
    )*};
}

deeds! {
    e_a_length_above_the_frame_limit_is_malformed: length_above_the_limit x 2 => Ends::Broken(PeerViolation::Malformed),
    e_a_frame_longer_than_its_write_is_malformed: longer_than_its_write x 2 => Ends::Broken(PeerViolation::Malformed),
    e_an_empty_frame_that_promises_more_is_malformed: empty_but_more x 2 => Ends::Broken(PeerViolation::Malformed),
    e_an_announcement_of_4_gib_is_out_of_bounds: announce_4_gib x 2 => Ends::Broken(PeerViolation::OutOfBounds),
    e_an_offset_that_overflows_is_out_of_bounds: overflow x 2 => Ends::Broken(PeerViolation::OutOfBounds),
    e_a_wrong_region_is_refused: wrong_region x 2 => Ends::Broken(PeerViolation::UnknownRegion),
    e_a_wrong_generation_is_refused: wrong_generation x 2 => Ends::Broken(PeerViolation::UnknownRegion),
    e_a_wrong_key_is_refused: wrong_key x 2 => Ends::Broken(PeerViolation::WrongKey),
    e_memory_beside_the_grant_is_refused: beside_the_grant x 2 => Ends::Broken(PeerViolation::NotGranted),
    e_a_write_to_readable_memory_is_refused: write_to_readable x 2 => Ends::Broken(PeerViolation::NoRight),
    e_a_read_of_writable_memory_is_refused: read_of_writable x 2 => Ends::Broken(PeerViolation::NoRight),
    e_an_unknown_refusal_is_malformed: unknown_refusal x 2 => Ends::Broken(PeerViolation::Malformed),
    e_a_flood_of_reads_is_too_many: flood_of_reads x 2 => Ends::Broken(PeerViolation::TooManyReads),
    e_a_flood_of_answers_is_malformed: flood_of_answers x 2 => Ends::Broken(PeerViolation::Malformed),
    e_a_flood_of_notifications_finds_no_receive: flood_of_notifications x 2 => Ends::NotReady,
    e_a_half_close_between_frames_is_a_loss: half_close x 3 => Ends::Lost(LossCause::EndOfFile),
    e_a_half_close_within_a_frame_is_a_loss: half_close_within_a_frame x 3 => Ends::Lost(LossCause::EndOfFile),
    e_a_goodbye_and_more_is_a_goodbye: goodbye_and_more x 3 => Ends::Lost(LossCause::ClosedByPeer),
    e_a_refusal_of_what_was_not_sent_ends_that_connection: refuse_everything x 3 => Ends::Refused,
    e_a_truncated_frame_and_silence_hold_one_connection: truncated_then_silent x 8 => Ends::AtOurWish,
    e_endless_writes_hold_up_nobody: endless_writes x 2 => Ends::AtOurWish,
    e_endless_empty_writes_hold_up_nobody: endless_empty_writes x 2 => Ends::AtOurWish,
    e_random_bytes_of_240_seeds_end_their_own_connection: random_bytes x 240 => Ends::Somehow,
    e_spoilt_frames_of_240_seeds_end_their_own_connection: spoilt_frames x 240 => Ends::Somehow,
}

/// The limit for hellos: a stranger's dials must not delay others for longer.
const HELLO_LIMIT: Duration = Duration::from_millis(500);

fn impatient() -> TcpConfig {
    TcpConfig { handshake_limit: HELLO_LIMIT, ..TcpConfig::default() }
}

#[test]
fn e_a_hello_that_comes_byte_by_byte_is_held_to_its_limit() {
    let path = "tcp::hostile_process::e_a_hello_that_comes_byte_by_byte_is_held_to_its_limit";
    if part() == "slow_hello" {
        return deeds::commit_outside(deeds::slow_hello);
    }
    alone(path, move |runtime| {
        Box::pin(async move {
            let victim = Local::with_config(runtime.clone(), impatient());
            let honest = Honest::new(&victim).await;
            let mut other = Other::start_as(path, "slow_hello");
            let prepared = victim.prepare();
            other.tell(&deeds::hex(&prepared.connection_data().0));
            let mut sent = 0;
            let suffering = pin!(async {
                assert_eq!(other.hear_meanwhile(&runtime, "the dial").await, "in");
                // Each byte is progress, but none extends the limit.
                while victim.fabric.listener_stats().timed_out == 0 {
                    assert!(sent < 49, "the hello is nearly whole, and its sender is let in");
                    other.tell("one more");
                    sent += 1;
                    runtime.sleep(HELLO_LIMIT / 10).await;
                }
                assert!(sent > 2, "it was cut after {sent} bytes");
                other.tell("enough");
                assert_eq!(other.hear_meanwhile(&runtime, "the end").await, "cut");
            });
            honest.beside(suffering).await;
            let stats = victim.fabric.listener_stats();
            assert_eq!((stats.timed_out, stats.bad_tokens, stats.malformed), (1, 0, 0));
            // The connection that it wanted to take is still free for the peer that has the token.
            drop(prepared);
            connect(&victim, &honest.peer).await;
        })
    });
}

#[test]
fn e_a_thousand_half_open_dials_keep_nobody_out() {
    let path = "tcp::hostile_process::e_a_thousand_half_open_dials_keep_nobody_out";
    if part() == "half_open" {
        return deeds::commit_outside(deeds::half_open);
    }
    alone(path, move |runtime| {
        Box::pin(async move {
            let victim = Local::with_config(runtime.clone(), impatient());
            let honest = Honest::new(&victim).await;
            let mut other = Other::start_as(path, "half_open");
            let prepared = victim.prepare();
            // Takes the memory that the honest connection needs.
            honest.transfer().await;
            let bounds = Bounds::now();
            other.tell(&deeds::hex(&prepared.connection_data().0));
            let suffering = pin!(async {
                let (mut newcomers, mut most) = (0, 0);
                // The dials go on meanwhile, each instead of the oldest.
                while victim.fabric.listener_stats().accepted < 1000 {
                    drop(connect(&victim, &honest.peer).await);
                    newcomers += 1;
                    most = most.max(open_descriptors());
                    yield_once().await;
                }
                assert_eq!(other.hear_meanwhile(&runtime, "the dials").await, "1000");
                assert!(newcomers > 0);
                let open = most - bounds.descriptors;
                assert!(open <= 64 + 16, "{open} descriptors were open for strangers");
                let turned_away = async {
                    loop {
                        let stats = victim.fabric.listener_stats();
                        if stats.evicted + stats.timed_out >= 1000 {
                            return;
                        }
                        yield_once().await;
                    }
                };
                victim.step("the last stranger to be turned away", turned_away).await;
            });
            honest.beside(suffering).await;
            drop(prepared);
            bounds.assert_bounded(&victim).await;
        })
    });
}
