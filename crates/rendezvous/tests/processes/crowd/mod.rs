//! Four workers as processes, each of which exchanges values with each other one without rest, and whoever kills, stops
//! and restarts them.

pub(crate) mod content;
pub(crate) mod gauges;
mod member;
pub(crate) mod tally;

use std::{collections::BTreeSet, env, net::TcpListener, process, sync::Arc, time::Duration};

use rustix::process::Signal;
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_rendezvous::{WorkerBuilder, control::Secret};

use self::{
    content::mixed,
    gauges::{Gauges, heard, told},
    tally::Tally,
};
use crate::{
    harness::{Other, bounded, kind, step},
    proxy::Proxy,
    rdma::{End, device_at, patient},
};

/// So many workers there are.
pub(crate) const COUNT: usize = 4;

const JOB: &str = "crowd";

/// Shm, and tcp with [`CUT_OFF`], whose control sessions go through proxies.
pub(crate) const MIXED: &str = "mixed";
pub(crate) const CUT_OFF: usize = COUNT - 1;

/// Ports that nobody is given by chance, so that one is free again for the next life.
const PORTS: std::ops::Range<u16> = 10_000..30_000;

/// How long a child may live.
const CHILD_LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Caps of each worker's pools, and their blocks, in bytes: little, so that what stays in use is missed.
const POOL: u64 = 32 << 20;
/// Of a pool that peers map as they come across its parts: little enough for all of it to be mapped soon.
const SMALL_POOL: u64 = 12 << 20;
const BLOCK: usize = 4 << 20;

/// What a member holds has settled when it has not changed for so long.
const QUIET: Duration = Duration::from_secs(1);

/// What the members of a crowd have in common.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The caller's own name, which the members run too.
    pub(crate) test: &'static str,
    /// A fabric, or [`MIXED`].
    pub(crate) fabric: &'static str,
    pub(crate) liveness: Duration,
}

/// A member's.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    index: usize,
    fabric: String,
    /// Where it finds the others.
    ports: Vec<String>,
    /// Where it listens.
    own_port: String,
    liveness: Duration,
}

impl Settings {
    fn from_words(words: &[String]) -> Self {
        Self {
            index: words[0].parse().unwrap(),
            fabric: words[1].clone(),
            ports: words[2].split(',').map(str::to_owned).collect(),
            own_port: words[3].clone(),
            liveness: Duration::from_millis(words[4].parse().unwrap()),
        }
    }

    fn addresses(&self) -> impl Iterator<Item = String> {
        self.ports.iter().map(|port| format!("127.0.0.1:{port}"))
    }

    /// The deadline of each operation.
    fn limit(&self) -> Duration {
        patient(Duration::from_secs(10))
    }

    fn apply(&self, builder: WorkerBuilder) -> WorkerBuilder {
        let end = if self.index.is_multiple_of(2) { End::Left } else { End::Right };
        let builder = match self.fabric.as_str() {
            MIXED if self.index == CUT_OFF => builder.require(FabricKind::TCP),
            MIXED => builder.fabrics([FabricKind::SHM, FabricKind::TCP]),
            one => builder.require(kind(one)).rdma(|rdma| *rdma = device_at(end)),
        };
        // Who is found through a proxy can't be handed a secret by its port.
        let builder = match self.fabric.as_str() {
            MIXED => builder.secret(Secret::new(*b"known to the whole crowd").unwrap()),
            _ => builder,
        };
        let builder = builder.bind(format!("127.0.0.1:{}", self.own_port)).liveness(self.liveness);
        let builder = builder.timeout(self.limit());
        let source = if self.is_filled() { SMALL_POOL } else { POOL };
        builder.memory(|memory| {
            memory.source_bytes = source;
            memory.receive_bytes = POOL;
            memory.block_bytes = BLOCK;
        })
    }

    /// Whether each byte costs a processor's time many times over.
    fn is_emulated(&self) -> bool {
        self.fabric == "verbs"
    }

    /// Whether all that is bounded is to be full from the beginning, so that nothing may grow later.
    fn is_filled(&self) -> bool {
        self.fabric == MIXED
    }
}

/// In a child: does what a member does. False in the parent.
pub(crate) fn is_member(words: Option<Vec<String>>) -> bool {
    let Some(words) = words else { return false };
    bounded(CHILD_LIMIT, |runtime| member::member(Settings::from_words(&words), runtime));
    true
}

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    Some(env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// What is drawn in a test, from a seed that is printed: `TENSORWIRE_CROWD_SEED`, or another one each time.
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(runtime: &dyn Runtime) -> Self {
        let seed = number("TENSORWIRE_CROWD_SEED").unwrap_or_else(|| runtime.random());
        println!("TENSORWIRE_CROWD_SEED={seed}");
        Self(seed)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        self.0 = mixed(self.0);
        (self.0 % most as u64) as usize
    }
}

/// Free ports in a row, one for each worker.
fn free_ports() -> Vec<u16> {
    let first = PORTS.start + (process::id() % u32::from(PORTS.end - PORTS.start)) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let found: Vec<u16> = (first..PORTS.end).chain(PORTS.start..first).filter(is_free).take(COUNT).collect();
    assert_eq!(found.len(), COUNT, "no free ports");
    found
}

/// The processes.
pub(crate) struct Crowd {
    plan: Plan,
    ports: Vec<u16>,
    /// How [`CUT_OFF`] finds the others, and they it, where it is cut off.
    proxy: Proxy,
    pub(crate) runtime: Arc<dyn Runtime>,
    /// `None` while dead.
    members: Vec<Option<Other>>,
}

impl Crowd {
    /// Starts them, and has them begin once all are up.
    pub(crate) async fn start(plan: Plan) -> Self {
        let ports = free_ports();
        let runtime = Arc::new(TokioRuntime::current().unwrap());
        let members = (0..COUNT).map(|_| None).collect();
        let mut crowd = Self { plan, ports, proxy: Proxy::new(), runtime, members };
        (0..COUNT).for_each(|index| crowd.begin(index));
        for index in 0..COUNT {
            crowd.expect(index, "up").await;
        }
        crowd.tell_all("go");
        crowd
    }

    /// Starts one that is dead.
    pub(crate) fn begin(&mut self, index: usize) {
        let Plan { test, fabric, liveness } = &self.plan;
        let is_proxied = |peer: usize| *fabric == MIXED && (peer == CUT_OFF || index == CUT_OFF);
        let found_at = |peer: usize| match self.ports[peer] {
            port if is_proxied(peer) => self.proxy.port(port),
            port => port,
        };
        let ports: Vec<String> = (0..COUNT).map(|peer| found_at(peer).to_string()).collect();
        let (own, liveness) = (self.ports[index], liveness.as_millis());
        let role = format!("{index} {fabric} {} {own} {liveness}", ports.join(","));
        self.members[index] = Some(Other::start(test, &role));
    }

    /// Another life of a member, which begins at once.
    pub(crate) fn restart(&mut self, index: usize) {
        self.kill(index);
        self.begin(index);
        self.tell(index, "go");
    }

    /// Its complaints are read before.
    pub(crate) fn kill(&mut self, index: usize) {
        self.listen();
        if let Some(member) = self.members[index].take() {
            member.kill();
        }
    }

    /// Ends the control sessions with [`CUT_OFF`].
    pub(crate) fn cut(&self, is_reset: bool) {
        self.proxy.cut(is_reset);
    }

    pub(crate) fn signal(&self, index: usize, signal: Signal) {
        self.members[index].as_ref().unwrap().signal(signal);
    }

    pub(crate) fn pid(&self, index: usize) -> String {
        self.members[index].as_ref().unwrap().pid().as_raw_nonzero().to_string()
    }

    /// Those that live.
    pub(crate) fn living(&self) -> Vec<usize> {
        (0..COUNT).filter(|index| self.members[*index].is_some()).collect()
    }

    pub(crate) fn tell(&mut self, index: usize, line: &str) {
        self.members[index].as_mut().unwrap().tell(line);
    }

    pub(crate) fn tell_all(&mut self, line: &str) {
        self.living().into_iter().for_each(|index| self.tell(index, line));
    }

    /// Reads the lines of the members. None of them may complain, or end by itself.
    pub(crate) fn listen(&mut self) {
        for (index, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            while let Some(line) = member.heard() {
                complain(index, &line);
            }
            assert!(!member.has_ended(), "member {index} has ended");
        }
    }

    /// The rest of the next line that begins with `word`.
    async fn expect(&mut self, index: usize, word: &str) -> String {
        loop {
            let line = self.members[index].as_mut().unwrap().hear().await;
            complain(index, &line);
            if let Some(rest) = line.strip_prefix(word) {
                return rest.to_owned();
            }
        }
    }

    /// The load goes on for so long.
    pub(crate) async fn run_for(&mut self, duration: Duration) {
        self.runtime.sleep(duration).await;
        self.listen();
    }

    /// The load goes on until each of `members` has done another operation with `peer` that went right, and more than
    /// `least` in all.
    pub(crate) async fn goes_right(&mut self, members: &[usize], peer: usize, least: u64) {
        let runtime = self.runtime.clone();
        for index in members {
            let least = least.max(self.tallies(*index).await[peer].right);
            let more = async {
                while self.tallies(*index).await[peer].right <= least {
                    runtime.sleep(Duration::from_millis(20)).await;
                }
            };
            step("an operation that goes right", more).await;
        }
    }

    /// Nobody does anything any more, and all that was begun has ended.
    pub(crate) async fn is_still(&mut self) {
        for (line, answer) in [("rest", "rests"), ("still", "is still")] {
            self.tell_all(line);
            for index in self.living() {
                self.expect(index, answer).await;
            }
        }
        for index in self.living() {
            for (peer, tally) in self.tallies(index).await.iter().enumerate() {
                assert_eq!(tally.begun, tally.ended, "member {index} with {peer}: {tally:?}");
                assert_eq!(tally.right + tally.failed, tally.ended, "member {index} with {peer}: {tally:?}");
            }
        }
    }

    /// While all are still, two that live long read all of each other's source pools, so that none of it is mapped for the
    /// first time later.
    pub(crate) async fn tour(&mut self, pair: [usize; 2]) {
        for [owner, reader] in [pair, [pair[1], pair[0]]] {
            self.tell(owner, "publish parts");
            let parts: usize = self.expect(owner, "parts").await.trim().parse().unwrap();
            println!("member {reader} reads {parts} parts of {owner}");
            self.tell(reader, &format!("read parts {owner} {parts}"));
            self.expect(reader, "has read").await;
            self.tell(owner, &format!("withdraw parts {parts}"));
            self.expect(owner, "has withdrawn").await;
        }
    }

    /// Operations of a member, with each peer.
    pub(crate) async fn tallies(&mut self, index: usize) -> Vec<Tally> {
        self.tell(index, "tally");
        let line = self.expect(index, "tally").await;
        let mut numbers = line.split_ascii_whitespace().map(|word| word.parse().unwrap());
        std::iter::from_fn(|| Tally::heard(&mut numbers)).collect()
    }

    pub(crate) async fn gauges(&mut self, index: usize) -> Gauges {
        self.tell(index, "gauges");
        heard(&self.expect(index, "gauges").await)
    }

    /// What each of `members` holds once that has not changed for a while: what it held for a peer that died is given back
    /// when that has been noticed, which takes an emulated adapter long.
    pub(crate) async fn settled(&mut self, members: &[usize]) -> Vec<Gauges> {
        let runtime = self.runtime.clone();
        let (limit, quiet) = (patient(crate::harness::STEP), patient(QUIET));
        let began = runtime.now();
        let (mut held, mut since) = (self.gauges_of(members).await, began);
        while runtime.now() - since < quiet {
            let all = || held.iter().map(told).collect::<Vec<_>>().join(";");
            assert!(runtime.now() - began < limit, "members {members:?} do not come to rest:{}", all());
            runtime.sleep(Duration::from_millis(100)).await;
            let now = self.gauges_of(members).await;
            if !now.iter().zip(&held).all(|(now, held)| is_same(now, held)) {
                since = runtime.now();
            }
            held = now;
        }
        held
    }

    async fn gauges_of(&mut self, members: &[usize]) -> Vec<Gauges> {
        let mut all = Vec::new();
        for index in members {
            all.push(self.gauges(*index).await);
        }
        all
    }

    /// What member `index` holds is no more than in `before`, at the latest when a step of a test is over. A gauge may differ
    /// if `may_differ` returns true for its name and both numbers.
    pub(crate) async fn is_back_at(
        &mut self,
        index: usize,
        before: &Gauges,
        may_differ: impl Fn(&str, u64, u64) -> bool,
    ) -> Gauges {
        let runtime = self.runtime.clone();
        let limit = runtime.now() + patient(crate::harness::STEP);
        loop {
            let now = self.gauges(index).await;
            let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
            let value = |gauges: &Gauges, name| gauges.get(name).copied().unwrap_or(0);
            let changes = names.into_iter().map(|name| (name, value(before, name), value(&now, name)));
            let other = changes.filter(|(name, was, is)| was < is && !may_differ(name, *was, *is));
            let other: Vec<String> =
                other.map(|(name, was, is)| format!("{name} was {was} and is {is}")).collect();
            if other.is_empty() {
                return now;
            }
            assert!(
                runtime.now() < limit,
                "member {index}: {}; before:{}; now:{}",
                other.join(", "),
                told(before),
                told(&now)
            );
            runtime.sleep(Duration::from_millis(20)).await;
        }
    }

    /// All end in order.
    pub(crate) async fn end(mut self) {
        self.tell_all("end");
        for index in self.living() {
            step("the end of a member", self.expect(index, "ended")).await;
        }
    }
}

/// Whether a member holds the same. Pages and mappings follow what the allocator does.
fn is_same(now: &Gauges, held: &Gauges) -> bool {
    let is_same =
        |name: &String| name.starts_with("rss") || name == "mappings" || now.get(name) == held.get(name);
    now.keys().chain(held.keys()).all(is_same)
}

fn complain(index: usize, line: &str) {
    assert!(!line.starts_with("BAD"), "member {index}: {line}");
}
