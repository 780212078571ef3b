//! Buffers of fixed length that two ranks bind to a slot.

use tensorwire_collective::{
    GroupError,
    pair::{AHEAD, RECV_BUFFERS_MAX, SENDS_UNDER_WAY},
};
use tensorwire_fabric::FabricKind;

use super::{SHORT, over_fabrics, over_verbs, possible, ranks};

over_fabrics! {
    remote_offset,
    empty_then_non_empty,
    waits_are_counted,
    sends_beyond_the_bound_wait,
    a_slot_is_used_again,
    a_receive_buffer_that_is_dropped_first_leaves_nothing_for_the_next,
    bounds_are_checked_on_both_sides,
    receive_buffers_are_bounded,
    long_contents_land_in_place,
}

over_verbs! {
    remote_offset,
    waits_are_counted,
}

/// Both ranks write at their own offset, and end with the same bytes.
async fn remote_offset(fabric: FabricKind) {
    for size in possible(fabric, 2..=8) {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                let own = group.rank();
                let others = (0..size).filter(|rank| *rank != own);
                let mut result = vec![own as u8 + 1; size];
                let mut buffers: Vec<_> = others
                    .map(|other| {
                        let outgoing = group.send_buffer(other, 11, size).unwrap();
                        (other, outgoing, group.recv_buffer(other, 11, size).unwrap())
                    })
                    .collect();
                for (_, outgoing, _) in &mut buffers {
                    outgoing.bytes_mut()[own] = own as u8 + 1;
                    outgoing.send(own, 1, own).await.unwrap();
                    outgoing.wait_send().await.unwrap();
                }
                for (other, _, incoming) in &mut buffers {
                    assert_eq!(incoming.wait_recv().await.unwrap(), *other..*other + 1);
                    result[*other] = incoming.bytes()[*other];
                }
                assert_eq!(result, (1..=size as u8).collect::<Vec<_>>());
            })
            .await;
        ranks.shutdown().await;
    }
}

async fn empty_then_non_empty(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, 4).unwrap(), one.recv_buffer(0, 0, 4).unwrap());
    outgoing.bytes_mut().fill(3);
    outgoing.send(0, 0, 4).await.unwrap();
    outgoing.send(1, 2, 1).await.unwrap();
    assert_eq!(incoming.wait_recv().await.unwrap(), 4..4);
    assert_eq!(incoming.bytes(), [0; 4]);
    assert_eq!(incoming.wait_recv().await.unwrap(), 1..3);
    assert_eq!(incoming.bytes(), [0, 3, 3, 0]);
    // Buffers of length 0.
    let (mut nothing, mut of_it) = (zero.send_buffer(1, 1, 0).unwrap(), one.recv_buffer(0, 1, 0).unwrap());
    nothing.send(0, 0, 0).await.unwrap();
    assert_eq!(of_it.wait_recv().await.unwrap(), 0..0);
    drop((outgoing, incoming, nothing, of_it));
    ranks.shutdown().await;
}

async fn waits_are_counted(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, 3).unwrap(), one.recv_buffer(0, 0, 3).unwrap());
    for at in 0..3 {
        outgoing.bytes_mut().fill(at as u8 + 1);
        outgoing.send(at, 1, at).await.unwrap();
    }
    for _ in 0..3 {
        outgoing.wait_send().await.unwrap();
    }
    let none = outgoing.wait_send().await.unwrap_err().to_string();
    assert_eq!(none, "wait_send = `no send in progress`: wait at most once for each send of this buffer");
    for at in 0..3 {
        assert_eq!(incoming.wait_recv().await.unwrap(), at..at + 1);
    }
    assert_eq!(incoming.bytes(), [1, 2, 3], "each send has what was there when it was called");
    let none = incoming.wait_recv().timeout(SHORT).await;
    assert!(matches!(none, Err(GroupError::TimedOut { .. })), "{none:?}");
    drop((outgoing, incoming));
    ranks.shutdown().await;
}

async fn sends_beyond_the_bound_wait(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, 8).unwrap(), one.recv_buffer(0, 0, 8).unwrap());
    let most = SENDS_UNDER_WAY + AHEAD;
    for at in 0..most {
        outgoing.bytes_mut().fill(at as u8);
        outgoing.send(0, 8, 0).await.unwrap();
    }
    let further = outgoing.send(0, 8, 0).timeout(SHORT).await;
    assert!(matches!(further, Err(GroupError::TimedOut { .. })), "{further:?}");
    assert_eq!(incoming.wait_recv().await.unwrap(), 0..8);
    outgoing.bytes_mut().fill(most as u8);
    outgoing.send(0, 8, 0).await.unwrap();
    for at in 1..=most {
        assert_eq!(incoming.wait_recv().await.unwrap(), 0..8);
        assert_eq!(incoming.bytes(), [at as u8; 8]);
    }
    for _ in 0..=most {
        outgoing.wait_send().await.unwrap();
    }
    drop((outgoing, incoming));
    ranks.shutdown().await;
}

async fn a_slot_is_used_again(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    for round in 0..50u8 {
        let mut outgoing = zero.send_buffer(1, 5, 2 + usize::from(round)).unwrap();
        let mut incoming = one.recv_buffer(0, 5, 2 + usize::from(round)).unwrap();
        let twice = [zero.send_buffer(1, 5, 1).map(drop), one.recv_buffer(0, 5, 1).map(drop)];
        for refused in twice {
            let error = refused.unwrap_err().to_string();
            assert!(
                error.starts_with("slot = `5`: a buffer of this direction uses it with rank "),
                "{error}"
            );
        }
        outgoing.bytes_mut().fill(round);
        outgoing.send(0, 2, usize::from(round)).await.unwrap();
        assert_eq!(incoming.wait_recv().await.unwrap().len(), 2);
        assert_eq!(incoming.bytes().last(), Some(&round));
        if round % 2 == 0 {
            outgoing.wait_send().await.unwrap();
            drop(outgoing);
            assert!(matches!(incoming.wait_recv().await, Err(GroupError::Gone { rank: 0, .. })));
        }
    }
    ranks.shutdown().await;
}

async fn a_receive_buffer_that_is_dropped_first_leaves_nothing_for_the_next(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let mut outgoing = zero.send_buffer(1, 5, 4).unwrap();
    for _ in 0..SENDS_UNDER_WAY {
        outgoing.send(0, 4, 0).await.unwrap();
    }
    let first = one.recv_buffer(0, 5, 4).unwrap();
    drop(first);
    let mut second = one.recv_buffer(0, 5, 4).unwrap();
    let mut failed = None;
    for _ in 0..SENDS_UNDER_WAY {
        failed = failed.or(outgoing.wait_send().await.err());
    }
    assert!(matches!(failed, Some(GroupError::Gone { rank: 1, .. })), "{failed:?}");
    drop(outgoing);
    let mut next = zero.send_buffer(1, 5, 4).unwrap();
    next.bytes_mut().fill(8);
    next.send(0, 4, 0).await.unwrap();
    assert_eq!(second.wait_recv().await.unwrap(), 0..4);
    assert_eq!(second.bytes(), [8; 4]);
    next.wait_send().await.unwrap();
    drop((next, second));
    ranks.shutdown().await;
}

async fn bounds_are_checked_on_both_sides(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, 8).unwrap(), one.recv_buffer(0, 0, 6).unwrap());
    let refused = [
        (outgoing.send(9, 0, 0).await, "offset = `9`: there are 8 bytes: give at most 8"),
        (outgoing.send(0, 9, 0).await, "length = `9`: there are 8 bytes: give at most 8"),
        (outgoing.send(0, 4, 5).await, "roffset = `5`: there are 8 bytes: give at most 4"),
        (outgoing.send(usize::MAX, 2, 0).await, "offset = `18446744073709551615`: "),
    ];
    for (refused, expected) in refused {
        let error = refused.unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    // The two lengths differ, and both ranks get the error.
    outgoing.send(0, 8, 0).await.unwrap();
    let theirs = outgoing.wait_send().await.unwrap_err().to_string();
    assert!(theirs.starts_with("length = `8`: the buffer of this slot on rank 1 has 6 bytes"), "{theirs}");
    let ours = incoming.wait_recv().await.unwrap_err().to_string();
    assert!(ours.starts_with("length = `6`: the buffer of this slot on rank 0 has 8 bytes"), "{ours}");
    drop((outgoing, incoming));
    ranks.shutdown().await;
}

async fn receive_buffers_are_bounded(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let most = RECV_BUFFERS_MAX as u64;
    let mut buffers: Vec<_> = (0..most).map(|slot| one.recv_buffer(0, slot, 4).unwrap()).collect();
    let error = one.recv_buffer(0, most, 4).unwrap_err().to_string();
    assert!(
        error.starts_with("slot = `128`: 128 receive buffers await rank 0, the maximum is 128"),
        "{error}"
    );
    // Other operations go on meanwhile.
    ranks.each(async |group| group.barrier().await.unwrap()).await;
    for (slot, incoming) in buffers.iter_mut().enumerate() {
        let mut outgoing = zero.send_buffer(1, slot as u64, 4).unwrap();
        outgoing.send(0, 4, 0).await.unwrap();
        assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
    }
    drop(buffers);
    ranks.shutdown().await;
}

async fn long_contents_land_in_place(fabric: FabricKind) {
    const LENGTH: usize = 1 << 20;
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (mut outgoing, mut incoming) =
        (zero.send_buffer(1, 0, LENGTH).unwrap(), one.recv_buffer(0, 0, LENGTH).unwrap());
    outgoing.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let parts = [0, 1, 4096, LENGTH / 3, LENGTH];
    for part in parts.windows(2) {
        let [from, to] = [part[0], part[1]];
        outgoing.send(from, to - from, LENGTH - to).await.unwrap();
        assert_eq!(incoming.wait_recv().await.unwrap(), LENGTH - to..LENGTH - from);
        assert!(incoming.bytes()[LENGTH - to..LENGTH - from] == outgoing.bytes()[from..to]);
        outgoing.wait_send().await.unwrap();
    }
    drop((outgoing, incoming));
    ranks.shutdown().await;
}
