//! Subscriptions over shm and tcp, between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use futures::{FutureExt as _, join};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Code, Counters, DataType, Mode, Sharing, Validation};
use tensorwire_rendezvous::{
    Tensor, Trust, Worker, WorkerBuilder, WorkerError,
    subscriptions::{Policy, Subscription, Update},
};

use crate::{
    fabrics::{assert_moves_over, kinds, over_verbs},
    sets::{USUAL, on, run},
    two::Two,
};

const NAME: &str = "frame";

/// In a message, in one piece, in several.
const LENGTHS: [usize; 7] = [0, 1, 4000, 5000, 100_000, 300_000, 700_000];

/// A value of which every byte says which it is.
async fn numbered(worker: &Worker, number: u64) -> Tensor {
    let length = LENGTHS[number as usize % LENGTHS.len()];
    let mut buffer = worker.pool().alloc(length.max(1)).await.unwrap();
    buffer.fill(number as u8);
    Tensor::new(buffer, DataType::U8, &[length.max(1) as u64]).unwrap()
}

fn is_numbered(tensor: &Tensor, number: u64) -> bool {
    let length = LENGTHS[number as usize % LENGTHS.len()].max(1);
    tensor.bytes().len() == length && tensor.bytes().iter().all(|byte| *byte == number as u8)
}

async fn next(subscription: &mut Subscription) -> Update {
    subscription.next().await.unwrap().unwrap()
}

/// What both sides of the client's connection have sent and received.
fn counters(worker: &Worker) -> Counters {
    worker.peers().first().unwrap().counters
}

/// Receives `count` versions of which each is the one after the other, published in turn.
async fn every(two: &Two, count: u64, options: impl Fn(Subscription) -> Subscription) {
    let mut subscription = options(two.peer.subscribe(NAME)).policy(Policy::Every);
    let publish = async {
        for number in 1..=count {
            let version =
                two.server.publish_in_turn(NAME, numbered(&two.server, number).await).await.unwrap();
            assert_eq!(version.number(), number);
        }
    };
    let subscribe = async {
        let mut last = 0;
        while last < count {
            let update = next(&mut subscription).await;
            let number = update.version.unwrap().number();
            // Those before the subscription had come to the publisher were nobody's.
            assert!(number == last + 1 || last == 0, "{number} after {last}");
            assert!(update.dropped == 0 && is_numbered(&update.tensor, number), "{number}");
            last = number;
        }
    };
    join!(publish, subscribe);
}

async fn all_ways(
    count: u64,
    configure: impl Fn(WorkerBuilder) -> WorkerBuilder,
    usual: &'static [FabricKind],
) {
    for &kind in kinds(usual) {
        for ahead in [1, 2, 8] {
            for sharing in [Sharing::Copy, Sharing::View] {
                let two = Two::of(|name| configure(on(kind, name))).await;
                every(&two, count, |subscription| subscription.ahead(ahead).sharing(sharing)).await;
                assert_moves_over(&two.client, kind);
                two.end().await;
            }
        }
    }
}

#[test]
fn every_version_comes_once_and_in_order() {
    run(all_ways(60, |builder| builder, USUAL));
}

#[test]
fn every_version_comes_in_mode_original() {
    run(all_ways(30, |builder| builder.flow(|flow| flow.mode = Mode::Original), USUAL));
}

#[test]
fn every_version_comes_validated() {
    run(all_ways(30, |builder| builder.validation(Validation::Xxh3), USUAL));
}

#[test]
fn every_version_comes_to_a_worker_that_does_not_trust_its_peer() {
    run(all_ways(30, |builder| builder.trust(Trust::Hostile), &[FabricKind::TCP]));
}

/// The sender writes each value by one write and one message, and the receiver returns several by one message.
#[test]
fn a_value_costs_one_write_and_one_message() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let mut subscription = two.peer.subscribe(NAME).policy(Policy::Every).ahead(8);
            let publish = async |number: u8| {
                let tensor = Tensor::from_values(two.server.pool(), &[10_000], &[number; 10_000]).unwrap();
                two.server.publish_in_turn(NAME, tensor).await.unwrap()
            };
            publish(0).await;
            next(&mut subscription).await;
            let before = counters(&two.client);
            let publish_all = async {
                for number in 1..=64 {
                    publish(number).await;
                }
            };
            let subscribe = async { while next(&mut subscription).await.version.unwrap().number() <= 64 {} };
            join!(publish_all, subscribe);
            let after = counters(&two.client);
            let written = after.received.tensor_write - before.received.tensor_write;
            assert_eq!(after.contents_received - before.contents_received, written, "{kind}");
            assert_eq!(after.sent.tensor_request, 1, "{kind}");
            assert_eq!(after.received.buffer_request, 1, "{kind}");
            assert!(after.sent.buffer_idle <= written / 4 + 2, "{kind}: {after}");
            two.end().await;
        }
    });
}

#[test]
fn the_latest_policy_leaves_out_what_is_replaced() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let mut subscription = two.peer.subscribe(NAME).ahead(1);
            two.server.publish(NAME, numbered(&two.server, 1).await).unwrap();
            assert!(is_numbered(&next(&mut subscription).await.tensor, 1), "{kind}");
            let mut newest = 1;
            for number in 2..=200 {
                let published = two.server.publish(NAME, numbered(&two.server, number).await).unwrap();
                newest = published.number();
            }
            let (mut last, mut seen, mut dropped) = (1, 1, 0);
            while last < newest {
                let update = next(&mut subscription).await;
                let number = update.version.unwrap().number();
                assert!(number > last && is_numbered(&update.tensor, number), "{kind}: {number}");
                assert_eq!(update.dropped, number - last - 1, "{kind}");
                (last, seen, dropped) = (number, seen + 1, dropped + update.dropped);
            }
            assert_eq!(seen + dropped, newest);
            assert!(seen <= 4, "{kind}: a version that was replaced long ago came");
            two.end().await;
        }
    });
}

/// As many values as may be sent ahead, and the one that is published.
#[test]
fn a_slow_subscriber_slows_its_publisher_down() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let mut slow = two.peer.subscribe(NAME).policy(Policy::Every).ahead(2);
            let mut fast = two.peer.subscribe(NAME);
            two.server.publish_in_turn(NAME, numbered(&two.server, 1).await).await.unwrap();
            join!(next(&mut slow), next(&mut fast));
            let mut published = 1;
            let mut publish = Box::pin(async {
                for number in 2..=100 {
                    two.server.publish_in_turn(NAME, numbered(&two.server, number).await).await.unwrap();
                    published = number;
                }
            });
            let mut latest = 0;
            while latest < 4 {
                tokio::select! {
                    () = &mut publish => panic!("{kind}: nothing held it up"),
                    update = next(&mut fast) => latest = update.version.unwrap().number(),
                }
            }
            drop(publish);
            assert_eq!(published, 4, "{kind}");
            for number in 2..=4 {
                assert_eq!(next(&mut slow).await.version.unwrap().number(), number, "{kind}");
            }
            drop(slow);
            for number in 5..20 {
                two.server.publish_in_turn(NAME, numbered(&two.server, number).await).await.unwrap();
            }
            two.end().await;
        }
    });
}

#[test]
fn a_version_that_is_published_out_of_turn_is_reported_missing() {
    run(async {
        let two = Two::of(|name| on(FabricKind::TCP, name)).await;
        let mut subscription = two.peer.subscribe(NAME).policy(Policy::Every).ahead(1);
        for number in 1..=2 {
            two.server.publish(NAME, numbered(&two.server, number).await).unwrap();
            assert_eq!(next(&mut subscription).await.version.unwrap().number(), number);
        }
        for number in 3..=9 {
            two.server.publish(NAME, numbered(&two.server, number).await).unwrap();
        }
        // Whether the first of these was on its way already depends on the timing.
        let mut last = 2;
        loop {
            match subscription.next().await.unwrap() {
                Ok(update) => last = update.version.unwrap().number(),
                Err(WorkerError::Superseded { held, newest, .. }) => {
                    assert_eq!((held, newest), (last, 9));
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let update = next(&mut subscription).await;
        assert_eq!((update.version.unwrap().number(), update.dropped), (9, 9 - last - 1));
        two.end().await;
    });
}

#[test]
fn a_subscription_waits_for_the_first_version_and_while_there_is_none() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let mut subscription = two.peer.subscribe(NAME);
            assert!(subscription.next().now_or_never().is_none());
            two.server.publish(NAME, numbered(&two.server, 5).await).unwrap();
            assert!(is_numbered(&next(&mut subscription).await.tensor, 5), "{kind}");
            assert!(two.server.withdraw(NAME));
            two.server.publish(NAME, numbered(&two.server, 6).await).unwrap();
            assert!(is_numbered(&next(&mut subscription).await.tensor, 6), "{kind}");
            two.end().await;
        }
    });
}

#[test]
fn a_worker_subscribes_to_its_own_values() {
    run(async {
        let worker = on(FabricKind::SHM, "alone").start().await.unwrap();
        let peer = worker.peer("alone").unwrap();
        let mut subscription = peer.subscribe(NAME).policy(Policy::Every);
        let publish = async {
            for number in 1..=20 {
                worker.publish_in_turn(NAME, numbered(&worker, number).await).await.unwrap();
            }
        };
        let subscribe = async {
            let mut last = 0;
            while last < 20 {
                let update = next(&mut subscription).await;
                last = update.version.unwrap().number();
                assert!(is_numbered(&update.tensor, last));
            }
        };
        join!(publish, subscribe);
        let step = worker.step(1);
        let mut values = step.from(&peer).subscribe("loss").policy(Policy::Every);
        for number in 0..9 {
            step.to(&peer).send("loss", numbered(&worker, number).await).unwrap();
        }
        for number in 0..9 {
            assert!(is_numbered(&next(&mut values).await.tensor, number));
        }
        for number in 9..12 {
            step.to(&peer).send("loss", numbered(&worker, number).await).unwrap();
        }
        let mut latest = step.from(&peer).subscribe("loss");
        assert!(is_numbered(&next(&mut latest).await.tensor, 11));
        worker.shutdown().await;
    });
}

#[test]
fn values_of_a_step_come_in_order_until_it_ends() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let back = two.server.wait_for_peer("client").await.unwrap();
            let (there, here) = (two.server.step(7), two.client.step(7));
            let mut values = here.from(&two.peer).subscribe("loss").policy(Policy::Every);
            for number in 0..50 {
                there.to(&back).send("loss", numbered(&two.server, number).await).unwrap();
            }
            for number in 0..20 {
                let update = next(&mut values).await;
                assert!(update.version.is_none() && is_numbered(&update.tensor, number), "{kind}: {number}");
            }
            drop(values);
            // The values that were sent ahead, and then those that were not.
            for number in 20..30 {
                let received = here.from(&two.peer).recv("loss").await.unwrap();
                assert!(is_numbered(&received, number), "{kind}: {number}");
            }
            let mut values = here.from(&two.peer).subscribe("loss");
            let update = next(&mut values).await;
            assert!(is_numbered(&update.tensor, 49) && update.dropped == 0, "{kind}");
            drop(there);
            let ended = values.next().await.unwrap().unwrap_err();
            assert!(
                matches!(&ended, WorkerError::Remote { status, .. } if status.code == Code::Aborted),
                "{kind}: {ended}"
            );
            assert!(values.next().await.is_none());
            two.end().await;
        }
    });
}

#[test]
fn bad_options_name_the_field_and_the_remedy() {
    run(async {
        let two = Two::of(|name| on(FabricKind::SHM, name)).await;
        for (mut subscription, problem) in [
            (two.peer.subscribe(NAME).ahead(0), "ahead"),
            (two.peer.subscribe(NAME).ahead(65), "1 to 64"),
            (two.peer.subscribe(""), "published name"),
        ] {
            let error = subscription.next().await.unwrap().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
            assert!(subscription.next().await.is_none());
        }
        two.end().await;
    });
}

#[test]
fn a_subscription_goes_on_with_a_publisher_that_was_restarted() {
    run(async {
        for &kind in kinds(USUAL) {
            let server = on(kind, "server").start().await.unwrap();
            let client = on(kind, "client").start().await.unwrap();
            let peer = client.peer_at(server.address()).await.unwrap();
            let mut subscription = peer.subscribe(NAME);
            for number in 1..=3 {
                server.publish(NAME, numbered(&server, number).await).unwrap();
                assert!(is_numbered(&next(&mut subscription).await.tensor, number));
            }
            let address = server.address().to_owned();
            server.shutdown().await;
            let again = async {
                let server = on(kind, "server").bind(&address).start().await.unwrap();
                server.publish(NAME, numbered(&server, 9).await).unwrap();
                server
            };
            let (server, update) = join!(again, next(&mut subscription));
            assert!(is_numbered(&update.tensor, 9), "{kind}");
            assert_eq!(update.version.unwrap().incarnation(), server.incarnation());
            client.shutdown().await;
            server.shutdown().await;
        }
    });
}

/// The pool has room for one buffer beside the value that the subscriber has.
#[test]
fn a_subscription_makes_progress_with_little_memory() {
    run(async {
        let two = Two::of(|name| {
            on(FabricKind::TCP, name).memory(|memory| {
                memory.block_bytes = 1 << 20;
                memory.receive_bytes = 2 << 20;
            })
        })
        .await;
        let mut subscription = two.peer.subscribe(NAME).policy(Policy::Every).ahead(8);
        let publish = async {
            for number in 1..=20u8 {
                let tensor = Tensor::from_values(two.server.pool(), &[900_000], &[number; 900_000]).unwrap();
                two.server.publish_in_turn(NAME, tensor).await.unwrap();
            }
        };
        let subscribe = async {
            let mut last = 0;
            while last < 20 {
                let update = next(&mut subscription).await;
                last = update.version.unwrap().number();
                assert!(update.tensor.bytes().iter().all(|byte| u64::from(*byte) == last));
            }
        };
        join!(publish, subscribe);
        let tensor = Tensor::from_values(two.server.pool(), &[3 << 20], &vec![1u8; 3 << 20]).unwrap();
        two.server.publish_in_turn(NAME, tensor).await.unwrap();
        let error = subscription.next().await.unwrap().unwrap_err();
        assert!(matches!(error, WorkerError::Local { .. }), "{error}");
        two.server.publish(NAME, numbered(&two.server, 1).await).unwrap();
        let missing = subscription.next().await.unwrap().unwrap_err();
        assert!(matches!(missing, WorkerError::Superseded { held: 20, newest: 22, .. }), "{missing}");
        assert!(is_numbered(&next(&mut subscription).await.tensor, 1));
        two.end().await;
    });
}

#[test]
fn a_dropped_subscription_leaves_nothing_behind() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            two.server.publish(NAME, numbered(&two.server, 4).await).unwrap();
            for _ in 0..300 {
                let mut subscription = two.peer.subscribe(NAME).ahead(4);
                next(&mut subscription).await;
            }
            // The last one's end is acknowledged before this is answered.
            two.peer.fetch(NAME).await.unwrap();
            assert_eq!(two.client.receive_memory().used_bytes, 0, "{kind}");
            two.server.publish_in_turn(NAME, numbered(&two.server, 5).await).await.unwrap();
            two.end().await;
        }
    });
}

over_verbs! {
    a_slow_subscriber_slows_its_publisher_down
    a_value_costs_one_write_and_one_message
    every_version_comes_once_and_in_order
    every_version_comes_validated
    values_of_a_step_come_in_order_until_it_ends
}
