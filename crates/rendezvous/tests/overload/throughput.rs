//! What attacks cost honest peers: their throughput with and without, in turns.
//!
//! Three processes: the worker that is attacked, an honest peer that fetches 1 MiB over TCP without rest, and the attacker. The
//! attacker has a core of its own, in turns with and without, as one on another host takes none of this one's. What a
//! neighbour takes all the same (caches, heat, the loopback's work) shows in the first line: it is busy and attacks nobody. A
//! low priority does not do instead: a busy process under SCHED_IDLE that attacked nobody left 0.45 of the throughput of
//! two processes that took turns on two cores.

use std::{fs, sync::Arc, time::Duration};

use futures::future::join_all;
use rustix::process::Pid;
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    Tensor,
    control::{ControlPlane, GrpcConfig, GrpcPlane, Secret, handshake},
};
use tokio::sync::watch;

use crate::{
    attacker,
    cores::{divided, stay_on},
    harness::{Other, bounded, parents_lines, role, say},
    stage::{HONEST, SECRET, SERVER, builder, raise_descriptor_limit, size},
};

const BYTES: usize = 1 << 20;

/// One turn, with or without the attack.
const TURN: Duration = Duration::from_millis(1500);

/// What honest peers keep of their throughput at least: the median over all rounds.
const KEPT_MIN: f64 = 0.8;

const TEST: &str = "throughput::e_honest_peers_keep_their_throughput_under_attack";

/// Fetches without rest, and reports how many it did when asked.
async fn honest(address: &str) {
    let worker = builder(HONEST, FabricKind::TCP).start().await.unwrap();
    let peer = worker.peer_at(address).await.unwrap();
    let (mut told, mut fetched) = (parents_lines(), 0_u64);
    loop {
        assert_eq!(peer.fetch("big").await.unwrap().bytes().len(), BYTES);
        fetched += 1;
        if fetched == 1 {
            say("fetching");
        }
        if told.try_recv().is_ok() {
            say(&fetched.to_string());
        }
    }
}

/// Comes with a wrong secret.
async fn guess(plane: &GrpcPlane, address: &str) {
    let runtime = TokioRuntime::current().unwrap();
    let Ok(mut session) = plane.dial(address).await else { return };
    let (worker, listen_address) = ("/job:stranger/replica:0/task:0".to_owned(), None);
    let me = handshake::Introduction { worker, incarnation: 1, listen_address, fabrics: Vec::new() };
    let wrong = Secret::new("a wrong secret of the attacker's");
    let _refused =
        handshake::dial(&mut session, &me, wrong.as_ref(), &runtime, Duration::from_secs(20), address).await;
}

/// Keeps its core busy, and attacks nobody.
async fn be_busy(is_on: watch::Receiver<bool>) {
    while *is_on.borrow() {
        (0..20_000_u64).for_each(|number| assert!(std::hint::black_box(number) < 20_000));
        tokio::task::yield_now().await;
    }
}

/// Attacks until the parent stops it.
async fn attack(words: &[String], runtime: Arc<dyn Runtime>) {
    raise_descriptor_limit();
    stay_on(&[words[5].parse().unwrap()]);
    let (mode, address, port) = (words[1].as_str(), words[2].as_str(), words[3].as_str());
    let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET))).unwrap();
    let (mut told, (turn, is_on)) = (parents_lines(), watch::channel(false));
    let hearing = async {
        while let Some(line) = told.recv().await {
            turn.send_replace(line == "on");
            say("heard");
        }
    };
    let one = |_| {
        let (mut is_on, plane, runtime) = (is_on.clone(), &plane, runtime.clone());
        async move {
            loop {
                let _parent_lives = is_on.wait_for(|on| *on).await.map(drop);
                match mode {
                    "nobody" => be_busy(is_on.clone()).await,
                    "guess" => guess(plane, address).await,
                    "garbage" => attacker::garbage(port, &*runtime).await,
                    stage => attacker::until_off(port, stage, is_on.clone(), &*runtime).await,
                }
            }
        }
    };
    // As many at once as the attack has; each begins anew when it was cut.
    let at_once = words[4].parse().unwrap();
    let attacking = join_all((0..at_once).map(one));
    say("up");
    futures::join!(hearing, attacking);
}

/// What a process has had of the CPU so far, in hundredths of seconds.
fn cpu(process: Option<Pid>) -> u64 {
    let name = process.map_or("self".to_owned(), |pid| pid.as_raw_nonzero().to_string());
    let stat = fs::read_to_string(format!("/proc/{name}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

/// One attack.
struct Trial {
    mode: &'static str,
    at_once: usize,
}

/// What came of it: of each round, the throughput with the attack by that without.
struct Measured {
    ratios: Vec<f64>,
    mib_per_second: f64,
    attackers_cpu: f64,
    own_cpu: (f64, f64),
}

impl Measured {
    fn median(&self) -> f64 {
        let mut sorted = self.ratios.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }
}

struct Parties {
    honest: Other,
    attacker: Other,
    runtime: Arc<dyn Runtime>,
}

impl Parties {
    async fn fetched(&mut self) -> u64 {
        self.honest.tell("?");
        self.honest.hear().await.parse().unwrap()
    }

    /// Fetches per second of one turn, and the CPU that attacker and attacked had.
    async fn turn(&mut self, on: bool) -> (f64, f64, f64) {
        self.attacker.tell(if on { "on" } else { "off" });
        assert_eq!(self.attacker.hear().await, "heard");
        // What was under way is over by then.
        self.runtime.sleep(TURN / 3).await;
        let attackers = Some(self.attacker.pid());
        let (began, fetched) = (self.runtime.now(), self.fetched().await);
        let before = (cpu(attackers), cpu(None));
        self.runtime.sleep(TURN).await;
        let (fetched, took) = (self.fetched().await - fetched, (self.runtime.now() - began).as_secs_f64());
        let had = |now: u64, then: u64| (now - then) as f64 / 100.0 / took;
        (fetched as f64 / took, had(cpu(attackers), before.0), had(cpu(None), before.1))
    }

    async fn rounds(&mut self, rounds: usize) -> Measured {
        let (mut ratios, mut off_rates) = (Vec::new(), 0.0);
        let (mut attackers_cpu, mut own_cpu) = (0.0, (0.0, 0.0));
        let share = 1.0 / rounds as f64;
        for _ in 0..rounds {
            let (off, _, own_off) = self.turn(false).await;
            let (on, attackers, own_on) = self.turn(true).await;
            ratios.push(on / off);
            off_rates += off * share;
            attackers_cpu += attackers * share;
            own_cpu = (own_cpu.0 + own_off * share, own_cpu.1 + own_on * share);
        }
        Measured { ratios, mib_per_second: off_rates, attackers_cpu, own_cpu }
    }
}

async fn measure(trial: &Trial, core: usize, rounds: usize, runtime: Arc<dyn Runtime>) -> Measured {
    let server = builder(SERVER, FabricKind::TCP).start().await.unwrap();
    let mut buffer = server.pool().try_alloc(BYTES).unwrap();
    buffer.fill(1);
    server.publish("big", Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
    let address = server.address().to_owned();
    let mut honest = Other::start(TEST, &format!("honest {address}"));
    assert_eq!(honest.hear().await, "fetching");
    let port = address.rsplit(':').next().unwrap();
    let role = format!("attack {} {address} {port} {} {core}", trial.mode, trial.at_once);
    let mut attacker = Other::start(TEST, &role);
    assert_eq!(attacker.hear().await, "up");
    let mut parties = Parties { honest, attacker, runtime };
    let measured = parties.rounds(rounds).await;
    drop(parties);
    server.shutdown().await;
    measured
}

#[test]
#[ignore = "a measurement that wants an idle machine: .ci/long makes it"]
fn e_honest_peers_keep_their_throughput_under_attack() {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(900), |runtime| async move {
            match words[0].as_str() {
                "honest" => honest(&words[1]).await,
                _ => attack(&words, runtime).await,
            }
        });
    }
    let dials = size("TENSORWIRE_DIALS", 10_000);
    let trials = [
        Trial { mode: "nobody", at_once: 1 },
        Trial { mode: "silent", at_once: dials },
        Trial { mode: "preface", at_once: 1000 },
        Trial { mode: "attach", at_once: 1000 },
        Trial { mode: "hello", at_once: 1000 },
        Trial { mode: "data", at_once: 1000 },
        Trial { mode: "guess", at_once: 16 },
        Trial { mode: "garbage", at_once: 16 },
    ];
    let rounds = size("TENSORWIRE_ROUNDS", 9);
    // One kind of attack alone, where somebody looks for what it costs.
    let wanted = std::env::var("TENSORWIRE_ATTACK").ok();
    let is_wanted = |trial: &&Trial| wanted.as_ref().is_none_or(|mode| mode == trial.mode);
    assert!(trials.iter().any(|trial| is_wanted(&trial)), "TENSORWIRE_ATTACK={wanted:?} is none of them");
    bounded(Duration::from_secs(900), |runtime| async move {
        raise_descriptor_limit();
        let (core, own_cores) = divided();
        stay_on(&own_cores);
        println!(
            "attack: throughput kept (median; all), MiB/s without, CPU of attacker, of attacked without/with"
        );
        let mut lost = Vec::new();
        for trial in trials.iter().filter(is_wanted) {
            let measured = measure(trial, core, rounds, runtime.clone()).await;
            let (kept, all) = (measured.median(), &measured.ratios);
            println!(
                "{} x {}: {kept:.2} ({all:.2?}), {:.0} MiB/s, {:.2}, {:.2}/{:.2}",
                trial.mode,
                trial.at_once,
                measured.mib_per_second,
                measured.attackers_cpu,
                measured.own_cpu.0,
                measured.own_cpu.1
            );
            if kept < KEPT_MIN {
                lost.push(format!("{}: {kept:.2}", trial.mode));
            }
        }
        assert!(lost.is_empty(), "less than {KEPT_MIN} is kept under {lost:?}");
    });
}
