//! One of the processes: it fetches, views, sends and receives with each of the others at once, without rest, and
//! reports each result that must not be.

mod tour;

use std::{
    cell::{Cell, RefCell},
    future::Future,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, future::join_all, stream};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::Sharing;
use tensorwire_rendezvous::{ClusterSpec, Peer, Tensor, Version, Worker, WorkerError};
use tokio::sync::Notify;

use super::{
    BLOCK, COUNT, JOB, Settings,
    content::{Label, mixed},
    gauges::{gauges, told},
    number,
    tally::{Tally, is_a_loss},
};
use crate::harness::{parents_lines, say};

/// Bytes of the values.
const SMALL: usize = 32 << 10;
const LARGE: usize = 1 << 20;
/// The large ones where the adapter is emulated.
const LARGE_EMULATED: usize = 64 << 10;

/// Values of a step, and how many receives of them are outstanding at once.
const VALUES: u64 = 24;
const OUTSTANDING: usize = 4;

/// How long one look for a peer's next step waits.
const LOOK: Duration = Duration::from_millis(300);

/// Rest after an error, and between two publications.
const PAUSE: Duration = Duration::from_millis(4);

/// What an operation may take beyond its deadline on a machine that is busy.
const SLACK: Duration = Duration::from_secs(5);

/// Finished steps that a worker remembers.
const TOMBSTONES: i64 = 1 << 16;

/// How much a member does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Doing {
    Nothing,
    /// It answers those who receive from it.
    Serving,
    All,
}

/// Loops that do something by themselves: for each peer one that reads and one that receives, and the publisher.
const ACTIVE: usize = 2 * (COUNT - 1) + 1;

/// Loops that answer, one for each peer.
const SERVING: usize = COUNT - 1;

struct Member {
    worker: Worker,
    runtime: Arc<dyn Runtime>,
    settings: Settings,
    doing: Cell<Doing>,
    changed: Notify,
    /// Loops that wait until more is to be done.
    resting: Cell<usize>,
    tallies: RefCell<[Tally; COUNT]>,
    drawn: Cell<u64>,
    /// Peers that nothing happens to: operations with them go right.
    spared: RefCell<Vec<usize>>,
}

/// In the child: lives until it is killed, or until the parent ends it.
pub(crate) async fn member(settings: Settings, runtime: Arc<dyn Runtime>) {
    let cluster = ClusterSpec::new().tasks_at(JOB, settings.addresses());
    let builder = Worker::builder_for_task(cluster, JOB, settings.index as u32).unwrap();
    let worker = settings.apply(builder).start().await.unwrap();
    let member = Member {
        drawn: Cell::new(mixed(worker.incarnation())),
        worker,
        runtime,
        settings,
        doing: Cell::new(Doing::Nothing),
        changed: Notify::new(),
        resting: Cell::new(0),
        tallies: RefCell::default(),
        spared: RefCell::default(),
    };
    if member.settings.is_filled() {
        member.fill_pools();
    }
    if member.settings.is_filled() || number("TENSORWIRE_STORM_SECONDS").is_some() {
        member.fill_table();
    }
    member.publish(0).await;
    say("up");
    tokio::select! {
        biased;
        () = member.obey() => {}
        () = member.work() => {}
    }
    member.worker.shutdown().await;
    say("ended");
}

/// Values of one step, as they come: those of each life of their sender in order and each once. A sender that comes back
/// while nothing is asked of it begins the step anew.
#[derive(Debug, Clone, Default)]
struct Order {
    /// Lives that have sent, the present one last, and where its values begin.
    lives: Vec<(u64, u64)>,
    last: Option<u64>,
}

impl Order {
    /// Whether `label` may come now. What a receive that `failed` did not take is for a later one.
    fn takes(&mut self, label: Label, step: u64, position: u64, failed: bool) -> bool {
        let is_present = self.lives.last().is_some_and(|(life, _)| *life == label.life);
        if !is_present {
            if self.lives.iter().any(|(life, _)| *life == label.life) {
                return false;
            }
            self.lives.push((label.life, position));
            self.last = None;
        }
        let number = label.number.wrapping_sub(step);
        let begun = self.lives.last().map_or(0, |(_, begun)| *begun);
        let expected = position - begun;
        let is_next = self.last < Some(number) && (number == expected || failed && number <= position);
        self.last = Some(number);
        is_next
    }
}

/// The numbers in `line`.
fn numbers(line: &str) -> Vec<usize> {
    line.split(' ').filter_map(|word| word.parse().ok()).collect()
}

impl Member {
    async fn work(&self) {
        let peers: Vec<usize> = (0..COUNT).filter(|peer| *peer != self.settings.index).collect();
        let reads = join_all(peers.iter().map(|peer| self.read(*peer)));
        let receives = join_all(peers.iter().map(|peer| self.receive(*peer)));
        let serves = join_all(peers.iter().map(|peer| self.serve(*peer)));
        futures::join!(self.republish(), reads, receives, serves);
    }

    /// The parent's lines.
    async fn obey(&self) {
        let mut lines = parents_lines();
        while let Some(line) = lines.recv().await {
            match line.as_str() {
                "go" => self.set(Doing::All),
                "rest" => {
                    self.set(Doing::Serving);
                    self.rested(ACTIVE).await;
                    say("rests");
                }
                "still" => {
                    self.set(Doing::Nothing);
                    self.rested(ACTIVE + SERVING).await;
                    say("is still");
                }
                "gauges" => say(&format!("gauges{}", told(&gauges(&self.worker)))),
                "tally" => {
                    let tallies = self.tallies.borrow().map(|tally| tally.told()).join(" ");
                    say(&format!("tally {tallies}"));
                }
                "publish parts" => say(&format!("parts {}", self.publish_parts())),
                "end" => return,
                line if line.starts_with("read parts ") => {
                    let [peer, parts] = numbers(line).try_into().unwrap();
                    self.read_parts(peer, parts).await;
                    say("has read");
                }
                line if line.starts_with("withdraw parts ") => {
                    let [parts] = numbers(line).try_into().unwrap();
                    self.withdraw_parts(parts);
                    say("has withdrawn");
                }
                line => self.spared.replace(numbers(line)).clear(),
            }
        }
        // The parent is gone, so no status is of use.
        std::process::exit(0);
    }

    fn set(&self, doing: Doing) {
        self.doing.set(doing);
        self.changed.notify_waiters();
    }

    /// Waits until so much is to be done.
    async fn may(&self, doing: Doing) {
        while self.doing.get() < doing {
            let changed = self.changed.notified();
            self.resting.set(self.resting.get() + 1);
            changed.await;
            self.resting.set(self.resting.get() - 1);
        }
    }

    async fn rested(&self, loops: usize) {
        while self.resting.get() < loops {
            self.runtime.sleep(Duration::from_millis(1)).await;
        }
    }

    fn draw(&self, below: u64) -> u64 {
        self.drawn.set(mixed(self.drawn.get()));
        self.drawn.get() % below
    }

    fn peer(&self, peer: usize) -> Peer {
        self.worker.peer(&ClusterSpec::worker_name(JOB, peer as u32)).unwrap()
    }

    fn device(peer: usize) -> String {
        format!("{}/device:CPU:0", ClusterSpec::worker_name(JOB, peer as u32))
    }

    fn count(&self, peer: usize, what: impl FnOnce(&mut Tally)) {
        what(&mut self.tallies.borrow_mut()[peer]);
    }

    /// One operation with `peer`: what it gave, if it went right.
    async fn operate<T>(
        &self,
        (peer, what): (usize, &str),
        limit: Duration,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Option<T> {
        self.count(peer, |tally| tally.begun += 1);
        let began = self.runtime.now();
        let ended = operation.await;
        let took = self.runtime.now() - began;
        if took > limit + SLACK {
            say(&format!("BAD {what} of {peer} took {took:?}, and {limit:?} was its limit"));
        }
        self.count(peer, |tally| tally.ended += 1);
        match ended {
            Ok(value) => {
                self.count(peer, |tally| tally.right += 1);
                Some(value)
            }
            Err(error) => {
                self.count(peer, |tally| tally.failed += 1);
                if !is_a_loss(&error) {
                    say(&format!("BAD {what} of {peer} ended after {took:?} with: {error}"));
                } else if self.spared.borrow().contains(&peer) {
                    say(&format!("BAD {what} of {peer}, which lives, ended with: {error}"));
                }
                self.runtime.sleep(PAUSE).await;
                None
            }
        }
    }

    fn large(&self) -> usize {
        if self.settings.is_emulated() { LARGE_EMULATED } else { LARGE }
    }

    /// Takes what pools may take at most.
    fn fill_pools(&self) {
        for pool in [self.worker.pool(), self.worker.receive_pool()] {
            let mut all = Vec::new();
            while let Ok(block) = pool.try_alloc(BLOCK) {
                all.push(block);
            }
        }
    }

    /// Takes what the table of finished steps may take at most: it fills up in a minute of full load.
    fn fill_table(&self) {
        (0..TOMBSTONES).for_each(|step| self.worker.cleanup(-1 - step));
    }

    /// Replaces the value under each name.
    async fn publish(&self, number: u64) {
        let label = Label { owner: self.settings.index as u64, life: self.worker.incarnation(), number };
        for (name, bytes) in [("small", SMALL), ("large", self.large())] {
            self.worker.publish(name, label.value(&self.worker, bytes).await).unwrap();
        }
    }

    async fn republish(&self) {
        for number in 1.. {
            self.may(Doing::All).await;
            self.publish(number).await;
            self.runtime.sleep(PAUSE).await;
        }
    }

    /// Fetches and views what `peer` publishes.
    async fn read(&self, peer: usize) {
        let handle = self.peer(peer);
        let mut latest = [(0, 0), (0, 0)];
        loop {
            self.may(Doing::All).await;
            let (which, sharing) = match self.draw(8) {
                0 => (1, Sharing::View),
                1 => (1, Sharing::Copy),
                _ => (0, Sharing::Copy),
            };
            let name = ["small", "large"][which];
            let fetch = handle.fetch(name).sharing(sharing).versioned().into_future();
            let Some(got) = self.operate((peer, "fetch"), self.settings.limit(), fetch).await else {
                continue;
            };
            self.check(peer, name, &got.tensor, got.version, &mut latest[which]);
            if sharing == Sharing::View {
                // The lease outlives whatever its owner does meanwhile, even the owner's death.
                self.runtime.sleep(Duration::from_millis(self.draw(12))).await;
                self.check(peer, "view", &got.tensor, got.version, &mut latest[which]);
            }
        }
    }

    /// Whole, of the owner and the life that it should be of, and not older than what came before.
    fn check(&self, peer: usize, name: &str, tensor: &Tensor, version: Version, latest: &mut (u64, u64)) {
        let label = Label::of(tensor.bytes());
        let expected = label.is_some_and(|label| {
            label.owner == peer as u64
                && label.life == version.incarnation()
                && (label.life != latest.0 || label.number >= latest.1)
        });
        match label {
            Some(label) if expected => *latest = (label.life, label.number),
            _ => say(&format!("BAD bytes of `{name}` of {peer}: {label:?} as {version:?} after {latest:?}")),
        }
    }

    /// Names steps to `peer`, one after the other, and receives what it sends in them.
    async fn receive(&self, peer: usize) {
        let name = format!("ask {peer}");
        loop {
            self.may(Doing::All).await;
            let step = self.draw(1 << 62);
            let ask = Tensor::from_values(self.worker.pool(), &[1], &[step]).unwrap();
            self.worker.publish(&name, ask).unwrap();
            self.receive_all(peer, step).await;
            self.worker.cleanup(step as i64);
        }
    }

    async fn receive_all(&self, peer: usize, step: u64) {
        let at_step = self.worker.shared_step(step as i64);
        let key = self.worker.key(&Self::device(peer), &Self::device(self.settings.index), "value").unwrap();
        let lost = Cell::new(false);
        let one = async |_| {
            if lost.get() {
                return None;
            }
            let received = self
                .operate((peer, "receive"), self.settings.limit(), at_step.recv(&key).into_future())
                .await;
            lost.set(received.is_none());
            received
        };
        // Those that are outstanding when one fails are waited for too.
        let mut values = stream::iter(0..VALUES).map(one).buffered(OUTSTANDING).enumerate();
        let (mut order, mut failed) = (Order::default(), false);
        while let Some((position, value)) = values.next().await {
            let Some(value) = value else {
                failed = true;
                continue;
            };
            let label = Label::of(value.bytes()).filter(|label| label.owner == peer as u64);
            let before = order.clone();
            if !label.is_some_and(|label| order.takes(label, step, position as u64, failed)) {
                say(&format!(
                    "BAD value at {position} of step {step} from {peer}: {label:?} after {before:?}, one before \
                     failed: {failed}"
                ));
            }
        }
    }

    /// Sends in the steps that `peer` names.
    async fn serve(&self, peer: usize) {
        let (handle, name) = (self.peer(peer), format!("ask {}", self.settings.index));
        let mut former: Option<(Version, i64)> = None;
        loop {
            self.may(Doing::Serving).await;
            let fetch = handle.fetch(&name).timeout(LOOK);
            let fetch = match former {
                Some((version, _)) => fetch.newer_than(version),
                None => fetch.wait(),
            };
            let looked = async {
                match fetch.versioned().await {
                    Err(WorkerError::DeadlineExceeded { .. }) => Ok(None),
                    ended => ended.map(Some),
                }
            };
            let Some(ended) = self.operate((peer, "look"), LOOK, looked).await else {
                former.take().into_iter().for_each(|(_, step)| self.worker.cleanup(step));
                continue;
            };
            let Some(ask) = ended else { continue };
            let step = ask.tensor.values::<u64>().unwrap()[0];
            // The peer has done with the step before.
            former
                .replace((ask.version, step as i64))
                .into_iter()
                .for_each(|(_, step)| self.worker.cleanup(step));
            self.send_all(peer, step).await;
        }
    }

    async fn send_all(&self, peer: usize, step: u64) {
        let at_step = self.worker.shared_step(step as i64);
        let key = self.worker.key(&Self::device(self.settings.index), &Self::device(peer), "value").unwrap();
        for number in 0..VALUES {
            let label = Label {
                owner: self.settings.index as u64,
                life: self.worker.incarnation(),
                number: step.wrapping_add(number),
            };
            let bytes = if number == VALUES / 2 { self.large() } else { 2048 << (number % 5) };
            let value = label.value(&self.worker, bytes).await;
            if at_step.send(&key, value).is_err() {
                return;
            }
        }
    }
}
