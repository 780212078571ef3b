//! Receives from any rank that race, are dropped and time out: no message is lost or duplicated.

use std::time::Duration;

use futures::future::{Either, join_all, select};
use tensorwire_collective::{Group, GroupError, pair::Message};
use tensorwire_fabric::FabricKind;

use super::{over_fabrics, ranks, tensor, values};

over_fabrics! {
    no_message_is_lost_or_doubled_when_receives_race,
    a_receive_that_is_dropped_as_its_message_arrives_leaves_it,
}

/// Messages of each sender.
const EACH: usize = 300;
const SIZE: usize = 5;

/// Lengths: some travel inside messages, and others are written.
const LENGTHS: [usize; 4] = [1, 40, 3000, 20_000];

/// A pseudo-random number.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    number ^ (number >> 29)
}

/// Receives until all messages have come, with receives that are given up after different times.
async fn receiver(group: &Group, seed: u64, left: &std::cell::Cell<usize>) -> Vec<Message> {
    let mut received = Vec::new();
    let runtime = group.worker().runtime().clone();
    for turn in 0.. {
        if left.get() == 0 {
            break;
        }
        let random = mixed(seed << 32 | turn);
        let limit = Duration::from_micros(random % 400);
        let wanted = group.recv(1..SIZE, 6);
        let message = match random >> 60 {
            // Ended by its own limit, by a drop, or by a message.
            0..5 => wanted.timeout(limit).await,
            5..10 => match select(wanted.into_future(), runtime.sleep(limit)).await {
                Either::Left((received, _)) => received,
                Either::Right(_) => continue,
            },
            _ => wanted.timeout(Duration::from_millis(20)).await,
        };
        match message {
            Ok(message) => {
                left.set(left.get() - 1);
                received.push(message);
            }
            Err(GroupError::TimedOut { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    received
}

async fn no_message_is_lost_or_doubled_when_receives_race(fabric: FabricKind) {
    let ranks = ranks(fabric, SIZE).await;
    let left = std::cell::Cell::new(EACH * (SIZE - 1));
    let sending = ranks.groups[1..].iter().map(async |group| {
        for at in 0..EACH {
            let mut content = vec![0i32; LENGTHS[at % LENGTHS.len()]];
            content[0] = at as i32;
            let sent = group.send(0, 6, tensor(group, &content)).unwrap();
            // Bursts and pauses.
            if mixed(at as u64).is_multiple_of(4) {
                sent.await.unwrap();
            }
        }
    });
    let receiving = (0..4).map(|seed| receiver(&ranks.groups[0], seed, &left));
    let (received, _) = futures::join!(join_all(receiving), join_all(sending));
    for rank in 1..SIZE {
        let of_rank = received.iter().flatten().filter(|message| message.rank == rank);
        let mut of_rank: Vec<i32> = of_rank.map(|message| values(&message.tensor)[0]).collect();
        of_rank.sort_unstable();
        assert!(of_rank == (0..EACH as i32).collect::<Vec<_>>(), "of rank {rank}: {of_rank:?}");
    }
    // Nothing is left behind.
    let nothing = ranks.groups[0].recv(1..SIZE, 6).timeout(Duration::from_millis(50)).await;
    assert!(matches!(nothing, Err(GroupError::TimedOut { .. })), "{nothing:?}");
    drop(received);
    ranks.shutdown().await;
}

async fn a_receive_that_is_dropped_as_its_message_arrives_leaves_it(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let [to, senders @ ..] = &ranks.groups[..] else { unreachable!("three ranks") };
    for round in 0..200 {
        let waiting = to.recv([1, 2], round).into_future();
        // Requested, and dropped while the answers may be in flight.
        let asked = select(waiting, Box::pin(tokio::task::yield_now())).await;
        senders
            .iter()
            .for_each(|group| drop(group.send(0, round, tensor(group, &[group.rank() as i32])).unwrap()));
        for _ in 0..mixed(round) % 5 {
            tokio::task::yield_now().await;
        }
        drop(asked);
        let mut from =
            [to.recv([1, 2], round).await.unwrap().rank, to.recv([1, 2], round).await.unwrap().rank];
        from.sort_unstable();
        assert_eq!(from, [1, 2], "round {round}");
    }
    ranks.shutdown().await;
}
