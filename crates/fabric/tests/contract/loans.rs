//! Views of the peer's memory, if the fabric has them; otherwise the error that names them as unsupported.

use std::sync::Arc;

use futures::future::{join, join_all};
use tensorwire_fabric::{Access, Arrival, FabricError, Immediate, Runtime};
use tensorwire_memory::Buf;

use super::{
    Setup, is_able,
    pair::{DEPTHS, Pair, RegisteredPool, fill, immediate, pattern, yield_once},
};

/// Longer than any fabric carries inside a message.
const LENGTH: usize = 96 << 10;

/// A pair whose fabric can lend; `None` if it cannot, which the error must name.
async fn lending(setup: Setup, runtime: Arc<dyn Runtime>) -> Option<Pair> {
    let pair = Pair::new(setup, runtime).await;
    if is_able(&pair, "lend", pair.to_right.capabilities().lend) {
        return Some(pair);
    }
    let lend = pair.to_right.lend(pair.left.source.filled(LENGTH, 1), Immediate(1));
    let error = pair.step("the refusal", lend).await.unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "{error}");
    pair.works(&pair.to_right, &pair.to_left).await;
    None
}

/// The next loan at right.
async fn loan(pair: &Pair) -> (u32, Buf) {
    match pair.step("a loan", pair.to_left.next_arrival()).await.unwrap() {
        Arrival::Loan { immediate, buffer } => (immediate.0, buffer),
        other => panic!("not a loan: {other:?}"),
    }
}

/// Lends `buffer` to right, which takes it.
async fn view_of(pair: &Pair, buffer: Buf, value: u32) -> Buf {
    let (result, (number, view)) = join(pair.to_right.lend(buffer, Immediate(value)), loan(pair)).await;
    result.unwrap();
    assert_eq!(number, value);
    view
}

/// Waits until all memory has returned to left's source pool.
async fn all_back(pair: &Pair, pool: &RegisteredPool) {
    let back = async {
        while pool.pool.stats().used_bytes > 0 {
            yield_once().await;
        }
    };
    pair.step("the memory to come back", back).await;
}

pub async fn lend_gives_the_peer_a_view_of_the_bytes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    for (value, length) in [1, 63, 64, 4096, LENGTH, 4 << 20].into_iter().enumerate() {
        let source = pair.left.source.filled(length, value as u64);
        let view = view_of(&pair, source, value as u32).await;
        assert_eq!(view.len(), length);
        assert!(view[..] == pattern(length, value as u64)[..], "{length} bytes");
        assert!(view.is_foreign());
    }
    all_back(&pair, &pair.left.source).await;
    assert_eq!(pair.to_right.stats().operations, 6);
}

pub async fn lend_keeps_its_place_among_writes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let target = pair.grant_right(LENGTH);
    let first = pair.to_right.write(pair.left.source.filled(LENGTH, 1), target.range);
    let second = pair.to_right.lend(pair.left.source.filled(LENGTH, 2), Immediate(2));
    let third = pair.to_right.notify(Immediate(3));
    let (number, view) = loan(&pair).await;
    assert_eq!(number, 2);
    assert!(target.bytes() == pattern(LENGTH, 1), "an earlier write had not landed");
    assert_eq!(immediate(pair.step("a notification", pair.to_left.next_arrival()).await.unwrap()), (3, 0));
    for operation in [first, second, third] {
        pair.step("an operation", operation).await.unwrap();
    }
    assert!(view[..] == pattern(LENGTH, 2)[..]);
}

pub async fn lend_keeps_the_bytes_until_the_last_view_is_gone(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let pool = RegisteredPool::new(&pair.left.domain, "one buffer", Access::LOCAL, LENGTH as u64);
    let view = view_of(&pair, pool.filled(LENGTH, 1), 1).await;
    let (part, clone) = (view.slice(1000..2000).unwrap(), view.clone());
    drop(view);
    drop(clone);
    pair.works(&pair.to_right, &pair.to_left).await;
    assert!(pool.pool.try_alloc(LENGTH).is_err(), "the bytes were given out under a view");
    assert_eq!(part[..], pattern(LENGTH, 1)[1000..2000]);
    drop(part);
    all_back(&pair, &pool).await;
}

pub async fn lend_gives_memory_back_to_a_waiting_caller(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let pool = RegisteredPool::new(&pair.left.domain, "one buffer", Access::LOCAL, LENGTH as u64);
    for round in 0..20 {
        let mut buffer = pair.step("the buffer", pool.pool.alloc(LENGTH)).await.unwrap();
        fill(&mut buffer, round);
        let view = view_of(&pair, buffer.freeze(), 1).await;
        assert!(view[..] == pattern(LENGTH, round)[..], "round {round}");
        // The next round waits for this memory.
    }
}

pub async fn lend_of_nothing_or_of_strange_memory_is_refused_alone(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let nothing = pair.to_right.lend(Buf::empty(), Immediate(1));
    let error = pair.step("the refusal", nothing).await.unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "{error}");
    // Right's pool is registered with right's domain.
    let strange = pair.to_right.lend(pair.right.source.filled(LENGTH, 1), Immediate(1));
    let error = pair.step("the refusal", strange).await.unwrap_err();
    assert!(matches!(error, FabricError::NotRegistered { .. }), "{error}");
    // A view can't be loaned to a third party.
    let view = view_of(&pair, pair.left.source.filled(LENGTH, 1), 1).await;
    let on = pair.to_left.lend(view, Immediate(1));
    let error = pair.step("the refusal", on).await.unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "{error}");
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn lend_takes_a_receive(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let source = pair.left.source.filled(LENGTH, 1);
    let lends: Vec<_> =
        (0..DEPTHS.receive_depth).map(|value| pair.to_right.lend(source.clone(), Immediate(value))).collect();
    for result in pair.step("as many as there are receives", join_all(lends)).await {
        result.unwrap();
    }
    let one_more = pair.to_right.lend(source.clone(), Immediate(99));
    let error = pair.step("one more", one_more).await.unwrap_err();
    assert!(matches!(error, FabricError::ReceiverNotReady { .. }), "{error}");
    // Loans that were delivered before can still be taken and read.
    for value in 0..DEPTHS.receive_depth {
        let (number, view) = loan(&pair).await;
        assert_eq!(number, value);
        assert!(view[..] == source[..]);
    }
    drop(source);
    all_back(&pair, &pair.left.source).await;
}

pub async fn lend_outlives_its_dropped_future(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    drop(pair.to_right.lend(pair.left.source.filled(LENGTH, 5), Immediate(5)));
    let (number, view) = loan(&pair).await;
    assert_eq!(number, 5);
    assert!(view[..] == pattern(LENGTH, 5)[..]);
    drop(view);
    all_back(&pair, &pair.left.source).await;
}

pub async fn lend_outlives_its_connection(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let pool = RegisteredPool::new(&pair.left.domain, "two buffers", Access::LOCAL, 2 * LENGTH as u64);
    for who_closes in ["left", "right", "both"] {
        let (left, right) = pair.connect_again().await;
        let lend = left.lend(pool.filled(LENGTH, 7), Immediate(1));
        let (result, arrival) = pair.step("the loan", join(lend, right.next_arrival())).await;
        result.unwrap();
        let Arrival::Loan { buffer: view, .. } = arrival.unwrap() else { panic!("not a loan") };
        if who_closes != "right" {
            pair.step("left's close", left.close()).await;
        }
        if who_closes != "left" {
            pair.step("right's close", right.close()).await;
        }
        drop((left, right));
        // The rest of the pool is given out and overwritten.
        let mut other = pool.pool.try_alloc(LENGTH).unwrap();
        other.fill(0xEE);
        assert!(pool.pool.try_alloc(LENGTH).is_err(), "the bytes were given out under a view");
        assert!(view[..] == pattern(LENGTH, 7)[..], "the bytes changed under the view");
        drop((view, other));
        all_back(&pair, &pool).await;
    }
}

pub async fn lend_of_many_buffers_ends_in_any_order(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = lending(setup, runtime).await else { return };
    let mut views: Vec<(u64, Buf)> = Vec::new();
    for round in 0..200_u64 {
        let length = 100 + (round as usize * 7919) % 5000;
        views.push((round, view_of(&pair, pair.left.source.filled(length, round), 1).await));
        // Now and then some views from the middle are dropped.
        if round % 3 == 2 {
            views.swap_remove((round as usize * 31) % views.len());
            views.swap_remove((round as usize * 17) % views.len());
        }
        for (seed, view) in &views {
            assert!(view[..] == pattern(view.len(), *seed)[..], "view {seed} in round {round}");
        }
    }
    drop(views);
    all_back(&pair, &pair.left.source).await;
}
