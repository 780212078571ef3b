//! A tensor that is published as fast as its subscribers allow: one wants every version, another is slow and wants the newest. The
//! publisher and the slow subscriber are killed again and again, and a third subscriber is stopped.
//!
//! `TENSORWIRE_SUBSCRIBED=1000000` takes as many versions.

use std::time::Duration;

use rustix::process::Signal;
use tensorwire_protocol::{DataType, Sharing};
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    subscriptions::{Policy, Subscription, Update},
};

use crate::harness::{Other, PARENT, bounded, builder, kind, memory_returns, parents_lines, role, say};

const CHILD: &str = "/job:child/replica:0/task:0";
const NAME: &str = "x";
/// Versions that are taken, and how often a process is killed meanwhile.
const TAKEN: u64 = 10_000;
const KILLS: u64 = 8;
/// Inside a message, in a buffer, in larger ones, in pieces.
const LENGTHS: [usize; 8] = [9, 100, 4096, 4097, 10_000, 30_000, 9, 9];
const LONG: usize = 700_000;

fn length_of(number: u64) -> usize {
    if number.is_multiple_of(97) { LONG } else { LENGTHS[number as usize % LENGTHS.len()] }
}

/// A version of which each byte says which it is.
async fn version(worker: &Worker, number: u64) -> Tensor {
    let mut buffer = worker.pool().alloc(length_of(number)).await.unwrap();
    buffer.fill(number as u8);
    buffer[..8].copy_from_slice(&number.to_le_bytes());
    Tensor::new(buffer, DataType::U8, &[length_of(number) as u64]).unwrap()
}

/// Checks that the value is that of its version, and returns its number.
fn check(update: &Update) -> u64 {
    let (number, bytes) = (update.version.unwrap().number(), update.tensor.bytes());
    assert_eq!(bytes.len(), length_of(number), "version {number}");
    assert_eq!(bytes[..8], number.to_le_bytes());
    assert!(bytes[8..].iter().all(|byte| *byte == number as u8), "version {number} is torn");
    number
}

/// Publishes versions until it is killed.
async fn publisher(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).bind(&words[2]).start().await.unwrap();
    say(worker.address());
    for number in 1.. {
        let published = worker.publish_in_turn(NAME, version(&worker, number).await).await.unwrap();
        assert_eq!(published.number(), number);
        tokio::task::yield_now().await;
    }
}

/// Takes the newest versions, slowly, until its parent ends it. They go up in each life of the publisher.
async fn slow(words: Vec<String>) {
    let worker = builder(&format!("/job:child/replica:0/task:{}", words[3]), kind(&words[1]));
    let worker = worker.start().await.unwrap();
    let peer = worker.set_address(CHILD, &words[2]).unwrap();
    let mut subscription = peer.subscribe(NAME).sharing(Sharing::View);
    let (mut lines, mut last) = (parents_lines(), None);
    say("subscribes");
    loop {
        tokio::select! {
            _ = lines.recv() => return,
            next = subscription.next() => {
                let update = next.unwrap().unwrap();
                let place = (update.version.unwrap().incarnation(), check(&update));
                assert!(last.is_none_or(|(life, number)| life != place.0 || number < place.1));
                last = Some(place);
                worker.runtime().sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

/// What the subscriber to every version has.
#[derive(Default)]
struct Got {
    /// Incarnation and number.
    last: Option<(u64, u64)>,
    /// Both ends of a gap that was reported.
    reported: Option<(u64, u64)>,
}

impl Got {
    /// Takes `count` versions. Each is the one after the other, unless a gap was reported, which only the loss of the publisher explains.
    async fn take(&mut self, subscription: &mut Subscription, count: u64) {
        for _ in 0..count {
            let update = loop {
                match subscription.next().await.unwrap() {
                    Ok(update) => break update,
                    Err(WorkerError::Superseded { held, newest, .. }) => self.reported = Some((held, newest)),
                    Err(error) => panic!("{error}"),
                }
            };
            let (number, life) = (check(&update), update.version.unwrap().incarnation());
            let before = match self.last {
                Some((same, before)) if same == life => before,
                Some(_) => 0,
                None => number - 1,
            };
            let gap = (number > before + 1).then_some((before, number));
            assert_eq!((self.reported.take(), update.dropped), (gap, number - before - 1));
            assert!(gap.is_none() || before == 0, "{number} after {before} in one life of the publisher");
            self.last = Some((life, number));
        }
    }
}

fn killed_while_subscribed(test: &'static str, fabric: &'static str) {
    let taken = std::env::var("TENSORWIRE_SUBSCRIBED").map_or(TAKEN, |count| count.parse().unwrap());
    let limit = Duration::from_secs(110 + taken / 1000);
    if let Some(words) = role() {
        return bounded(limit + Duration::from_secs(10), |_| async {
            match &*words[0] {
                "publisher" => publisher(words).await,
                _ => slow(words).await,
            }
        });
    }
    bounded(limit, |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        let mut life = Other::start(test, &format!("publisher {fabric} 127.0.0.1:0"));
        let address = life.hear().await;
        let peer = worker.peer_at(&address).await.unwrap();
        let mut every = peer.subscribe(NAME).policy(Policy::Every).ahead(4);
        let start = async |task: u64| {
            let mut other = Other::start(test, &format!("slow {fabric} {address} {task}"));
            assert_eq!(other.hear().await, "subscribes");
            other
        };
        let (mut slow, mut stopped, mut got) = (start(1).await, start(2).await, Got::default());
        for kill in 0..KILLS {
            got.take(&mut every, taken / KILLS).await;
            if kill == KILLS / 2 {
                // It holds nobody up.
                stopped.signal(Signal::STOP);
            }
            runtime.sleep(Duration::from_micros(kill * 1733 % 7000)).await;
            if kill % 2 == 0 {
                slow.kill();
                slow = start(3 + kill).await;
            } else {
                life.kill();
                life = Other::start(test, &format!("publisher {fabric} {address}"));
                assert_eq!(life.hear().await, address);
            }
        }
        got.take(&mut every, 10).await;
        stopped.signal(Signal::CONT);
        stopped.tell("end");
        slow.tell("end");
        drop(every);
        worker.shutdown().await;
        memory_returns(&worker).await;
    });
}

#[test]
fn d_every_version_comes_while_processes_are_killed_over_tcp() {
    killed_while_subscribed(
        "subscriptions::d_every_version_comes_while_processes_are_killed_over_tcp",
        "tcp",
    );
}

#[test]
fn d_every_version_comes_while_processes_are_killed_over_shm() {
    killed_while_subscribed(
        "subscriptions::d_every_version_comes_while_processes_are_killed_over_shm",
        "shm",
    );
}
