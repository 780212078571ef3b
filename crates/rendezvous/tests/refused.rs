//! Refusals change nothing. Each row reaches a limit of a member, is refused so often that anything a refusal left behind would
//! exceed the limit by itself, and then does what the limit allows. The rows know settings and errors, and nothing of how a
//! limit is counted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::{
    FutureExt,
    future::{LocalBoxFuture, join, join_all},
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::wire::control::{ControlFrame, RegionRecord};
use tensorwire_protocol::{Code, DataType, Status, limits::REGIONS_MAX};
use tensorwire_rendezvous::{
    Sharing, Tensor, Trust, Worker, WorkerBuilder,
    control::{ControlSession, GrpcConfig, GrpcPlane},
};

use crate::{
    bounded::bounded,
    caps::{answer, connect, outlasted, refusal, session},
    two::Two,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Bytes of `small`, `fits` and `large`. The rows about bytes allow [`ALLOWED`].
const SMALL: usize = 5000;
const FITS: usize = 100_000;
const LARGE: usize = 200_000;
const ALLOWED: u64 = 128 << 10;

type Kinds = &'static [FabricKind];
const BOTH: Kinds = &[FabricKind::SHM, FabricKind::TCP];
const SHM: Kinds = &[FabricKind::SHM];
const TCP: Kinds = &[FabricKind::TCP];

/// A limit, over which fabrics, how often it is reached, and how: refused so often, and then allowed.
type Row = (&'static str, Kinds, usize, fn(FabricKind, usize) -> LocalBoxFuture<'static, ()>);

const ROWS: &[Row] = &[
    ("requests that are refused", BOTH, 1500, |kind, often| unknown_names(kind, often).boxed_local()),
    ("receive_bytes", BOTH, 20, |kind, often| values_beyond_the_pool(kind, often).boxed_local()),
    ("bounce_bytes", TCP, 20, |kind, often| values_beyond_what_may_bounce(kind, often).boxed_local()),
    ("deferred_steps_max", BOTH, 20, |kind, often| steps_not_begun(kind, often).boxed_local()),
    ("steps that are over", BOTH, 500, |kind, often| steps_that_are_over(kind, often).boxed_local()),
    ("values_max", BOTH, 20, |kind, often| values_without_receivers(kind, often).boxed_local()),
    ("tickets that have ended", BOTH, 500, |kind, often| ended_offers(kind, often).boxed_local()),
    ("viewed_bytes_per_peer_max", SHM, 50, |kind, often| views(kind, often).boxed_local()),
    ("sessions_max", TCP, 20, |_, often| sessions(often).boxed_local()),
    ("sessions_per_peer_max", TCP, 20, |_, often| sessions_of_a_peer(often).boxed_local()),
    ("peers_max", TCP, 20, |_, often| names(often).boxed_local()),
    ("connections_per_peer_max", TCP, 30, |_, often| connections_of_a_peer(often).boxed_local()),
    ("data connections, one session", TCP, 40, |_, often| connections_of_a_session(often).boxed_local()),
    ("lists asked for", TCP, 3, |_, often| lists(often).boxed_local()),
    ("regions announced", TCP, 2, |_, often| regions(often).boxed_local()),
];

#[test]
fn s4_refusals_change_nothing_over_shm() {
    over(FabricKind::SHM);
}

#[test]
fn s4_refusals_change_nothing_over_tcp() {
    over(FabricKind::TCP);
}

fn over(kind: FabricKind) {
    let rows = ROWS.iter().filter(|(_, kinds, ..)| kinds.contains(&kind));
    let failed = rows.filter(|(limit, _, often, reach)| {
        println!("{limit}: {often} times");
        std::panic::catch_unwind(|| bounded(LIMIT, reach(kind, *often))).is_err()
    });
    let failed: Vec<_> = failed.map(|(limit, ..)| limit).collect();
    assert!(failed.is_empty(), "refusals leave something behind at {failed:?}");
}

/// Two workers with the same settings, of which the server publishes.
async fn two(kind: FabricKind, set: impl Fn(WorkerBuilder) -> WorkerBuilder) -> Two {
    let two = Two::of(|name| set(Worker::builder(name).require(kind))).await;
    for (name, bytes) in [("small", SMALL), ("fits", FITS), ("large", LARGE)] {
        two.server.publish(name, tensor(&two.server, bytes)).unwrap();
    }
    two
}

fn tensor(worker: &Worker, bytes: usize) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    buffer.fill(7);
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

fn is_whole(tensor: &Tensor, bytes: usize) -> bool {
    tensor.bytes().len() == bytes && tensor.bytes().iter().all(|byte| *byte == 7)
}

async fn gives(two: &Two, name: &str, bytes: usize) {
    assert!(is_whole(&two.peer.fetch(name).await.unwrap(), bytes), "{name}");
}

/// Ends both workers, once neither holds anything but what is published. The watchdog bounds the wait.
async fn end(two: Two) {
    let names = ["small", "fits", "large"];
    assert!(names.iter().all(|name| two.server.withdraw(name)));
    let is_idle = |worker: &Worker| {
        [worker.receive_memory(), worker.pool().stats()].iter().all(|pool| {
            pool.used_bytes + pool.early_bytes + pool.leaked_bytes + pool.retired_bytes == 0
                && pool.waiting == 0
        })
    };
    until(async || is_idle(&two.client) && is_idle(&two.server)).await;
    two.end().await;
}

/// The requests that the server has received.
fn asked(two: &Two) -> u64 {
    two.server.peers().iter().map(|peer| peer.counters.received.tensor_request).sum()
}

/// What another task brings about.
async fn until(is_so: impl AsyncFn() -> bool) {
    while !is_so().await {
        tokio::task::yield_now().await;
    }
}

async fn unknown_names(kind: FabricKind, often: usize) {
    let two = two(kind, |builder| builder.flow(|flow| flow.requests_max = 4)).await;
    for _ in 0..often {
        let refused = two.peer.fetch("nothing").await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
    }
    join_all((0..8).map(|_| gives(&two, "small", SMALL))).await;
    end(two).await;
}

async fn values_beyond_the_pool(kind: FabricKind, often: usize) {
    let set = |builder: WorkerBuilder| {
        builder.memory(|memory| (memory.receive_bytes, memory.block_bytes) = (ALLOWED, ALLOWED as usize))
    };
    refused_for_its_length(two(kind, set).await, often, "receive").await;
}

async fn values_beyond_what_may_bounce(kind: FabricKind, often: usize) {
    let set =
        |builder: WorkerBuilder| builder.trust(Trust::Hostile).memory(|memory| memory.bounce_bytes = ALLOWED);
    refused_for_its_length(two(kind, set).await, often, "bounce").await;
}

async fn refused_for_its_length(two: Two, often: usize, word: &str) {
    for _ in 0..often {
        let refused = two.peer.fetch("large").await.unwrap_err().to_string();
        assert!(refused.contains(word), "{refused}");
    }
    gives(&two, "fits", FITS).await;
    gives(&two, "small", SMALL).await;
    end(two).await;
}

async fn steps_not_begun(kind: FabricKind, often: usize) {
    let two = two(kind, |builder| builder.limits(|limits| limits.deferred_steps_max = 2)).await;
    let key = two.client.key("server", "client", "edge").unwrap();
    let steps: Vec<_> = (0..5).map(|id| two.client.shared_step(id)).collect();
    let asking = async |first: usize| {
        let before = asked(&two);
        let received = join(steps[first].recv(&key).into_future(), steps[first + 1].recv(&key).into_future());
        let serving = async {
            until(async || asked(&two) >= before + 2).await;
            if first == 0 {
                for _ in 0..often {
                    let refused = steps[2].recv(&key).await.unwrap_err();
                    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
                }
            }
            for id in [first, first + 1] {
                two.server.shared_step(id as i64).send(&key, tensor(&two.server, SMALL)).unwrap();
            }
        };
        let ((one, other), ()) = join(received, serving).await;
        assert!(is_whole(&one.unwrap(), SMALL) && is_whole(&other.unwrap(), SMALL));
    };
    asking(0).await;
    asking(3).await;
    end(two).await;
}

async fn steps_that_are_over(kind: FabricKind, often: usize) {
    let two = two(kind, |builder| builder.flow(|flow| flow.requests_max = 4)).await;
    let key = two.client.key("server", "client", "edge").unwrap();
    two.server.cleanup(1);
    for _ in 0..often {
        let refused = two.client.shared_step(1).recv(&key).await.unwrap_err();
        assert_eq!(refused.code(), Code::Aborted, "{refused}");
    }
    let (here, there) = (two.client.shared_step(2), two.server.shared_step(2));
    for _ in 0..8 {
        there.send(&key, tensor(&two.server, SMALL)).unwrap();
    }
    for received in join_all((0..8).map(|_| here.recv(&key).into_future())).await {
        assert!(is_whole(&received.unwrap(), SMALL));
    }
    end(two).await;
}

async fn values_without_receivers(kind: FabricKind, often: usize) {
    let two = two(kind, |builder| builder.limits(|limits| limits.values_max = 4)).await;
    let key = two.client.key("server", "client", "edge").unwrap();
    let (here, there) = (two.client.shared_step(1), two.server.shared_step(1));
    for _ in 0..2 {
        (0..4).for_each(|_| there.send(&key, tensor(&two.server, SMALL)).unwrap());
        for _ in 0..often {
            let refused = there.send(&key, tensor(&two.server, SMALL)).unwrap_err();
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        }
        for _ in 0..4 {
            assert!(is_whole(&here.recv(&key).await.unwrap(), SMALL));
        }
    }
    end(two).await;
}

async fn ended_offers(kind: FabricKind, often: usize) {
    let two = two(kind, |builder| builder.flow(|flow| flow.requests_max = 4)).await;
    let ended = two.server.offer(tensor(&two.server, SMALL)).ticket();
    for _ in 0..often {
        assert!(two.peer.fetch_offered(ended, LIMIT).await.unwrap().is_none());
    }
    let offer = two.server.offer(tensor(&two.server, SMALL));
    let read = two.peer.fetch_offered(offer.ticket(), LIMIT).await.unwrap();
    assert!(is_whole(&read.unwrap(), SMALL));
    drop(offer);
    end(two).await;
}

/// Views beyond the limit come as copies: of what is found in the catalogue, and of what is lent.
async fn views(kind: FabricKind, often: usize) {
    let set = |builder: WorkerBuilder| {
        builder.memory(|memory| memory.viewed_bytes_per_peer_max = Some(4 * SMALL as u64))
    };
    let two = two(kind, set).await;
    let lent = "x".repeat(113); // too long for a catalogue
    two.server.publish(&lent, tensor(&two.server, SMALL)).unwrap();
    for name in ["small", &lent] {
        gives(&two, name, SMALL).await; // it is resident now
        let first = views_until_copies(&two, name, often).await;
        assert!((1..=4).contains(&first), "{first} views");
        for _ in 0..2 {
            assert_eq!(views_until_copies(&two, name, often).await, first);
        }
    }
    two.server.withdraw(&lent);
    end(two).await;
}

/// How many views there are before `often` copies.
async fn views_until_copies(two: &Two, name: &str, often: usize) -> usize {
    let fetched = async || {
        let fetched = two.peer.fetch(name).sharing(Sharing::View).await.unwrap();
        assert!(is_whole(&fetched, SMALL));
        fetched
    };
    let mut views = Vec::new();
    let before = asked(two);
    let mut latest = fetched().await;
    assert_eq!(before == asked(two), name == "small", "a view out of the catalogue needs no request");
    while latest.buf().is_foreign() {
        views.push(latest);
        latest = fetched().await;
    }
    for _ in 0..often {
        assert!(!fetched().await.buf().is_foreign());
    }
    views.len()
}

/// A server, and what dials it as members do.
async fn dialled(set: impl Fn(WorkerBuilder) -> WorkerBuilder) -> (Worker, GrpcPlane) {
    let server = set(Worker::builder("server").require(FabricKind::TCP)).start().await.unwrap();
    (server, GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap())
}

/// The name of member `number`.
fn member(number: usize) -> String {
    format!("/job:m/replica:0/task:{number}")
}

/// As many sessions as are allowed, and as many refused, of the names that `name` gives; then one leaves, and the next is let in.
async fn sessions_like(
    (server, plane): (Worker, GrpcPlane),
    (allowed, often): (usize, usize),
    setting: &str,
    name: impl Fn(usize) -> String,
) {
    let open = async |number| session(&plane, &name(number), 1, server.address()).await;
    let mut held: Vec<ControlSession> = Vec::new();
    for number in 0..allowed {
        let mut one = open(number).await;
        assert_eq!(refusal(&mut one).await, None);
        held.push(one);
    }
    for number in 0..often {
        let status = refusal(&mut open(allowed + number).await).await.expect(setting);
        assert!(status.code == Code::ResourceExhausted && status.message.contains(setting), "{status}");
    }
    drop(held.pop());
    until(async || refusal(&mut open(allowed + often).await).await.is_none()).await;
    for one in &mut held {
        assert_eq!(refusal(one).await, None, "those that were there live on");
    }
    server.shutdown().await;
}

async fn sessions(often: usize) {
    let dialled = dialled(|builder| builder.limits(|limits| limits.sessions_max = 3)).await;
    sessions_like(dialled, (3, often), "sessions_max", member).await;
}

async fn sessions_of_a_peer(often: usize) {
    let set = |builder: WorkerBuilder| {
        builder.limits(|limits| (limits.sessions_per_peer_max, limits.sessions_max) = (3, 10))
    };
    let dialled = dialled(set).await;
    sessions_like(dialled, (3, often), "sessions_per_peer_max", |_| member(0)).await;
}

async fn names(often: usize) {
    let set =
        |builder: WorkerBuilder| builder.limits(|limits| (limits.peers_max, limits.sessions_max) = (3, 10));
    let dialled = dialled(set).await;
    sessions_like(dialled, (3, often), "peers_max", member).await;
}

fn is_refused(answered: Result<(), Status>, word: &str) {
    let status = answered.unwrap_err();
    assert!(status.code == Code::ResourceExhausted && status.message.contains(word), "{status}");
}

async fn connections_of_a_peer(often: usize) {
    let (server, plane) =
        dialled(|builder| builder.limits(|limits| limits.connections_per_peer_max = 3)).await;
    let mut one = session(&plane, &member(0), 1, server.address()).await;
    let mut other = session(&plane, &member(0), 1, server.address()).await;
    for number in 0..3 {
        answer(&mut one, number).await.unwrap();
    }
    for number in 0..often as u32 {
        is_refused(answer(&mut other, number).await, "connections_per_peer_max");
    }
    drop(one);
    let mut next = often as u32..;
    while answer(&mut other, next.next().unwrap()).await.is_err() {
        tokio::task::yield_now().await;
    }
    for _ in 0..2 {
        answer(&mut other, next.next().unwrap()).await.unwrap();
    }
    server.shutdown().await;
}

async fn connections_of_a_session(often: usize) {
    let (server, plane) =
        dialled(|builder| builder.limits(|limits| limits.connections_per_peer_max = 64)).await;
    let mut one = session(&plane, &member(0), 1, server.address()).await;
    for number in 0..16 {
        answer(&mut one, number).await.unwrap();
    }
    for number in 0..often as u32 {
        assert!(answer(&mut one, 16 + number).await.is_err());
    }
    let mut other = session(&plane, &member(0), 1, server.address()).await;
    for number in 0..16 {
        answer(&mut other, number).await.unwrap();
    }
    server.shutdown().await;
}

fn list_request(request: u32) -> ControlFrame {
    ControlFrame::ListRequest { request, after: None, with_checksums: false }
}

/// The entries of the first page of the peer's list.
async fn listed(session: &mut ControlSession) -> usize {
    session.sender.send(list_request(1).encode()).await.unwrap();
    loop {
        let frame = session.receiver.recv().await.unwrap().unwrap();
        if let ControlFrame::ListResponse { entries, .. } = ControlFrame::decode(&frame).unwrap() {
            return entries.len();
        }
    }
}

async fn lists(often: usize) {
    let (server, plane) = dialled(|builder| builder.limits(|limits| limits.sessions_max = often + 1)).await;
    // What is counted for a peer is forgotten with its last session.
    let mut lasting = session(&plane, &member(0), 1, server.address()).await;
    for number in 0..300 {
        let name = format!("{number:03}{}", "x".repeat(1000));
        server.publish(&name, Tensor::from_values(server.pool(), &[1], &[5_u32]).unwrap()).unwrap();
    }
    for _ in 0..often {
        let greedy = session(&plane, &member(0), 1, server.address()).await;
        let status = outlasted(greedy, (0..10_000).map(list_request)).await;
        assert!(status.message.contains("list requests"), "{status}");
    }
    // All sessions of a peer have one turn for lists.
    assert_eq!(listed(&mut lasting).await, 256);
    let client = Worker::client().require(FabricKind::TCP).start().await.unwrap();
    // The last greedy session may still be ending.
    until(async || client.peer_at(server.address()).await.is_ok()).await;
    let peer = client.peer_at(server.address()).await.unwrap();
    assert_eq!(peer.list().await.unwrap().len(), 300);
    client.shutdown().await;
    server.shutdown().await;
}

async fn regions(often: usize) {
    let (server, plane) =
        dialled(|builder| builder.limits(|limits| limits.connections_per_peer_max = 1)).await;
    // What is counted for a peer is forgotten with its last session.
    let _lasting = session(&plane, &member(0), 1, server.address()).await;
    for _ in 0..often {
        let greedy = session(&plane, &member(0), 1, server.address()).await;
        let region = |region| RegionRecord { region, generation: 0, base: 0, length: 1, key: 0 };
        let add = |number| ControlFrame::RegionAdd { connection: 1, region: region(number) };
        let frames = std::iter::once(connect(1)).chain((0..=REGIONS_MAX as u32).map(add));
        let status = outlasted(greedy, frames).await;
        assert!(status.message.contains("more than 65536 regions"), "{status}");
    }
    let mut honest = session(&plane, &member(0), 1, server.address()).await;
    let mut next = 0..;
    while answer(&mut honest, next.next().unwrap()).await.is_err() {
        tokio::task::yield_now().await;
    }
    server.shutdown().await;
}
