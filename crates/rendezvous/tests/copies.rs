//! How often payload bytes are copied. The counters are the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    ops::Range,
    slice,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{bounded::bounded, fabrics::over, rdma::patient};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::{
    GrantEnd, GrantId, MemoryObserver, Span,
    copy::{CopyReason, count},
};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    Sharing, Tensor, Worker,
    sets::{Layout, ShardedSet},
};

const BYTES: usize = (3 << 20) + 77;
const PAYLOAD_REASONS: [CopyReason; 4] =
    [CopyReason::Import, CopyReason::ShmPayload, CopyReason::SimPiece, CopyReason::Local];

/// Remembers the memory that was granted to peers, and the grants that ended because the content had arrived.
#[derive(Debug, Default)]
struct Lent {
    granted: Mutex<Vec<Span>>,
    content: Mutex<Vec<Span>>,
}

impl MemoryObserver for Lent {
    fn allocated(&self, _: &Span) {}

    fn freed(&self, _: &Span) {}

    fn granted(&self, span: &Span, _: GrantId) {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner).push(span.clone());
    }

    fn grant_ended(&self, span: &Span, _: GrantId, end: Option<GrantEnd>) {
        if end == Some(GrantEnd::Content) {
            self.content.lock().unwrap_or_else(PoisonError::into_inner).push(span.clone());
        }
    }
}

fn copied() -> [u64; 4] {
    PAYLOAD_REASONS.map(|reason| count(reason).bytes)
}

async fn fetch_once(kind: FabricKind) -> [u64; 4] {
    let lent = Arc::new(Lent::default());
    let server = over(Worker::builder("/job:ps/replica:0/task:0"), kind).start().await.unwrap();
    let client = over(Worker::builder("/job:worker/replica:0/task:0"), kind).observer(lent.clone());
    let client = client.start().await.unwrap();
    let mut buffer = server.pool().try_alloc(BYTES).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % 253) as u8);
    let sent = Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap();
    server.publish("t", sent.clone()).unwrap();
    let peer = client.peer_at(server.address()).await.unwrap();

    let (before, small) = (copied(), count(CopyReason::TcpSmall).bytes);
    let got = peer.fetch("t").await.unwrap();
    let (after, small) = (copied(), count(CopyReason::TcpSmall).bytes - small);

    assert!(got.bytes() == sent.bytes());
    // Messages, and the beginning of each piece.
    let most = (12 << 10) + (BYTES.div_ceil(512 << 10) as u64) * (4 << 10);
    assert!(small < most, "{small} bytes of {most}");
    let place = Span {
        block: got.buf().block().unwrap().id(),
        range: got.buf().offset()..got.buf().offset() + BYTES,
    };
    assert!(lent.granted.lock().unwrap().contains(&place), "the user got other memory than the fabric wrote");
    assert_eq!(*lent.content.lock().unwrap(), [place]);
    client.shutdown().await;
    server.shutdown().await;
    std::array::from_fn(|index| after[index] - before[index])
}

/// Eager copies of one fetch of a small tensor whose shape the receiver does not know.
async fn fetch_small(kind: FabricKind) -> (u64, u64) {
    let server = over(Worker::builder("/job:ps/replica:0/task:0"), kind).start().await.unwrap();
    let client = over(Worker::builder("/job:worker/replica:0/task:0"), kind).start().await.unwrap();
    server.publish("s", Tensor::from_values(server.pool(), &[25], &[7u32; 25]).unwrap()).unwrap();
    let peer = client.peer_at(server.address()).await.unwrap();
    let before = count(CopyReason::Eager);
    assert_eq!(peer.fetch("s").await.unwrap().values::<u32>().unwrap(), [7; 25]);
    let after = count(CopyReason::Eager);
    client.shutdown().await;
    server.shutdown().await;
    (after.calls - before.calls, after.bytes - before.bytes)
}

/// Copies of two fetches of a view: the first is promised, the second comes at once.
async fn view_twice(kind: FabricKind) -> [u64; 4] {
    let server = over(Worker::builder("/job:ps/replica:0/task:0"), kind).start().await.unwrap();
    let client = over(Worker::builder("/job:worker/replica:0/task:0"), kind).start().await.unwrap();
    let sent = Tensor::from_bytes(server.pool(), DataType::U8, &[BYTES as u64], &vec![7; BYTES]).unwrap();
    server.publish("t", sent.clone()).unwrap();
    let peer = client.peer_at(server.address()).await.unwrap();

    let before = copied();
    let first = peer.fetch("t").sharing(Sharing::View).await.unwrap();
    let second = peer.fetch("t").sharing(Sharing::View).await.unwrap();
    let after = copied();

    assert!(first.bytes() == sent.bytes() && second.bytes() == sent.bytes());
    let is_view = kind == FabricKind::SHM;
    assert_eq!((first.buf().is_foreign(), second.buf().is_foreign()), (is_view, is_view));
    assert_eq!(client.receive_memory().used_bytes == 0, is_view, "a view takes none");
    drop((first, second));
    client.shutdown().await;
    server.shutdown().await;
    std::array::from_fn(|index| after[index] - before[index])
}

/// Copies of one fetch of a tensor of which three publishers have parts of the rows, with these rows in their places.
async fn fetch_rows(kind: FabricKind, rows: Range<u64>) -> [u64; 4] {
    const ROW: u64 = 40_000;
    let lent = Arc::new(Lent::default());
    let follower = over(Worker::builder("follower"), kind).observer(lent.clone()).start().await.unwrap();
    let (mut publishers, mut sets) = (Vec::new(), Vec::new());
    for at in 0..3 {
        let publisher = over(Worker::builder(&format!("publisher{at}")), kind).start().await.unwrap();
        let bytes = vec![at as u8; 10 * ROW as usize];
        let part = Tensor::from_bytes(publisher.pool(), DataType::U8, &[10, ROW], &bytes).unwrap();
        let own = 10 * at..10 * at + 10;
        publisher.set("s").commit(1, [("t", part.shard(0, 30, slice::from_ref(&own)))]).await.unwrap();
        sets.push(follower.peer_at(publisher.address()).await.unwrap().set("s"));
        publishers.push(publisher);
    }
    let set = ShardedSet::new(sets).layout(Layout::new().part("t", 0, slice::from_ref(&rows)));
    let before = copied();
    let snapshot = set.fetch().await.unwrap();
    let after = copied();
    let got = snapshot.get("t").unwrap();
    let expected = rows.clone().flat_map(|row| vec![(row / 10) as u8; ROW as usize]);
    assert!(got.bytes().iter().copied().eq(expected));
    for at in 0..3 {
        let part = rows.start.max(10 * at)..rows.end.min(10 * at + 10);
        let place = |row: u64| got.buf().offset() + ((row - rows.start) * ROW) as usize;
        let span = Span { block: got.buf().block().unwrap().id(), range: place(part.start)..place(part.end) };
        assert!(lent.content.lock().unwrap().contains(&span), "the rows {part:?} were written elsewhere");
    }
    for worker in publishers.into_iter().chain([follower]) {
        worker.shutdown().await;
    }
    std::array::from_fn(|index| after[index] - before[index])
}

/// Runs `test` with a watchdog.
fn run(test: impl Future<Output = ()>) {
    bounded(patient(Duration::from_secs(60)), test);
}

#[test]
fn shm_copies_a_tensor_once_and_tcp_never() {
    let _turn = crate::turn();
    run(async {
        assert_eq!(fetch_once(FabricKind::SHM).await, [0, BYTES as u64, 0, 0]);
        assert_eq!(fetch_once(FabricKind::TCP).await, [0, 0, 0, 0]);
        assert_eq!(view_twice(FabricKind::SHM).await, [0, 0, 0, 0]);
        assert_eq!(view_twice(FabricKind::TCP).await, [0, 0, 0, 0]);
        assert_eq!(fetch_rows(FabricKind::TCP, 5..28).await, [0, 0, 0, 0]);
        // Into the message, and out of it.
        for kind in [FabricKind::SHM, FabricKind::TCP] {
            assert_eq!(fetch_small(kind).await, (2, 200));
        }
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn verbs_never_copies_a_tensor() {
    let _turn = crate::turn();
    run(async {
        assert_eq!(fetch_once(FabricKind::VERBS).await, [0, 0, 0, 0]);
        assert_eq!(fetch_rows(FabricKind::VERBS, 5..28).await, [0, 0, 0, 0]);
        assert_eq!(view_twice(FabricKind::VERBS).await, [0, 0, 0, 0]);
        assert_eq!(fetch_small(FabricKind::VERBS).await, (2, 200));
    });
}
