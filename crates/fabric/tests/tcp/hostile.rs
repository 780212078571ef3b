//! Peers that break the rules of segments and reads, or never finish a write or read: each ends or stalls only its own
//! connection.

use tensorwire_fabric::{Access, FabricError, PeerViolation, QueuePair, RemoteRange, RemoteRegion};
use tensorwire_memory::{Buf, Exposure};

use super::raw::{Frame, Local, RawPeer};
use crate::contract::{
    Flavour, bounded,
    pair::{RegisteredPool, end_of, immediate, yield_once},
};

const MIB: usize = 1 << 20;

/// The header of a read; the number is `tag`.
fn read(region: &RemoteRegion, offset: u64, length: u64, tag: u32) -> Frame {
    Frame {
        kind: 6,
        region: region.region.0,
        generation: region.generation.0,
        key: region.key,
        immediate: tag,
        offset,
        rest: length,
        ..Frame::default()
    }
}

fn answer(tag: u32, length: u32, rest: u64) -> Frame {
    Frame { kind: 7, immediate: tag, length, rest, ..Frame::default() }
}

/// Memory that the raw peer may read.
struct Exposed {
    pool: RegisteredPool,
    buffer: Buf,
    region: RemoteRegion,
    _exposure: Exposure,
}

fn expose(local: &Local, length: usize) -> Exposed {
    let pool = RegisteredPool::new(&local.domain, "exposed", Access::READABLE, 64 << 20);
    let buffer = pool.filled(length, 9);
    let region = pool.region(buffer.block().unwrap());
    Exposed { region, _exposure: buffer.expose(), buffer, pool }
}

async fn assert_ends(local: &Local, queue_pair: &QueuePair, expected: PeerViolation) {
    let error = end_of(&local.runtime, queue_pair).await;
    let seen = matches!(error, FabricError::PeerMisbehaved { violation, .. } if violation == expected);
    assert!(seen, "unexpected: {error}");
}

async fn assert_works(local: &Local, neighbour: &QueuePair, raw: &mut RawPeer) {
    let grant = local.receive.grant(4);
    raw.say(&Frame::write(&grant, 4).with_immediate(77).with_body(b"fine"));
    let arrival = local.step("an arrival", neighbour.next_arrival()).await.unwrap();
    assert_eq!(immediate(arrival), (77, 4));
    assert_eq!(grant.take()[..], *b"fine");
}

#[test]
fn a_read_of_the_raw_peer_is_answered_in_frames() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let exposed = expose(&local, 3 * MIB);
        let (queue_pair, mut raw) = local.connect().await;
        let offset = exposed.buffer.offset() as u64;
        raw.say(&read(&exposed.region, offset, 2 * MIB as u64 + 5, 40).encode());
        raw.say(&read(&exposed.region, offset + 7, 3, 41).encode());
        let expected =
            [(40, MIB, 2 * MIB + 5, 0), (40, MIB, MIB + 5, MIB), (40, 5, 5, 2 * MIB), (41, 3, 3, 7)];
        for (tag, length, rest, start) in expected {
            assert_eq!(raw.hear_frame(), answer(tag, length as u32, rest as u64));
            assert!(raw.hear(length)[..] == exposed.buffer[start..start + length]);
        }
        assert!(queue_pair.failure().is_none());
    });
}

#[test]
fn frames_of_segments_and_reads_out_of_place_are_malformed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let exposed = expose(&local, 100);
        let grant = local.receive.grant(64);
        let segment = Frame { kind: 5, ..Frame::write(&grant, 8) };
        let (whole, ask) =
            (Frame::write(&grant, 64), read(&exposed.region, exposed.buffer.offset() as u64, 8, 1));
        let cases: [(&str, Vec<u8>); 7] = [
            ("a plain write inside a write", [segment.with_body(&[1; 8]), segment_end(&grant)].concat()),
            ("a read inside a write", [segment.with_body(&[1; 8]), ask.encode()].concat()),
            ("a read inside a range", [whole.first(8).with_body(&[1; 8]), ask.encode()].concat()),
            ("an answer to nothing", answer(1, 0, 0).encode()),
            ("an answer to nothing, with bytes", answer(0, 4, 4).with_body(b"what")),
            ("a segment that goes on too early", Frame { length: 4, ..segment }.encode()),
            ("a read of too much", read(&exposed.region, 0, (4 << 20) + 1, 1).encode()),
        ];
        for (what, bytes) in cases {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&bytes);
            println!("{what}");
            assert_ends(&local, &queue_pair, PeerViolation::Malformed).await;
        }
    });
}

fn segment_end(grant: &crate::contract::pair::Grant) -> Vec<u8> {
    Frame { offset: grant.range.offset + 8, ..Frame::write(grant, 8) }.with_body(&[2; 8])
}

#[test]
fn answers_that_do_not_fit_what_was_asked_are_malformed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let wrong: [fn(Frame) -> Frame; 4] = [
            |right| Frame { immediate: right.immediate + 1, ..right },
            |right| Frame { rest: right.rest + 1, ..right },
            |right| Frame { rest: right.rest - 1, length: right.length - 1, ..right },
            |right| Frame { length: 0, rest: 0, ..right },
        ];
        for wrong in wrong {
            let (queue_pair, mut raw) = local.connect().await;
            let region = RemoteRegion { base: 0, length: 1000, key: 5, ..expose(&local, 8).region };
            queue_pair.add_remote_region(region);
            let range =
                RemoteRange { region: region.region, generation: region.generation, offset: 3, length: 100 };
            let mut into = local.receive.pool.try_alloc(100).unwrap();
            into.fill(0);
            let operation = queue_pair.read(range, into);
            let asked = raw.hear_frame();
            assert_eq!(asked, Frame { key: 5, ..read(&region, 3, 100, asked.immediate) });
            let answer = wrong(answer(asked.immediate, 100, 100));
            raw.say(&answer.with_body(&vec![1; answer.length as usize]));
            let error = local.step("the read", operation).await.unwrap_err();
            let violation = PeerViolation::Malformed;
            assert!(
                matches!(error, FabricError::PeerMisbehaved { violation: seen, .. } if seen == violation),
                "unexpected: {error}"
            );
        }
        assert_eq!(local.receive.pool.stats().used_bytes, 0);
    });
}

#[test]
fn more_reads_than_are_answered_at_once_end_the_connection() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let exposed = expose(&local, 4 * MIB);
        let (neighbour, mut raw_neighbour) = local.connect().await;
        let (queue_pair, mut raw) = local.connect().await;
        // The flooder never takes an answer, so nothing is answered beyond what the sockets hold.
        let ask = read(&exposed.region, exposed.buffer.offset() as u64, 4 * MIB as u64, 1).encode();
        let _may_end_in_the_middle = std::io::Write::write_all(&mut raw.stream, &ask.repeat(200));
        assert_ends(&local, &queue_pair, PeerViolation::TooManyReads).await;
        assert_works(&local, &neighbour, &mut raw_neighbour).await;
        drop(raw);
        local.step("the close", queue_pair.close()).await;
        let Exposed { pool, buffer, _exposure, .. } = exposed;
        drop((buffer, _exposure, queue_pair));
        // The answer under way is released when the fabric gives up the farewell behind it.
        let returned = async {
            while pool.pool.stats().used_bytes > 0 {
                yield_once().await;
            }
        };
        local.step("the buffer's return", returned).await;
    });
}

#[test]
fn what_is_begun_and_never_ended_holds_one_connection() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (neighbour, mut raw_neighbour) = local.connect().await;
        let grant = local.receive.grant(1000);
        let whole = Frame::write(&grant, 1000).with_immediate(1).with_body(&[7; 1000]);
        let mut held = Vec::new();
        for cut in [1, 39, 40, 41, 700, 1039] {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&whole[..cut]);
            let landed = cut.saturating_sub(40) as u64;
            while queue_pair.stats().bytes_received < landed {
                drop(futures::poll!(std::pin::pin!(queue_pair.next_arrival())));
                yield_once().await;
            }
            held.push((queue_pair, raw));
            assert_works(&local, &neighbour, &mut raw_neighbour).await;
        }
        // This side may close at any time, and then owns the memory again.
        for (queue_pair, raw) in held {
            local.step("the close", queue_pair.close()).await;
            drop(raw);
        }
        let mut memory = grant.granted.end(tensorwire_memory::GrantEnd::QueuePairDrained).unwrap();
        memory.fill(0);
        assert_works(&local, &neighbour, &mut raw_neighbour).await;
    });
}
