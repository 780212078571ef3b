//! The actions of the hostile process. They may block, because it has no runtime.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
};

use tensorwire_fabric::{ConnectionData, RegionGeneration, RegionId, RemoteRange, RemoteRegion};

use super::raw::{Frame, NONCE, RawPeer, WELCOME, hello, refusal};
use crate::process::{listen, say};

const MIB: u32 = 1 << 20;

/// One action on an open connection; `u64` is its round.
pub(crate) type Act = fn(&mut RawPeer, &Known, u64);

/// What the hostile process knows, like any peer.
pub(crate) struct Known {
    pub(crate) data: ConnectionData,
    pub(crate) region: RemoteRegion,
    pub(crate) range: RemoteRange,
    /// A region that may be read.
    pub(crate) readable: RemoteRegion,
    /// Where its exposed bytes begin.
    pub(crate) offset: u64,
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> ConnectionData {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    ConnectionData((0..text.len()).step_by(2).map(byte).collect())
}

impl Known {
    pub(crate) fn describe(&self) -> String {
        let Self { data, region, range, readable, offset } = self;
        format!(
            "{} {} {} {} {} {} {} {} {} {} {offset}",
            hex(&data.0),
            region.region.0,
            region.generation.0,
            region.length,
            region.key,
            range.offset,
            range.length,
            readable.region.0,
            readable.generation.0,
            readable.key,
        )
    }

    fn understand(text: &str) -> Self {
        let (data, rest) = text.split_once(' ').unwrap();
        let numbers: Vec<u64> = rest.split(' ').map(|number| number.parse().unwrap()).collect();
        let [
            region,
            generation,
            length,
            key,
            offset,
            grant,
            readable,
            readable_generation,
            readable_key,
            exposed,
        ] = numbers[..]
        else {
            panic!("{text}")
        };
        let whole = |region, generation, key| RemoteRegion {
            region: RegionId(region as u32),
            generation: RegionGeneration(generation as u32),
            base: 0,
            length,
            key: key as u32,
        };
        let region = whole(region, generation, key);
        let range =
            RemoteRange { region: region.region, generation: region.generation, offset, length: grant };
        let readable = whole(readable, readable_generation, readable_key);
        Self { data: unhex(data), region, range, readable, offset: exposed }
    }

    /// A valid frame: `length` bytes to the start of the granted memory.
    fn write(&self, length: u32) -> Frame {
        Frame {
            kind: 1,
            region: self.range.region.0,
            generation: self.range.generation.0,
            key: self.region.key,
            length,
            offset: self.range.offset,
            rest: u64::from(length),
            ..Frame::default()
        }
    }

    fn read(&self, length: u64) -> Frame {
        Frame {
            kind: 6,
            region: self.readable.region.0,
            generation: self.readable.generation.0,
            key: self.readable.key,
            offset: self.offset,
            rest: length,
            ..Frame::default()
        }
    }
}

/// Connects for each line of the victim, and does `act` each time.
pub(crate) fn commit(act: Act) {
    loop {
        let line = listen();
        let Some((round, known)) = line.split_once(' ') else { return };
        let known = Known::understand(known);
        let mut raw = RawPeer::dial(&known.data);
        raw.say(&hello(&known.data, NONCE));
        assert_eq!(raw.hear(WELCOME.len()), WELCOME);
        say("in");
        act(&mut raw, &known, round.parse().unwrap());
        // Until the victim ends the connection.
        let _reset_or_end = raw.stream.read_to_end(&mut Vec::new());
        say("out");
    }
}

/// Does `act` to the listener of the victim's line.
pub(crate) fn commit_outside(act: fn(&ConnectionData)) {
    act(&unhex(&listen()));
}

/// Sends `bytes`. Returns whether the victim still reads.
fn shout(raw: &mut RawPeer, bytes: &[u8]) -> bool {
    raw.stream.write_all(bytes).is_ok()
}

/// Sends `bytes` repeatedly until the victim ends the connection.
fn shout_for_ever(raw: &mut RawPeer, bytes: &[u8]) {
    let many = bytes.repeat((256 << 10) / bytes.len() + 1);
    while shout(raw, &many) {}
}

pub(crate) fn length_above_the_limit(raw: &mut RawPeer, known: &Known, round: u64) {
    let length = [MIB + 1, u32::MAX][round as usize % 2];
    shout(raw, &Frame { rest: u64::from(length), ..Frame { length, ..known.write(8) } }.with_body(&[1; 8]));
}

pub(crate) fn longer_than_its_write(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &Frame { rest: 7, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn empty_but_more(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &Frame { length: 0, ..known.write(8) }.encode());
}

pub(crate) fn announce_4_gib(raw: &mut RawPeer, known: &Known, round: u64) {
    let rest = (4 << 30) + round;
    shout(raw, &Frame { rest, ..known.write(MIB) }.with_body(&vec![1; MIB as usize]));
}

pub(crate) fn overflow(raw: &mut RawPeer, known: &Known, round: u64) {
    shout(raw, &Frame { offset: u64::MAX - 7 * round, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn wrong_region(raw: &mut RawPeer, known: &Known, round: u64) {
    let region = [u32::MAX, known.region.region.0.wrapping_add(1000)][round as usize % 2];
    shout(raw, &Frame { region, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn wrong_generation(raw: &mut RawPeer, known: &Known, round: u64) {
    let generation = known.region.generation.0.wrapping_add(1 + round as u32);
    shout(raw, &Frame { generation, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn wrong_key(raw: &mut RawPeer, known: &Known, round: u64) {
    let key = known.region.key ^ (1 << (round % 32));
    shout(raw, &Frame { key, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn beside_the_grant(raw: &mut RawPeer, known: &Known, round: u64) {
    // Only the last byte is out of bounds, or all bytes are.
    let offset = known.range.offset + [known.range.length - 7, known.range.length][round as usize % 2];
    shout(raw, &Frame { offset, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn write_to_readable(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &Frame { kind: 1, length: 8, ..known.read(8) }.with_body(&[1; 8]));
}

pub(crate) fn read_of_writable(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &Frame { kind: 6, length: 0, ..known.write(8) }.encode());
}

pub(crate) fn unknown_refusal(raw: &mut RawPeer, _: &Known, round: u64) {
    shout(raw, &refusal(200 + round as u8, 0).encode());
}

/// Reads of all exposed bytes. The process takes none of the answers.
pub(crate) fn flood_of_reads(raw: &mut RawPeer, known: &Known, _: u64) {
    shout_for_ever(raw, &known.read(64 << 10).encode());
}

pub(crate) fn flood_of_answers(raw: &mut RawPeer, _: &Known, round: u64) {
    let answer = Frame { kind: 7, immediate: round as u32, length: 4, rest: 4, ..Frame::default() };
    shout_for_ever(raw, &answer.with_body(&[1; 4]));
}

pub(crate) fn flood_of_notifications(raw: &mut RawPeer, _: &Known, _: u64) {
    shout_for_ever(raw, &Frame::notify(9).encode());
}

pub(crate) fn half_close(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &known.write(8).with_body(&[1; 8]));
    raw.stream.shutdown(Shutdown::Write).unwrap();
}

pub(crate) fn half_close_within_a_frame(raw: &mut RawPeer, known: &Known, round: u64) {
    let frame = known.write(64).with_body(&[1; 64]);
    shout(raw, &frame[..[1, 40, 100][round as usize % 3]]);
    raw.stream.shutdown(Shutdown::Write).unwrap();
}

pub(crate) fn goodbye_and_more(raw: &mut RawPeer, known: &Known, _: u64) {
    shout(raw, &Frame { kind: 3, ..Frame::default() }.encode());
    shout(raw, &Frame { region: 77, ..known.write(8) }.with_body(&[1; 8]));
}

pub(crate) fn refuse_everything(raw: &mut RawPeer, _: &Known, _: u64) {
    shout_for_ever(raw, &refusal(1, 0).encode());
}

pub(crate) fn truncated_then_silent(raw: &mut RawPeer, known: &Known, round: u64) {
    let frame = Frame { rest: u64::from(MIB) / 16, ..known.write(1000) }.with_body(&[1; 1000]);
    shout(raw, &frame[..[1, 3, 39, 40, 41, 500, 1039, 1040][round as usize % 8]]);
}

pub(crate) fn endless_writes(raw: &mut RawPeer, known: &Known, _: u64) {
    shout_for_ever(raw, &known.write(5000).with_body(&[1; 5000]));
}

pub(crate) fn endless_empty_writes(raw: &mut RawPeer, _: &Known, _: u64) {
    shout_for_ever(raw, &Frame { kind: 1, ..Frame::default() }.encode());
}

/// Bytes that follow from a seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }
}

pub(crate) fn random_bytes(raw: &mut RawPeer, _: &Known, seed: u64) {
    let mut random = Random::new(seed);
    let bytes: Vec<u8> = (0..random.below(20_000)).map(|_| random.next() as u8).collect();
    shout(raw, &bytes);
    let _may_be_reset = raw.stream.shutdown(Shutdown::Write);
}

/// Valid frames, except for some bits of their headers.
pub(crate) fn spoilt_frames(raw: &mut RawPeer, known: &Known, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..random.below(40) + 1 {
        let length = random.below(2000) as u32;
        let body = vec![seed as u8; length as usize];
        let mut frame = match random.below(4) {
            0 => known.write(length).with_body(&body),
            1 => known.write(length).with_immediate(seed as u32).with_body(&body),
            2 => known.read(u64::from(length)).encode(),
            _ => Frame { kind: 5, ..known.write(length) }.with_body(&body),
        };
        for _ in 0..random.below(3) {
            let at = random.below(40) as usize;
            frame[at] ^= 1 << random.below(8);
        }
        if !shout(raw, &frame) {
            break;
        }
    }
    let _may_be_reset = raw.stream.shutdown(Shutdown::Write);
}

fn dial(to: &ConnectionData) -> TcpStream {
    RawPeer::dial(to).stream
}

/// One byte of a valid hello for each line of the victim.
pub(crate) fn slow_hello(to: &ConnectionData) {
    let mut stream = dial(to);
    say("in");
    for byte in hello(to, NONCE) {
        if listen() == "enough" {
            break;
        }
        let _may_be_cut = stream.write_all(&[byte]);
    }
    let mut rest = Vec::new();
    let _reset_or_end = stream.read_to_end(&mut rest);
    assert!(rest.is_empty(), "it was let in");
    say("cut");
}

/// A thousand streams, of which each sends less than a hello.
pub(crate) fn half_open(to: &ConnectionData) {
    let hello = hello(to, NONCE);
    let streams: Vec<TcpStream> = (0..1000)
        .map(|number| {
            let mut stream = dial(to);
            let _may_be_cut = stream.write_all(&hello[..number % hello.len()]);
            stream
        })
        .collect();
    say(&streams.len().to_string());
    // Until the victim ends the connection.
    listen();
}
