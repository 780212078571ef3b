//! Valid frames on the stream, in pieces of any size, and invalid ones.

use std::{pin::pin, sync::Arc, task::Poll};

use tensorwire_fabric::{
    FabricError, Immediate, LossCause, PeerViolation, QueuePair, QueuePairConfig, RemoteRegion, Runtime,
};
use tensorwire_memory::GrantEnd;

use super::raw::{Frame, Local, RawPeer, address, aside, refusal};
use crate::contract::{
    Flavour, bounded,
    pair::{Grant, end_of, immediate, pattern, yield_once},
};

/// Three arrivals and 23 payload bytes, in all forms of frames.
fn conversation(grant: &Grant) -> Vec<u8> {
    let at = |offset: u64, frame: Frame| Frame { offset: frame.offset + offset, ..frame };
    let parted = at(8, Frame::write(grant, 7)).with_immediate(12);
    [
        Frame::write(grant, 5).with_body(b"plain"),
        at(5, Frame::write(grant, 3)).with_immediate(10).with_body(b"imm"),
        Frame::notify(11).encode(),
        parted.first(4).with_body(b"in t"),
        parted.after(4).with_body(b"wo "),
        at(15, Frame::write(grant, 8)).with_body(b"and more"),
        Frame::notify(13).encode(),
    ]
    .concat()
}

const PAYLOAD: &[u8; 23] = b"plainimmin two and more";
const ARRIVALS: [(u32, u64); 4] = [(10, 3), (11, 0), (12, 7), (13, 0)];

/// Makes progress like a task that awaits. Returns the next arrival, if there is one.
async fn drive(queue_pair: &QueuePair) -> Option<(u32, u64)> {
    match futures::poll!(pin!(queue_pair.next_arrival())) {
        Poll::Ready(arrival) => Some(immediate(arrival.unwrap())),
        Poll::Pending => None,
    }
}

async fn hear_all(local: &Local, queue_pair: &QueuePair, mut arrivals: Vec<(u32, u64)>) {
    while arrivals.len() < ARRIVALS.len() {
        arrivals.push(immediate(local.step("an arrival", queue_pair.next_arrival()).await.unwrap()));
    }
    assert_eq!(arrivals, ARRIVALS);
}

#[test]
fn frames_may_be_split_at_every_byte() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        for split in 0..=400 {
            let grant = local.receive.grant(PAYLOAD.len());
            let bytes = conversation(&grant);
            if split > bytes.len() {
                break;
            }
            raw.say(&bytes[..split]);
            let mut arrivals = Vec::new();
            while let Some(arrival) = drive(&queue_pair).await {
                arrivals.push(arrival);
            }
            raw.say(&bytes[split..]);
            hear_all(&local, &queue_pair, arrivals).await;
            assert_eq!(grant.take()[..], PAYLOAD[..], "split at {split}");
        }
    });
}

#[test]
fn frames_may_come_byte_by_byte() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        let grant = local.receive.grant(PAYLOAD.len());
        let mut arrivals = Vec::new();
        for byte in conversation(&grant) {
            raw.say(&[byte]);
            arrivals.extend(drive(&queue_pair).await);
            yield_once().await;
        }
        hear_all(&local, &queue_pair, arrivals).await;
        assert_eq!(grant.take()[..], PAYLOAD[..]);
        assert_eq!(queue_pair.stats().bytes_received, PAYLOAD.len() as u64);
    });
}

/// Garbage that is the same in every run, by Xorshift.
fn garbage(seed: u64, length: usize) -> Vec<u8> {
    pattern(length, seed.wrapping_mul(0x9E37_79B9))
}

async fn assert_works(local: &Local, queue_pair: &QueuePair, raw: &mut RawPeer) {
    let grant = local.receive.grant(4);
    raw.say(&Frame::write(&grant, 4).with_immediate(77).with_body(b"fine"));
    let arrival = local.step("an arrival", queue_pair.next_arrival()).await.unwrap();
    assert_eq!(immediate(arrival), (77, 4));
    assert_eq!(grant.take()[..], *b"fine");
}

/// Expects that the queue pair ends because the peer broke the rule `violation`, and that it sends the peer that
/// reason.
async fn assert_refused(local: &Local, queue_pair: &QueuePair, mut raw: RawPeer, violation: PeerViolation) {
    let error = end_of(&local.runtime, queue_pair).await;
    assert!(
        matches!(error, FabricError::PeerMisbehaved { violation: seen, .. } if seen == violation),
        "unexpected: {error}"
    );
    let reason = match violation {
        PeerViolation::Malformed => 1,
        PeerViolation::OutOfBounds => 4,
        PeerViolation::NotGranted => 6,
        other => panic!("no code is known for {other}"),
    };
    let last_words = aside(&local.runtime, move || raw.hear_end()).await;
    assert_eq!(last_words, refusal(reason, 0).encode());
}

#[test]
fn garbage_ends_only_its_own_connection() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let grant = local.receive.grant(1000);
        let (neighbour, mut raw_neighbour) = local.connect().await;
        for seed in 0..60 {
            let (queue_pair, mut raw) = local.connect().await;
            let length = 40 + garbage(seed, 1)[0] as usize * 37;
            // The fabric may end the connection in the middle of it.
            let _ = std::io::Write::write_all(&mut raw.stream, &garbage(seed, length));
            let error = end_of(&local.runtime, &queue_pair).await;
            assert!(
                matches!(error, FabricError::PeerMisbehaved { violation: PeerViolation::Malformed, .. }),
                "seed {seed}: {error}"
            );
            assert_works(&local, &neighbour, &mut raw_neighbour).await;
        }
        assert_eq!(grant.bytes(), [0; 1000]);
    });
}

#[test]
fn a_flipped_bit_in_a_header_never_reaches_memory_outside_the_grant() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let mut before = local.receive.pool.try_alloc(64).unwrap();
        let grant = local.receive.grant(64);
        let mut after = local.receive.pool.try_alloc(64).unwrap();
        before.fill(0xEE);
        after.fill(0xEE);
        let header = Frame::write(&grant, 32).with_immediate(5).encode();
        let mut ended = 0;
        for bit in 0..header.len() * 8 {
            let (queue_pair, mut raw) = local.connect().await;
            let mut flipped = header.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            flipped.extend([0x11; 32]);
            flipped.extend(Frame::notify(6).encode());
            raw.say(&flipped);
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut arrivals = 0;
            let error = loop {
                match local.step("the end", queue_pair.next_arrival()).await {
                    Ok(_) => arrivals += 1,
                    Err(error) => break error,
                }
            };
            match error {
                FabricError::PeerMisbehaved { .. } => ended += 1,
                // A value that means something else, but is allowed: another immediate, another offset in the
                // grant, a longer or shorter body.
                FabricError::PeerLost { cause: LossCause::EndOfFile, .. } => assert!(arrivals <= 2),
                other => panic!("bit {bit}: {other}"),
            }
        }
        assert!(ended > 200, "only {ended} of the flips were refused");
        assert!(before.iter().chain(&after[..]).all(|&byte| byte == 0xEE), "written outside the grant");
    });
}

#[test]
fn a_frame_that_does_not_continue_its_write_is_malformed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let grant = local.receive.grant(64);
        let whole = Frame::write(&grant, 64).with_immediate(1);
        let next = whole.after(16);
        let wrong = [
            Frame { offset: next.offset + 1, ..next },
            Frame { offset: next.offset - 1, ..next },
            Frame { rest: next.rest - 1, length: next.length - 1, ..next },
            Frame { key: next.key ^ 1, ..next },
            Frame { region: next.region + 1, ..next },
            Frame::write(&grant, 64),
            Frame::notify(3),
        ];
        for wrong in wrong {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&whole.first(16).with_body(&[1; 16]));
            raw.say(&wrong.encode());
            assert_refused(&local, &queue_pair, raw, PeerViolation::Malformed).await;
            assert_eq!(queue_pair.stats().bytes_received, 16);
        }
    });
}

#[test]
fn the_whole_range_of_a_write_is_checked_before_its_first_byte() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let grant = local.receive.grant(64);
        let announced = [
            (Frame { rest: 65, ..Frame::write(&grant, 64) }, PeerViolation::NotGranted),
            (Frame { rest: 1 << 40, ..Frame::write(&grant, 64) }, PeerViolation::OutOfBounds),
            (Frame { rest: u64::MAX, ..Frame::write(&grant, 64) }, PeerViolation::OutOfBounds),
        ];
        for (frame, violation) in announced {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&frame.with_body(&[9; 64]));
            assert_refused(&local, &queue_pair, raw, violation).await;
            assert_eq!(queue_pair.stats().bytes_received, 0);
            assert_eq!(grant.bytes(), [0; 64]);
        }
    });
}

#[test]
fn a_grant_that_ends_in_the_middle_of_a_write_stops_it() {
    // On one thread: between two turns of this test the receiver holds no access for a read.
    bounded(Flavour::CurrentThread, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        let grant = local.receive.grant(4096);
        let bytes = Frame::write(&grant, 4096).with_immediate(1).with_body(&[1; 4096]);
        raw.say(&bytes[..40 + 1000]);
        while queue_pair.stats().bytes_received < 1000 {
            yield_once().await;
        }
        let mut memory = grant.granted.end(GrantEnd::CancelAck).unwrap();
        assert_eq!(memory[..1000], [1; 1000]);
        memory.fill(0xAA);
        raw.say(&bytes[40 + 1000..]);
        assert_refused(&local, &queue_pair, raw, PeerViolation::NotGranted).await;
        assert!(memory.iter().all(|&byte| byte == 0xAA), "written after the grant's end");
    });
}

#[test]
fn a_refusal_names_the_receive_depth_that_ran_out() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let depths = QueuePairConfig { send_depth: 4, receive_depth: 5 };
        let (queue_pair, mut raw) = local.connect_with(depths).await;
        for value in 0..6 {
            raw.say(&Frame::notify(value).encode());
        }
        let (frame, raw) = aside(&local.runtime, move || (raw.hear_frame(), raw)).await;
        assert_eq!(frame, refusal(7, 5));
        drop(raw);
        for value in 0..5 {
            let arrival = local.step("an arrival", queue_pair.next_arrival()).await.unwrap();
            assert_eq!(immediate(arrival), (value, 0));
        }
        let error = end_of(&local.runtime, &queue_pair).await;
        assert!(matches!(error, FabricError::ReceiverNotReady { depth: 5, .. }), "unexpected: {error}");
    });
}

#[test]
fn a_refusal_without_a_known_reason_is_malformed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        for reason in [0, 13, 255] {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&refusal(reason, 0).encode());
            assert_refused(&local, &queue_pair, raw, PeerViolation::Malformed).await;
        }
    });
}

#[test]
fn a_flood_of_empty_frames_does_not_starve_the_neighbour() {
    bounded(Flavour::CurrentThread, |runtime: Arc<dyn Runtime>| async move {
        let local = Local::new(runtime);
        let (flooded, mut flooder) = local.connect().await;
        let (neighbour, mut raw) = local.connect().await;
        // Empty plain writes consume no receive: a peer may send them without end.
        let flood: Vec<u8> = (0..1000).flat_map(|_| Frame { kind: 1, ..Frame::default() }.encode()).collect();
        for _ in 0..20 {
            flooder.say(&flood);
            assert_works(&local, &neighbour, &mut raw).await;
        }
        assert!(flooded.failure().is_none());
        local.step("the answer", flooded.notify(Immediate(1))).await.unwrap();
        assert_eq!(flooder.hear_frame(), Frame::notify(1));
    });
}

#[test]
fn keys_and_tokens_are_not_printed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let token = address(&prepared.connection_data()).token;
        let shown = format!("{prepared:?} {:?}", prepared.connection_data());
        assert!(!shown.contains(&format!("{token:?}")), "{shown}");
        let (queue_pair, raw) = local.connect().await;
        let grant = local.receive.grant(4 << 20);
        let claimed = RemoteRegion { key: 0x7E57_1234, ..grant.region };
        queue_pair.add_remote_region(claimed);
        // Under way, so that every part that holds keys has some.
        drop(queue_pair.write(local.source.filled(4 << 20, 1), grant.range));
        let shown = format!("{queue_pair:?}");
        assert!(!shown.contains(&claimed.key.to_string()), "{shown}");
        drop(raw);
    });
}
