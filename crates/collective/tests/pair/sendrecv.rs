//! Tagged messages.

use std::future::IntoFuture as _;

use futures::future::try_join_all;
use tensorwire_collective::{GroupError, pair::Message};
use tensorwire_fabric::{FabricKind, timeout};

use super::{
    SHORT, all_received, element, over_fabrics, over_verbs, possible, ranks, ranks_within, tensor, values,
};
use crate::group::{PATIENCE, Ranks};
use crate::join_all::join_all;

over_fabrics! {
    all_to_all,
    all_to_all_offset,
    all_to_all_empty,
    empty_then_non_empty,
    recv_from_any,
    recv_from_any_offset,
    recv_from_any_pipeline,
    recv_from_any_rpc,
    recv_from_any_rpc_empty_then_non_empty,
    tags_do_not_mix_and_each_keeps_its_order,
    a_flood_of_one_rank_does_not_starve_the_others,
    messages_that_are_there_do_not_starve_those_of_later_ranks,
    bad_arguments_are_named,
    a_message_of_another_type_is_refused_and_dropped,
    a_timeout_ends_one_wait_alone,
    a_receive_fails_with_the_loss_of_its_rank_alone,
    the_end_of_the_group_ends_all_that_waits,
    what_was_received_outlives_group_and_worker,
    a_rank_sends_to_itself,
}

over_verbs! {
    all_to_all,
    recv_from_any,
    a_receive_fails_with_the_loss_of_its_rank_alone,
}

async fn all_to_all(fabric: FabricKind) {
    for size in possible(fabric, 2..=8) {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                let (own, others) = (group.rank(), (0..size).filter(|rank| *rank != group.rank()));
                let sent: Vec<_> = others
                    .clone()
                    .map(|to| group.send(to, 5, tensor(&group, &[element(own, to, 0), element(own, to, 1)])))
                    .collect();
                for from in others {
                    let Message { rank, tensor, .. } = group.recv(from, 5).await.unwrap();
                    assert_eq!(
                        (rank, values(&tensor)),
                        (from, vec![element(from, own, 0), element(from, own, 1)])
                    );
                }
                all_received(sent.into_iter().map(Result::unwrap).collect()).await;
            })
            .await;
        ranks.shutdown().await;
    }
}

/// All ranks send parts of one tensor, and receive into parts of one buffer.
async fn all_to_all_offset(fabric: FabricKind) {
    const PART: usize = 3000;
    for size in 2..=8 {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                let own = group.rank();
                let all: Vec<i32> = (0..size * PART).map(|at| element(own, at / PART, at % PART)).collect();
                let all = tensor(&group, &all);
                let sent = (0..size).map(|to| {
                    let part = all.buf().slice(4 * to * PART..4 * (to + 1) * PART).unwrap();
                    let part =
                        tensorwire_rendezvous::Tensor::shared(part, all.dtype(), &[PART as u64]).unwrap();
                    group.send(to, 9, part).unwrap()
                });
                let sent: Vec<_> = sent.collect();
                let mut into = vec![0i32; size * PART];
                let received = into.chunks_mut(PART).enumerate();
                let received = received.map(|(from, part)| group.recv_into(from, 9, part).into_future());
                let from = try_join_all(received).await.unwrap();
                assert_eq!(from, (0..size).collect::<Vec<_>>());
                let expected: Vec<i32> =
                    (0..size * PART).map(|at| element(at / PART, own, at % PART)).collect();
                assert!(into == expected, "rank {own} of {size}");
                all_received(sent).await;
            })
            .await;
        ranks.shutdown().await;
    }
}

async fn all_to_all_empty(fabric: FabricKind) {
    for size in [2, 5, 8] {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                let sent: Vec<_> =
                    (0..size).map(|to| group.send(to, 1, tensor(&group, &[])).unwrap()).collect();
                for from in 0..size {
                    assert!(group.recv(from, 1).await.unwrap().tensor.bytes().is_empty());
                }
                all_received(sent).await;
            })
            .await;
        ranks.shutdown().await;
    }
}

async fn empty_then_non_empty(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    ranks
        .each(async |group| {
            if group.rank() == 0 {
                let empty = group.send(1, 4, tensor(&group, &[])).unwrap();
                let full = group.send(1, 4, tensor(&group, &[7, 8])).unwrap();
                empty.await.unwrap();
                full.await.unwrap();
            } else {
                let mut into = [5i32; 2];
                group.recv_into(0, 4, &mut into[..0]).await.unwrap();
                assert_eq!(into, [5, 5]);
                group.recv_into(0, 4, &mut into).await.unwrap();
                assert_eq!(into, [7, 8]);
            }
        })
        .await;
    ranks.shutdown().await;
}

async fn recv_from_any(fabric: FabricKind) {
    for size in possible(fabric, 2..=8) {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                if group.rank() != 0 {
                    return group.send(0, 3, tensor(&group, &[group.rank() as i32])).unwrap().await.unwrap();
                }
                let mut from = Vec::new();
                for _ in 1..size {
                    let message = group.recv(.., 3).await.unwrap();
                    assert_eq!(values(&message.tensor), [message.rank as i32]);
                    from.push(message.rank);
                }
                from.sort_unstable();
                assert_eq!(from, (1..size).collect::<Vec<_>>());
            })
            .await;
        ranks.shutdown().await;
    }
}

async fn recv_from_any_offset(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            if group.rank() != 2 {
                return group.send(2, 3, tensor(&group, &[group.rank() as i32])).unwrap().await.unwrap();
            }
            let mut into = [-1i32; 2];
            let (first, second) = into.split_at_mut(1);
            let from = [
                group.recv_into([0, 1], 3, first).await.unwrap(),
                group.recv_into([0, 1], 3, second).await.unwrap(),
            ];
            assert_eq!(into.map(|rank| rank as usize), from);
            assert_eq!(from[0] + from[1], 1);
        })
        .await;
    ranks.shutdown().await;
}

/// Two receives from any rank are in progress at a time.
async fn recv_from_any_pipeline(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            if group.rank() != 2 {
                let sent = (0..2).map(|at| group.send(2, 3, tensor(&group, &[element(group.rank(), 2, at)])));
                let sent: Vec<_> = sent.map(Result::unwrap).collect();
                return all_received(sent).await;
            }
            let mut received = Vec::new();
            for _ in 0..2 {
                let both = [group.recv([0, 1], 3).into_future(), group.recv([0, 1], 3).into_future()];
                received.extend(try_join_all(both).await.unwrap());
            }
            for from in 0..2 {
                let of_rank = received.iter().filter(|message| message.rank == from);
                let mut of_rank: Vec<i32> = of_rank.map(|message| values(&message.tensor)[0]).collect();
                of_rank.sort_unstable();
                assert_eq!(of_rank, [element(from, 2, 0), element(from, 2, 1)]);
            }
        })
        .await;
    ranks.shutdown().await;
}

/// Requests from any rank, answered to the sender with the same tag.
async fn recv_from_any_rpc(fabric: FabricKind) {
    const ROUNDS: usize = 10;
    for size in [3, 8] {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                if group.rank() != 0 {
                    for round in 0..ROUNDS {
                        let asked =
                            group.send(0, 7, tensor(&group, &[element(group.rank(), 0, round)])).unwrap();
                        let answer = group.recv(0, 7).await.unwrap();
                        assert_eq!(values(&answer.tensor), [-element(group.rank(), 0, round)]);
                        asked.await.unwrap();
                    }
                    return;
                }
                for _ in 0..ROUNDS * (size - 1) {
                    let request = group.recv(1..size, 7).await.unwrap();
                    let answer = tensor(&group, &[-values(&request.tensor)[0]]);
                    group.send(request.rank, 7, answer).unwrap().await.unwrap();
                }
            })
            .await;
        ranks.shutdown().await;
    }
}

/// An empty message from any rank, then a content from its sender, with the same tag.
async fn recv_from_any_rpc_empty_then_non_empty(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            if group.rank() != 0 {
                drop(group.send(0, 7, tensor(&group, &[])).unwrap());
                return group.send(0, 7, tensor(&group, &[group.rank() as i32])).unwrap().await.unwrap();
            }
            for _ in 1..3 {
                let mut into = [-1i32];
                let from = group.recv_into([1, 2], 7, &mut into[..0]).await.unwrap();
                assert_eq!(into, [-1]);
                group.recv_into(from, 7, &mut into).await.unwrap();
                assert_eq!(into, [from as i32]);
            }
        })
        .await;
    ranks.shutdown().await;
}

async fn tags_do_not_mix_and_each_keeps_its_order(fabric: FabricKind) {
    const TAGS: [u64; 3] = [0, 1 << 40, u64::MAX];
    let ranks = ranks(fabric, 2).await;
    ranks
        .each(async |group| {
            if group.rank() == 0 {
                let sent =
                    (0..30).map(|at| group.send(1, TAGS[at % 3], tensor(&group, &[at as i32])).unwrap());
                let sent: Vec<_> = sent.collect();
                return all_received(sent).await;
            }
            for (first, tag) in TAGS.into_iter().enumerate().rev() {
                for at in (first..30).step_by(3) {
                    assert_eq!(values(&group.recv(0, tag).await.unwrap().tensor), [at as i32]);
                }
            }
        })
        .await;
    ranks.shutdown().await;
}

async fn a_flood_of_one_rank_does_not_starve_the_others(fabric: FabricKind) {
    const FLOOD: usize = 300;
    let ranks = ranks(fabric, 4).await;
    let [to, others @ ..] = &ranks.groups[..] else { unreachable!("four ranks") };
    // All pairs are connected: a rank that is still connecting has sent nothing.
    for group in others {
        let sent = group.send(0, 2, tensor(group, &[0])).unwrap();
        to.recv(group.rank(), 2).await.unwrap();
        all_received(vec![sent]).await;
    }
    // All messages were sent before the first receive.
    for group in others {
        let count = if group.rank() == 1 { FLOOD } else { 3 };
        (0..count).for_each(|at| drop(group.send(0, 1, tensor(group, &[at as i32])).unwrap()));
    }
    let mut received = Vec::new();
    for _ in 0..FLOOD + 6 {
        received.push(to.recv(1..4, 1).await.unwrap());
    }
    for rank in 1..4 {
        let of_rank = received.iter().filter(|message| message.rank == rank);
        let of_rank: Vec<i32> = of_rank.map(|message| values(&message.tensor)[0]).collect();
        let count = if rank == 1 { FLOOD } else { 3 };
        assert_eq!(of_rank, (0..count as i32).collect::<Vec<_>>(), "of rank {rank}, each once and in order");
    }
    let last = received.iter().rposition(|message| message.rank != 1).unwrap();
    assert!(last < 60, "the others were served by receive {last}");
    drop(received);
    ranks.shutdown().await;
}

/// A message of the receiver itself is there whenever it receives, so the others are received only because they are requested
/// first in their turn. The flood lasts until all the others are received: how many rounds their requests and messages take is
/// no promise, since a barrier passes by them.
async fn messages_that_are_there_do_not_starve_those_of_later_ranks(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let flooded = &ranks.groups[0];
    for group in &ranks.groups {
        (0..3).for_each(|at| drop(group.send(0, 1, tensor(group, &[at])).unwrap()));
    }
    let mut received = Vec::new();
    let all_of_the_others = async {
        while received.iter().filter(|rank| **rank != 0).count() < 6 {
            received.push(flooded.recv(.., 1).await.unwrap().rank);
            drop(flooded.send(0, 1, tensor(flooded, &[0])).unwrap());
            // Requests and messages get on.
            ranks.each(async |group| group.barrier().await.unwrap()).await;
        }
    };
    let runtime = flooded.worker().runtime();
    let starved = timeout(&**runtime, PATIENCE, all_of_the_others).await.is_err();
    assert!(!starved, "not all of the others were received: {received:?}");
    ranks.shutdown().await;
}

async fn bad_arguments_are_named(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let group = &ranks.groups[0];
    let refused = [
        group.send(2, 0, tensor(group, &[1])).unwrap_err(),
        group.recv(2, 0).await.unwrap_err(),
        group.recv([1, 9], 0).await.unwrap_err(),
        group.recv(vec![], 0).await.unwrap_err(),
    ];
    let expected = ["rank = `2`", "from = `2`", "from = `9`", "from = `no ranks`"];
    for (error, expected) in refused.into_iter().zip(expected) {
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    ranks.shutdown().await;
}

async fn a_message_of_another_type_is_refused_and_dropped(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    for at in 0..3 {
        drop(zero.send(1, 0, tensor(zero, &[at, at])).unwrap());
    }
    let mut floats = [0f32; 2];
    let error = one.recv_into(0, 0, &mut floats).await.unwrap_err().to_string();
    assert!(error.starts_with("values = `2 x f32`: rank 0 sent Tensor(i32 [2])"), "{error}");
    let mut three = [0i32; 3];
    let error = one.recv_into(0, 0, &mut three).await.unwrap_err().to_string();
    assert!(error.starts_with("values = `3 x i32`: "), "{error}");
    let mut two = [0i32; 2];
    one.recv_into(0, 0, &mut two).await.unwrap();
    assert_eq!((floats, three, two), ([0.0; 2], [0; 3], [2; 2]));
    ranks.shutdown().await;
}

/// UnboundIoTimeout and UnboundIoTimeoutOverride: at least half of the limit of the group or the operation.
async fn a_timeout_ends_one_wait_alone(fabric: FabricKind) {
    let ranks = ranks_within(fabric, 3, PATIENCE).await;
    let [zero, one, two] = &ranks.groups[..] else { unreachable!("three ranks") };
    let runtime = zero.worker().runtime().clone();
    let begun = runtime.now();
    let error = zero.recv([1, 2], 8).timeout(SHORT).await.unwrap_err();
    let took = runtime.now() - begun;
    assert!(took >= SHORT / 2 && took < 20 * SHORT, "{took:?}");
    assert!(matches!(&error, GroupError::TimedOut { silent, .. } if *silent == [1, 2]), "{error}");
    let mut sent = zero.send(1, 8, tensor(zero, &[3])).unwrap();
    assert!(matches!(sent.wait().timeout(SHORT).await, Err(GroupError::TimedOut { .. })));
    // All of it still works.
    assert_eq!(values(&one.recv(0, 8).await.unwrap().tensor), [3]);
    sent.await.unwrap();
    drop(two.send(0, 8, tensor(two, &[4])).unwrap());
    assert_eq!(zero.recv([1, 2], 8).await.unwrap().rank, 2);
    ranks.each(async |group| group.barrier().await.unwrap()).await;
    ranks.shutdown().await;
}

/// UnboundIoErrors: the other ranks go on with each other.
async fn a_receive_fails_with_the_loss_of_its_rank_alone(fabric: FabricKind) {
    let mut ranks = ranks(fabric, 3).await;
    let (lost, lost_group) = (ranks.workers.pop().unwrap(), ranks.groups.pop().unwrap());
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let never = zero.send(2, 1, tensor(zero, &[1])).unwrap();
    let ended = async {
        drop(lost_group);
        lost.shutdown().await;
    };
    let (from_one, from_any, unsent, ()) = futures::join!(
        zero.recv(2, 0).into_future(),
        one.recv([0, 2], 0).into_future(),
        never.into_future(),
        ended
    );
    for error in [from_one.unwrap_err(), from_any.unwrap_err(), unsent.unwrap_err()] {
        assert!(
            matches!(error, GroupError::Left { rank: 2, .. } | GroupError::RankLost { rank: 2, .. }),
            "{error}"
        );
    }
    let sent = zero.send(1, 0, tensor(zero, &[6])).unwrap();
    assert_eq!(values(&one.recv(0, 0).await.unwrap().tensor), [6]);
    sent.await.unwrap();
    assert!(zero.failure().is_none());
    ranks.shutdown().await;
}

async fn the_end_of_the_group_ends_all_that_waits(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let sent = zero.send(1, 0, tensor(zero, &[1])).unwrap();
    let mut buffer = zero.recv_buffer(1, 0, 8).unwrap();
    let waiting = async {
        futures::join!(zero.recv(.., 5).into_future(), sent.into_future(), buffer.wait_recv().into_future())
    };
    let theirs = one.recv(0, 5).into_future();
    let end = async {
        zero.worker().runtime().sleep(SHORT / 10).await;
        drop(zero.barrier());
    };
    let ((received, sent, landed), theirs, ()) = futures::join!(waiting, theirs, end);
    for error in [received.unwrap_err(), sent.unwrap_err(), landed.unwrap_err(), theirs.unwrap_err()] {
        assert!(matches!(&error, GroupError::Over { why, .. } if why.contains("given up")), "{error}");
    }
    assert!(matches!(zero.recv(1, 0).await, Err(GroupError::Over { .. })));
    assert!(matches!(zero.send(1, 0, tensor(zero, &[1])), Err(GroupError::Over { .. })));
    drop(buffer);
    ranks.shutdown().await;
}

/// UnboundNoErrors: the order of drops does not matter.
async fn what_was_received_outlives_group_and_worker(fabric: FabricKind) {
    let Ranks { workers, mut groups } = ranks(fabric, 2).await;
    let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
    let content: Vec<i32> = (0..100_000).collect();
    let sent = zero.send(1, 0, tensor(&zero, &content)).unwrap();
    let message = one.recv(0, 0).await.unwrap();
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, 8).unwrap(), one.recv_buffer(0, 0, 8).unwrap());
    drop((zero, one));
    sent.await.unwrap();
    outgoing.bytes_mut().fill(9);
    outgoing.send(0, 8, 0).await.unwrap();
    assert_eq!(incoming.wait_recv().await.unwrap(), 0..8);
    outgoing.wait_send().await.unwrap();
    drop(outgoing);
    assert!(matches!(
        incoming.wait_recv().await,
        Err(GroupError::Gone { rank: 0, .. } | GroupError::Left { .. })
    ));
    assert_eq!(incoming.bytes(), [9; 8]);
    join_all(workers.iter().map(tensorwire_rendezvous::Worker::shutdown)).await;
    drop(workers);
    assert!(values(&message.tensor) == content);
}

async fn a_rank_sends_to_itself(fabric: FabricKind) {
    let ranks = ranks(fabric, 1).await;
    let group = &ranks.groups[0];
    let sent = group.send(0, 2, tensor(group, &[5])).unwrap();
    assert_eq!(values(&group.recv(.., 2).await.unwrap().tensor), [5]);
    sent.await.unwrap();
    let (mut outgoing, mut incoming) =
        (group.send_buffer(0, 2, 4).unwrap(), group.recv_buffer(0, 2, 4).unwrap());
    outgoing.send(0, 4, 0).await.unwrap();
    assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
    outgoing.wait_send().await.unwrap();
    drop((outgoing, incoming));
    ranks.shutdown().await;
}
