//! The protocol between two connections in one thread, over a channel of plain memory: the cost of flow control without
//! a fabric. 64 fetches of 8 bytes outstanding, all of them hits. Prints the arrivals per request of each mode.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{
    collections::VecDeque,
    future,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use futures::{
    future::BoxFuture,
    stream::{FuturesUnordered, StreamExt},
};
use tensorwire_protocol::{
    Allocator, Channel, ChannelError, Connection, DataType, Destination, LentEnd, Metadata, Mode, Parameters,
    RecordSlot, Responded, RingSpan, Rings, Scope, Shape, Source, Status, Take, TensorRequest,
    limits::{RESULT_BYTES, RING_BYTES_MAX},
};

const OUTSTANDING: usize = 64;

/// One end: its ring, its slots and its arrivals.
#[derive(Debug)]
struct End {
    ring: Vec<u8>,
    slots: [Vec<u8>; 2],
    arrivals: VecDeque<(u32, u64)>,
}

impl Default for End {
    fn default() -> Self {
        Self { ring: vec![0; RING_BYTES_MAX as usize], slots: Default::default(), arrivals: VecDeque::new() }
    }
}

type SharedEnd = Arc<Mutex<End>>;

fn lock(end: &SharedEnd) -> MutexGuard<'_, End> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Memory {
    own: SharedEnd,
    peer: SharedEnd,
}

/// Memory that is granted to the peer.
#[derive(Debug)]
enum Lent {
    Content,
    Ring,
    Slots,
}

fn destination(capacity: u64) -> Destination {
    Destination { region: 1, generation: 1, offset: 0, capacity, result: None }
}

impl Channel for Memory {
    type Bytes = [u8; 8];
    type Lent = Lent;
    type Write = future::Ready<Result<(), ChannelError>>;

    fn post_message(
        &self,
        _: Destination,
        first: RingSpan,
        second: RingSpan,
        bytes: &[u8],
    ) -> Result<(), ChannelError> {
        let mut peer = lock(&self.peer);
        let (head, tail) = bytes.split_at(first.length as usize);
        for (span, part) in [(first, head), (second, tail)] {
            let start = span.offset as usize;
            peer.ring[start..start + part.len()].copy_from_slice(part);
        }
        peer.arrivals.push_back((tensorwire_protocol::MESSAGE_IMMEDIATE, bytes.len() as u64));
        Ok(())
    }

    fn post_acknowledgement(&self) -> Result<(), ChannelError> {
        lock(&self.peer).arrivals.push_back((tensorwire_protocol::ACKNOWLEDGEMENT_IMMEDIATE, 0));
        Ok(())
    }

    fn post_record(&self, slot: RecordSlot, bytes: &[u8]) -> Result<(), ChannelError> {
        let mut peer = lock(&self.peer);
        peer.slots[slot as usize] = bytes.to_vec();
        peer.arrivals.push_back((tensorwire_protocol::ACKNOWLEDGEMENT_IMMEDIATE, bytes.len() as u64));
        Ok(())
    }

    fn write_content(
        &self,
        _: Option<[u8; 8]>,
        destination: Option<(Destination, u64)>,
        immediate: Option<u32>,
        _: Option<[u8; RESULT_BYTES]>,
    ) -> Self::Write {
        let length = destination.map_or(0, |(destination, _)| destination.capacity);
        lock(&self.peer).arrivals.extend(immediate.map(|immediate| (immediate, length)));
        future::ready(Ok(()))
    }

    fn settle(lent: Lent) -> Result<Lent, Status> {
        Ok(lent)
    }

    fn content(_: &Lent) -> &[u8] {
        &[]
    }

    fn result(_: &Lent) -> Option<[u8; RESULT_BYTES]> {
        None
    }

    fn read(&self, ring: &Lent, offset: u64, into: &mut [u8]) -> Result<(), ChannelError> {
        let (own, start) = (lock(&self.own), offset as usize);
        match ring {
            Lent::Slots => into.copy_from_slice(&own.slots[usize::from(offset > 0)]),
            Lent::Content | Lent::Ring => into.copy_from_slice(&own.ring[start..start + into.len()]),
        }
        Ok(())
    }

    async fn make_ring(&self, _: u32) -> Option<(Lent, Destination)> {
        None
    }

    fn take_back(&self, _: Lent, _: LentEnd) {}
}

/// A store that always has a value of 8 bytes, and memory for one.
struct Always;

fn metadata() -> Metadata {
    let shape = Shape::new([8]).expect("a shape");
    Metadata::new(DataType::U8, shape).expect("metadata")
}

impl Allocator for Always {
    type Lent = Lent;

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        Ok((Lent::Content, destination(metadata.byte_length)))
    }

    fn copy_eager(&self, _: &Metadata, _: &[u8]) -> Lent {
        Lent::Content
    }
}

impl Source for Always {
    type Bytes = [u8; 8];
    type Taken = ();
    type Taking = future::Ready<Result<(), Status>>;

    fn take(&self, _: &TensorRequest) -> Take<(), Self::Taking> {
        Take::Now(Ok(()))
    }

    fn metadata((): &()) -> &Metadata {
        static METADATA: LazyLock<Metadata> = LazyLock::new(metadata);
        &METADATA
    }

    fn bytes((): &()) -> Option<&[u8; 8]> {
        Some(&[7; 8])
    }

    fn put_back(&self, (): ()) {}
}

struct Pair {
    ends: [(Arc<Connection<Memory>>, SharedEnd); 2],
    tasks: FuturesUnordered<BoxFuture<'static, bool>>,
    arrivals: u64,
}

impl Pair {
    fn new(parameters: Parameters) -> Self {
        let shared = [SharedEnd::default(), SharedEnd::default()];
        let tasks = FuturesUnordered::new();
        let ends = [0, 1].map(|side| {
            let channel = Memory { own: shared[side].clone(), peer: shared[1 - side].clone() };
            let peer = destination(RING_BYTES_MAX.into());
            let rings = Rings { own: Lent::Ring, own_slots: Lent::Slots, peer };
            let connection = Connection::new(channel, rings, parameters, parameters);
            let housekeeping = connection.clone().housekeeping();
            tasks.push(Box::pin(async move {
                housekeeping.await;
                false
            }) as BoxFuture<'static, bool>);
            (connection, shared[side].clone())
        });
        Self { ends, tasks, arrivals: 0 }
    }

    /// Makes `OUTSTANDING` fetches at once, and completes them.
    fn round(&mut self) {
        for key in 0..OUTSTANDING {
            let connection = self.ends[0].0.clone();
            self.tasks.push(Box::pin(async move {
                let key = format!("/job:ps/replica:0/task:0/variables/layer{key}/kernel");
                connection.receive(Scope::Published, &key, &Always).await.expect("a value");
                true
            }));
        }
        let mut context = Context::from_waker(Waker::noop());
        let mut done = 0;
        while done < OUTSTANDING {
            while let Poll::Ready(Some(is_receive)) = self.tasks.poll_next_unpin(&mut context) {
                done += usize::from(is_receive);
            }
            for side in [0, 1] {
                self.take(side);
            }
        }
    }

    fn take(&mut self, side: usize) {
        let (connection, end) = &self.ends[side];
        let source = Arc::new(Always);
        loop {
            let Some((immediate, length)) = lock(end).arrivals.pop_front() else { return };
            self.arrivals += 1;
            let mut requests = Vec::new();
            let taken = connection.on_immediate(immediate, length, |request| requests.push(request));
            taken.expect("a peer that keeps the rules");
            for request in requests {
                let Responded::Waiting(answer) = connection.respond(request, &source) else { continue };
                self.tasks.push(Box::pin(async move {
                    answer.run().await;
                    false
                }));
            }
        }
    }
}

fn connection(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("connection");
    group.throughput(Throughput::Elements(OUTSTANDING as u64));
    for (name, mode) in [("counted", Mode::Counted), ("original", Mode::Original)] {
        let mut pair = Pair::new(Parameters { mode, eager_bytes_max: 0, ..Parameters::default() });
        // The first round learns the metadata and the keys.
        pair.round();
        let before = pair.arrivals;
        let rounds = 1000;
        (0..rounds).for_each(|_| pair.round());
        let requests = rounds * OUTSTANDING;
        let arrivals = (pair.arrivals - before) as f64 / requests as f64;
        println!("connection/{name}: {arrivals:.3} arrivals per request");
        group.bench_function(format!("{name}, 64 outstanding hits of 8 B"), |bencher| {
            bencher.iter(|| pair.round());
        });
    }
    group.finish();
}

criterion_group!(benches, connection);
criterion_main!(benches);
