//! A neighbour that writes arbitrary bytes into its own pages and the socket, while the victim works.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

#[path = "../../../fuzz/input.rs"]
mod input;
#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

use std::os::fd::{AsFd, BorrowedFd};

use futures::FutureExt;
use tensorwire_fabric::{
    Access, Arrival, ConnectionData, Immediate, Look, Operation, ReadDestination, RegionGeneration, RegionId,
    RemoteRange, RemoteRegion, WorkRequest,
};
use tensorwire_memory::{Buf, BufMut, Exposure, GrantEnd, Granted};

use crate::{
    frame::{Address, Frame},
    limits::{FRAME_FDS, INLINE_BYTES, LEASES_MAX},
    rig::{Rig, memfd_of_sevens, on_a_runtime, sealed_block},
    ring::{Descriptor, Source},
    sys,
};

use self::input::Input;

/// Bytes of the victim's buffers and of the attacker's blocks.
const BYTES: usize = 4096;
const STEPS_MAX: usize = 200;
/// Slots of either ring.
const SLOTS: usize = 8;
/// Words of a page set, leases aside.
const WORDS: usize = (4096 + SLOTS * 128) / 8;
/// Words of the header that have a meaning, and some of the lease words.
const KNOWN_WORDS: [usize; 10] = [0, 64, 128, 192, 256, 264, 272, 280, WORDS * 8, WORDS * 8 + 8];

/// Connection data and frames of the socket.
pub fn shm_data(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(2) {
        0 => address(input.rest()),
        _ => frame(input.rest()),
    }
}

/// Checks that connection data is no address of this fabric, or that encoding the parsed address gives it again.
fn address(data: &[u8]) {
    let data = ConnectionData(data.to_vec());
    match Address::decode(&data) {
        Ok(address) => assert_eq!(address.encode(), data),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Checks a frame of the socket in the same way.
fn frame(data: &[u8]) {
    if let Ok(frame) = Frame::decode(data) {
        assert_eq!(frame.encode(), data);
        assert!(frame.fds() <= FRAME_FDS);
    }
}

/// Drives one connection against such a neighbour. Memory that it was not granted never changes; the connection is up,
/// or is over for a reason, and nothing happens after that.
pub fn shm_ring(data: &[u8]) {
    on_a_runtime(|| {
        let mut attack = Attack::new();
        let mut input = Input::new(data);
        for _ in 0..STEPS_MAX {
            if input.is_empty() {
                break;
            }
            attack.step(&mut input);
        }
        attack.end();
    });
}

struct Attack {
    rig: Rig,
    blocks: u32,
    granted: Option<Granted>,
    range: RemoteRange,
    key: u32,
    /// The bytes that the attacker may read, and their range.
    exposure: Exposure,
    readable: (RemoteRange, u32),
    /// Memory of the victim that no peer may write, filled with 1.
    own: Vec<BufMut>,
    operations: Vec<Operation>,
    arrivals: Vec<Arrival>,
}

impl Attack {
    fn new() -> Self {
        let rig = Rig::new();
        let ones = |rig: &Rig| {
            let mut buffer = rig.pool.try_alloc(BYTES).unwrap();
            buffer.fill(1);
            buffer
        };
        let before = ones(&rig);
        let (granted, range, key) = rig.lend(BYTES);
        let after = ones(&rig);
        let exposed = ones(&rig).freeze();
        let block = exposed.block().unwrap();
        let region = rig.regions.register(rig.runtime.as_ref(), block, Access::READABLE);
        let RemoteRegion { region, generation, key: read_key, .. } = region;
        let offset = exposed.offset() as u64;
        let readable = RemoteRange { region, generation, offset, length: BYTES as u64 };
        rig.victim.add_remote_region(attackers());
        Self {
            rig,
            blocks: 0,
            granted: Some(granted),
            range,
            key,
            exposure: exposed.expose(),
            readable: (readable, read_key),
            own: vec![before, after],
            operations: Vec::new(),
            arrivals: Vec::new(),
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        match choice & 15 {
            0..=3 => self.describe(input),
            4 => {
                let words = [(); 7].map(|()| input.number());
                self.rig.page.publish(self.rig.tail, &words);
                self.rig.tail += 1;
            }
            5 => self.rig.page.forge(input.below(WORDS + LEASES_MAX as usize) * 8, input.number()),
            6 | 7 => self.rig.page.forge(input.pick(&KNOWN_WORDS), input.number()),
            8 => self.send_block(input),
            9 => self.babble(input),
            10 | 11 => self.post(input),
            12 => self.take_arrivals(input),
            13 => self.change_grant(input),
            14 => self.operations.clear(),
            _ => self.rig.link.frames_came(),
        }
        if choice & 0xC0 != 0xC0 {
            self.rig.link.turn();
        }
    }

    /// Publishes a descriptor that is usually well-formed.
    fn describe(&mut self, input: &mut Input<'_>) {
        let (range, key) = if input.below(4) == 0 { self.readable } else { (self.range, self.key) };
        let range = RemoteRange {
            region: RegionId(if input.below(16) == 0 { input.u32() } else { range.region.0 }),
            generation: RegionGeneration(range.generation.0 ^ u32::from(input.below(16) == 0)),
            offset: range.offset.wrapping_add(input.near(BYTES as u64)),
            length: input.near(BYTES as u64),
        };
        let key = key ^ u32::from(input.below(16) == 0);
        let (index, offset, length) =
            (input.below(3) as u32, input.near(BYTES as u64), input.near(BYTES as u64));
        let source = match input.below(6) {
            0 => Source::Nothing,
            1 => Source::Inline,
            2 => Source::Block { index, offset },
            3 => {
                let (slot, generation) = (input.below(6) as u32, input.number());
                Source::Lent { index, offset, length, slot, generation }
            }
            4 => Source::Asked { tag: input.below(20) as u32 },
            _ => Source::Answer { tag: input.below(4) as u32, index, offset, length },
        };
        let immediate = input.flag().then(|| u32::from(input.u8()));
        let remote = (input.below(8) > 0).then_some((range, key));
        let fitting = match source {
            Source::Nothing if input.flag() => (immediate, None),
            Source::Lent { .. } => (immediate.or(Some(3)), None),
            Source::Asked { .. } => (None, Some((range, key))),
            Source::Answer { .. } => (None, None),
            _ => (immediate, remote),
        };
        let (immediate, remote) = if input.below(16) == 0 { (immediate, remote) } else { fitting };
        let continues = immediate.is_none() && input.below(4) == 0;
        self.rig.publish(&Descriptor { immediate, continues, is_quiet: false, remote, source });
    }

    /// Sends a block that usually follows the contract.
    fn send_block(&mut self, input: &mut Input<'_>) {
        let length = input.pick(&[BYTES, 2 * BYTES]);
        let is_right = input.below(8) > 0;
        let fd = if is_right || input.flag() { sealed_block(length) } else { memfd_of_sevens(length) };
        let index = self.blocks.wrapping_add(u32::from(!is_right && input.flag()));
        let length = if is_right { length as u64 } else { input.near(BYTES as u64) };
        self.speak(&Frame::Block { index, number: index.into(), length }.encode(), &[fd.as_fd()]);
        self.blocks += u32::from(is_right);
    }

    fn babble(&mut self, input: &mut Input<'_>) {
        let fd = sealed_block(BYTES);
        let fds = [fd.as_fd(), fd.as_fd()];
        let (bytes, count) = (input.bytes(80).to_vec(), input.below(3));
        self.speak(&bytes, &fds[..count]);
    }

    fn speak(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let _the_victim_may_have_hung_up = sys::send(self.rig.socket.as_fd(), bytes, fds);
        self.rig.link.frames_came();
    }

    /// Lets the victim post an operation.
    fn post(&mut self, input: &mut Input<'_>) {
        let length = input.pick(&[0, 1, INLINE_BYTES, INLINE_BYTES + 1, 1000]);
        let Ok(mut bytes) = self.rig.pool.try_alloc(length) else { return };
        bytes.fill(1);
        let remote = RemoteRange { length: length as u64, ..range_of(attackers()) };
        let immediate = Immediate(input.u8().into());
        let request = match input.below(4) {
            0 if length > 0 => WorkRequest::Read { remote, into: ReadDestination::new(bytes) },
            1 if length > 0 => WorkRequest::Lend { local: bytes.freeze(), immediate },
            2 => WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(immediate) },
            _ => WorkRequest::Write { local: bytes.freeze(), remote: Some(remote), immediate: None },
        };
        self.operations.extend(self.rig.victim.post_now(&request));
    }

    fn take_arrivals(&mut self, input: &mut Input<'_>) {
        let keep = input.flag();
        while let Some(Ok(arrival)) = self.rig.victim.next_arrival().now_or_never() {
            if let Arrival::Loan { buffer, .. } = &arrival {
                assert!(buffer.iter().all(|&byte| byte == 7), "a loan is of the attacker's blocks");
            }
            self.arrivals.push(arrival);
        }
        if !keep {
            self.arrivals.clear();
        }
    }

    /// Ends a grant, or grants memory again.
    fn change_grant(&mut self, input: &mut Input<'_>) {
        match self.granted.take() {
            Some(granted) => {
                let mut buffer = granted.end(GrantEnd::Content).unwrap();
                buffer.fill(1);
                self.own.push(buffer);
            }
            None => {
                if input.flag() {
                    self.own.truncate(2);
                }
                let (granted, range, key) = self.rig.lend(BYTES);
                (self.granted, self.range, self.key) = (Some(granted), range, key);
            }
        }
    }

    fn end(self) {
        let outcome = self.rig.settle();
        let stats = self.rig.victim.stats();
        assert_eq!(outcome == Look::Over, self.rig.victim.failure().is_some());
        if outcome == Look::Over {
            assert_ne!(self.rig.sees.closed(), 0, "the attacker is not told");
            assert_eq!(self.rig.link.turn(), Look::Over);
            assert_eq!(stats, self.rig.victim.stats(), "something moved after the end");
            for operation in self.operations {
                assert!(operation.now_or_never().is_some(), "an operation did not end");
            }
        }
        for own in &self.own {
            assert!(own.iter().all(|&byte| byte == 1), "memory changed that is nobody's but the victim's");
        }
        assert!(self.exposure.buf().iter().all(|&byte| byte == 1), "what may be read was written");
        // Memory that stayed granted would be leaked, and thousands of inputs run in one process.
        let granted = self.granted;
        drop(self.rig);
        granted.into_iter().for_each(|granted| drop(granted.end(GrantEnd::QueuePairDrained).unwrap()));
    }
}

/// The region in which the attacker says that the victim may write.
fn attackers() -> RemoteRegion {
    RemoteRegion { region: RegionId(9), generation: RegionGeneration(1), base: 0, length: 1 << 20, key: 5 }
}

fn range_of(region: RemoteRegion) -> RemoteRange {
    let RemoteRegion { region, generation, .. } = region;
    RemoteRange { region, generation, offset: 64, length: 0 }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::{replay::replay, *};

    #[test]
    fn d_fuzz_shm_data() {
        replay("shm_data", shm_data);
    }

    /// A seed of an earlier version reaches no code behind the check of the version.
    #[test]
    fn the_seeds_of_shm_data_are_of_this_version() {
        let seen = RefCell::new([false; 4]);
        replay("shm_data", |data| {
            let kind = match data {
                [0, data @ ..] => Address::decode(&ConnectionData(data.to_vec())).ok().map(|_| 0),
                [_, data @ ..] => Frame::decode(data).ok().map(|frame| match frame {
                    Frame::Hello { .. } => 1,
                    Frame::Ready => 2,
                    Frame::Block { .. } => 3,
                }),
                [] => None,
            };
            kind.into_iter().for_each(|kind: usize| seen.borrow_mut()[kind] = true);
        });
        assert_eq!(seen.into_inner(), [true; 4], "an address and the three frames");
    }

    #[test]
    fn d_fuzz_shm_ring() {
        replay("shm_ring", shm_ring);
    }
}
