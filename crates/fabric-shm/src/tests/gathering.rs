//! Pieces of one write that are copied together.

use std::os::fd::AsFd;

use tensorwire_fabric::{Arrival, FabricError, Immediate, LatestTargets, PeerViolation, RemoteRange};
use tensorwire_memory::{GrantEnd, Granted, copy::CopyReason};

use super::{Rig, memfd_of_sevens, on_a_runtime};
use crate::{
    copying::{Copying, Payload, Turn},
    frame::Frame,
    helper::{HelpedCopy, Segment},
    limits::{CHUNK_BYTES, GATHER_BYTES, HELP_BYTES},
    ring::{Descriptor, Source},
    sys,
};

const BLOCK_BYTES: usize = 8 << 20;
/// The first three together are long enough for a second core, and each of them is not.
const LENGTHS: [usize; 4] = [700_000, 2 * CHUNK_BYTES + 1, 1_000_000, GATHER_BYTES];
const _: () = assert!(LENGTHS[0] + LENGTHS[1] + LENGTHS[2] > HELP_BYTES);

/// What the peer's block has at an offset.
fn byte_at(offset: usize) -> u8 {
    (offset / 997) as u8
}

/// Sends a sealed block whose bytes differ.
fn send_block(rig: &Rig) {
    use std::os::unix::fs::FileExt;
    let fd = memfd_of_sevens(BLOCK_BYTES);
    let bytes: Vec<_> = (0..BLOCK_BYTES).map(byte_at).collect();
    std::fs::File::from(fd.try_clone().unwrap()).write_all_at(&bytes, 0).unwrap();
    sys::seal(fd.as_fd()).unwrap();
    let frame = Frame::Block { index: 0, number: 0, length: BLOCK_BYTES as u64 }.encode();
    sys::send(rig.socket.as_fd(), &frame, &[fd.as_fd()]).unwrap();
}

/// Where the pieces come from, and where in the grant they go: the first one to the end.
fn places() -> [(usize, usize, usize); 4] {
    let mut ends = LENGTHS.iter().sum::<usize>();
    let mut sources = [3 << 20, 17, 1 << 20, 5 << 20].into_iter();
    LENGTHS.map(|length| {
        ends -= length;
        (sources.next().unwrap(), ends, length)
    })
}

/// The pieces of a write that begin at `starts` of the grant; `last_key` is the key of the last one.
fn pieces(range: RemoteRange, (key, last_key): (u32, u32), starts: [usize; 4]) -> [Descriptor; 4] {
    std::array::from_fn(|at| {
        let is_last = at + 1 == LENGTHS.len();
        let offset = range.offset + starts[at] as u64;
        let remote = RemoteRange { offset, length: LENGTHS[at] as u64, ..range };
        Descriptor {
            immediate: is_last.then_some(9),
            continues: !is_last,
            is_quiet: false,
            remote: Some((remote, if is_last { last_key } else { key })),
            source: Source::Block { index: 0, offset: places()[at].0 as u64 },
        }
    })
}

/// Writes all pieces to their places; `last_key` is the key of the last one.
fn publish(rig: &mut Rig, range: RemoteRange, key: u32, last_key: u32) {
    let starts = places().map(|(_, to, _)| to);
    pieces(range, (key, last_key), starts).iter().for_each(|piece| rig.publish(piece));
}

/// A rig whose victim knows the block, and that it is resident where the pieces are.
fn rig() -> Rig {
    let mut rig = Rig::new();
    send_block(&rig);
    let (granted, range, key) = rig.lend(LENGTHS.iter().sum());
    publish(&mut rig, range, key, key);
    rig.settle();
    assert_came(granted, 4);
    rig
}

/// Checks so many of the pieces.
fn assert_came(granted: Granted, pieces: usize) {
    let bytes = granted.end(GrantEnd::Content).unwrap();
    for (source, to, length) in places().into_iter().take(pieces) {
        let came = &bytes[to..to + length];
        let wrong = came.iter().enumerate().find(|(at, byte)| **byte != byte_at(source + at));
        assert!(wrong.is_none(), "the piece at {to}: {wrong:?}");
    }
}

#[test]
fn the_pieces_of_a_write_are_copied_together_and_arrive_once() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        send_block(&rig);
        // The first copies make the block resident, and are made alone.
        for round in 1..=5 {
            let (granted, range, key) = rig.lend(LENGTHS.iter().sum());
            publish(&mut rig, range, key, key);
            rig.settle();
            assert_eq!((rig.sees.consumed(), rig.victim.stats().arrivals), (4 * round, round));
            let arrival = futures::FutureExt::now_or_never(rig.victim.next_arrival()).unwrap().unwrap();
            let length = LENGTHS.iter().sum::<usize>() as u64;
            assert_eq!(arrival, Arrival::Immediate { immediate: Immediate(9), length });
            assert_came(granted, 4);
        }
    });
}

#[test]
fn a_piece_without_a_right_ends_the_connection_at_its_turn() {
    on_a_runtime(|| {
        let mut rig = rig();
        let (granted, range, key) = rig.lend(LENGTHS.iter().sum());
        publish(&mut rig, range, key, key ^ 1);
        let failure = rig.failure();
        assert!(
            matches!(&failure, FabricError::PeerMisbehaved { violation: PeerViolation::WrongKey, .. }),
            "{failure:?}"
        );
        assert_eq!((rig.victim.stats().arrivals, rig.sees.consumed()), (1, 4 + 3));
        assert_came(granted, 3);
    });
}

/// How many pieces are copied with the first one, of a write whose pieces begin at these places of the grant.
fn gathered(rig: &mut Rig, starts: [usize; 4]) -> usize {
    let (_granted, range, key) = rig.lend(LENGTHS.iter().sum());
    let head = rig.sees.consumed();
    let pieces = pieces(range, (key, key), starts);
    pieces.iter().for_each(|piece| rig.publish(piece));
    let (destination, _) = rig.regions.write_target(&pieces[0].remote.unwrap().0, key).unwrap();
    let connection = rig.link.connection();
    let blocks = [connection.blocks.get(0).unwrap()];
    let latest = &mut LatestTargets::default();
    let mut turn = Turn { connection, head, continues: true, latest, blocks: &blocks };
    let payload = Payload::new((0, places()[0].0 as u64), destination, CopyReason::ShmPayload);
    let gathered = Copying::default().gathered(&payload, &mut turn);
    // The target copies all of them after that, with the second core or without it.
    rig.settle();
    assert_eq!(rig.sees.consumed(), head + 4);
    gathered
}

#[test]
fn pieces_that_two_cores_would_write_at_once_are_not_copied_together() {
    on_a_runtime(|| {
        let mut rig = rig();
        let [first, second, third, _] = LENGTHS;
        let apart = [0, first, first + second, first + second + third];
        assert_eq!(gathered(&mut rig, apart), 3);
        for (at, place) in [(1, first - 1), (2, 5), (3, first + second + third - 1)] {
            let mut places = apart;
            places[at] = place;
            // What is before it is copied together, if that is long enough.
            assert_eq!(gathered(&mut rig, places), at - 1, "piece {at} at {place}");
        }
    });
}

#[tokio::test]
async fn segments_of_any_length_are_each_copied_once() {
    let rig = Rig::new();
    let mapping = super::helping::source(4 << 20);
    let (granted, target) = super::helping::target(&rig, 3 << 20);
    let lengths = [1, CHUNK_BYTES, CHUNK_BYTES - 1, 1 << 20, HELP_BYTES - (1 << 20) - CHUNK_BYTES, 0, 5];
    let mut end = granted.offset() as u64;
    let segments = lengths.map(|length| {
        let part = target.part(end, length as u64).unwrap();
        end += length as u64;
        Segment::new(mapping.clone(), 100, part).unwrap()
    });
    let written = lengths.iter().sum::<usize>();
    let copied = crate::helper::SharedCopy::new(segments.into(), (CopyReason::ShmPayload, false)).unwrap();
    let copied = std::sync::Arc::new(copied);
    let mut own = HelpedCopy::of(copied.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| copied.help());
        while !own.steps(CHUNK_BYTES).unwrap().1 {}
    });
    drop(own);
    let bytes = granted.end(GrantEnd::Content).unwrap();
    assert!(bytes[..written].iter().all(|byte| *byte == 7) && bytes[written..].iter().all(|byte| *byte == 0));
}
