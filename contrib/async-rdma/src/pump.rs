//! The task that moves a connection's frames.
//!
//! Frames are numbered. Frame `n` is in slot `n` mod [`SLOTS`], and its immediate is `n`, so that frames whose
//! immediates overtook each other are taken in order. An immediate with [`ACKNOWLEDGES`] has the number up to which the
//! peer has emptied its slots.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_rdma::{LocalMr, LocalMrReadAccess, LocalMrWriteAccess, MrToken, Rdma, RemoteMr};
use futures::{
    FutureExt, StreamExt,
    future::BoxFuture,
    stream::{FuturesOrdered, FuturesUnordered},
};
use tensorwire_fabric::{
    Arrival, FabricError, Immediate, LossCause, PeerViolation, RegionTable, RemoteRange, Runtime, SlotKey,
};
use tensorwire_memory::copy::{CopyReason, copy_bytes};

use crate::{
    fabric::KIND,
    frame::{Frame, HEADER, PAYLOAD, Reason, SLOT, SLOTS},
    link::{AsyncRdmaLink, Outgoing},
};

/// A bit of an immediate: the other bits are an acknowledged number, not a frame's.
const ACKNOWLEDGES: u32 = 1 << 31;
const NUMBERS: u32 = ACKNOWLEDGES - 1;
/// How long a farewell may take.
const LINGER: Duration = Duration::from_secs(1);

/// The resources of a connection.
pub(crate) struct Ground {
    pub(crate) link: Arc<AsyncRdmaLink>,
    pub(crate) table: Arc<RegionTable>,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) rdma: Arc<Rdma>,
    pub(crate) landing: Arc<LocalMr>,
}

/// Landing areas of connections that are over. The crate frees an area's memory before it deregisters the area, and
/// does not report when the queue pair is destroyed: a last frame of the peer could then land in reused memory. So each
/// area is kept until some more connections have ended. By then the frame has landed.
static OVER: Mutex<VecDeque<Arc<LocalMr>>> = Mutex::new(VecDeque::new());
const OVER_MAX: usize = 64;

/// Keeps `landing` for some more connections.
fn outlive(landing: Arc<LocalMr>) {
    let mut over = OVER.lock().unwrap_or_else(PoisonError::into_inner);
    over.push_back(landing);
    let oldest = if over.len() > OVER_MAX { over.pop_front() } else { None };
    drop(over);
    drop(oldest);
}

/// Memory that a frame is sent from, and the slot at the peer.
type Slot = (LocalMr, MrToken);

/// A frame's write that has ended.
struct Written {
    index: usize,
    slot: Slot,
    ends: Option<(SlotKey, u64)>,
    result: std::io::Result<()>,
}

/// The cause of a connection's end, and the reason that is sent to the peer.
struct End {
    error: FabricError,
    farewell: Option<Frame>,
}

impl End {
    fn silent(error: FabricError) -> Self {
        Self { error, farewell: None }
    }

    fn refusal(violation: PeerViolation) -> Self {
        let error = FabricError::PeerMisbehaved { kind: KIND, violation };
        Self { error, farewell: Some(Frame::Refusal(Reason::Violation(violation))) }
    }

    /// The end by a write that failed in async-rdma, whose error is only a text.
    fn failed_write(error: &std::io::Error) -> Self {
        let detail = format!("async-rdma: {error}");
        Self::silent(FabricError::PeerLost { kind: KIND, cause: LossCause::RetryExceeded, detail })
    }
}

/// The numbers of this side's frames.
#[derive(Debug, Default)]
struct SentFrames {
    /// The number of the next frame.
    next: u32,
    /// The number of the first frame whose slot the peer has not emptied.
    acknowledged: u32,
}

impl SentFrames {
    /// The number of frames whose slots the peer has not emptied.
    fn open(&self) -> u32 {
        self.next.wrapping_sub(self.acknowledged) & NUMBERS
    }

    /// The peer has emptied the slots of all frames before `number`.
    fn heed_acknowledgement(&mut self, number: u32) -> Result<(), PeerViolation> {
        let newly = number.wrapping_sub(self.acknowledged) & NUMBERS;
        if newly <= self.open() {
            self.acknowledged = number;
            return Ok(());
        }
        // The crate passes on each immediate in a task of its own, so any number of later acknowledgements may overtake
        // one. It then has an older number and changes nothing.
        let is_overtaken = newly > NUMBERS / 2;
        if is_overtaken { Ok(()) } else { Err(PeerViolation::Malformed) }
    }
}

/// One connection. Dropping this before the connection is over, for example with the runtime, fails the connection.
pub(crate) struct Pump {
    ground: Ground,
    /// `None` while the crate reads from it.
    slots: Vec<Option<Slot>>,
    acknowledgement: (Arc<LocalMr>, MrToken),
    writes: FuturesOrdered<BoxFuture<'static, Written>>,
    /// At most one acknowledgement under way.
    acknowledging: FuturesUnordered<BoxFuture<'static, std::io::Result<()>>>,
    sent: SentFrames,
    /// Frames that arrived, the number of the first that was not taken, and the number that was last acknowledged.
    arrived: BTreeSet<u32>,
    taken: u32,
    acknowledged_taken: u32,
}

impl Pump {
    pub(crate) fn new(ground: Ground, slots: Vec<Slot>, acknowledgement: Slot) -> Self {
        Self {
            ground,
            slots: slots.into_iter().map(Some).collect(),
            acknowledgement: (Arc::new(acknowledgement.0), acknowledgement.1),
            writes: FuturesOrdered::new(),
            acknowledging: FuturesUnordered::new(),
            sent: SentFrames::default(),
            arrived: BTreeSet::new(),
            taken: 0,
            acknowledged_taken: 0,
        }
    }

    pub(crate) async fn run(mut self) {
        let End { error, farewell } = self.serve().await;
        self.ground.link.end(&error);
        if let Some(farewell) = farewell {
            let runtime = self.ground.runtime.clone();
            let sent = self.say(farewell).fuse();
            futures::pin_mut!(sent);
            futures::select_biased! {
                () = sent => {}
                () = runtime.sleep(LINGER).fuse() => {}
            }
        }
    }

    async fn serve(&mut self) -> End {
        loop {
            if self.ground.link.is_closing() {
                return End { error: FabricError::Closed, farewell: Some(Frame::Farewell) };
            }
            self.send_posted();
            self.acknowledge();
            if let Err(end) = self.step().await {
                return end;
            }
        }
    }

    /// Waits for one event, and handles it.
    async fn step(&mut self) -> Result<(), End> {
        let (rdma, link) = (self.ground.rdma.clone(), self.ground.link.clone());
        tokio::select! {
            biased;
            immediate = rdma.receive_write_imm() => {
                let immediate = immediate.map_err(|error| End::failed_write(&error))?;
                self.heed(immediate)
            }
            Some(written) = self.writes.next() => self.give_back(written),
            Some(acknowledged) = self.acknowledging.next() => acknowledged.map_err(|error| End::failed_write(&error)),
            () = link.changed() => Ok(()),
        }
    }

    fn room(&self) -> bool {
        let index = self.sent.next as usize % SLOTS;
        (self.sent.open() as usize) < SLOTS && self.slots.get(index).is_some_and(Option::is_some)
    }

    fn send_posted(&mut self) {
        while self.room() {
            let Some(outgoing) = self.ground.link.next() else { return };
            self.send(outgoing);
        }
        debug_assert!(self.sent.open() <= SLOTS as u32);
    }

    /// Copies a frame into its slot's memory and begins its write. The frame's bytes may be reused after this.
    fn send(&mut self, outgoing: Outgoing) {
        let number = self.sent.next;
        let index = number as usize % SLOTS;
        let Some((mut local, token)) = self.slots.get_mut(index).and_then(Option::take) else { return };
        let Outgoing { frame, payload, ends } = outgoing;
        {
            let mut memory = local.as_mut_slice();
            let (header, body) = memory.split_at_mut(HEADER);
            copy_bytes(header, &frame.encode(), CopyReason::Message);
            copy_bytes(body, &payload, CopyReason::Local);
        }
        let length = HEADER + payload.len().min(PAYLOAD);
        drop(payload);
        self.sent.next = number.wrapping_add(1) & NUMBERS;
        let rdma = self.ground.rdma.clone();
        self.writes.push_back(Box::pin(async move {
            let result = write(&rdma, &local, token, length, number).await;
            Written { index, slot: (local, token), ends, result }
        }));
    }

    fn give_back(&mut self, written: Written) -> Result<(), End> {
        let Written { index, slot, ends, result } = written;
        if let Some(place) = self.slots.get_mut(index) {
            *place = Some(slot);
        }
        result.map_err(|error| End::failed_write(&error))?;
        if let Some((key, bytes)) = ends {
            self.ground.link.core.complete(key, bytes, Ok(()));
        }
        Ok(())
    }

    /// Acknowledges the empty slots, unless an acknowledgement is already being sent.
    fn acknowledge(&mut self) {
        if self.acknowledged_taken == self.taken || !self.acknowledging.is_empty() {
            return;
        }
        self.acknowledged_taken = self.taken;
        let (rdma, (local, token)) = (self.ground.rdma.clone(), self.acknowledgement.clone());
        let immediate = ACKNOWLEDGES | self.taken;
        self.acknowledging
            .push(Box::pin(async move { write(&rdma, &local, token, token.len, immediate).await }));
    }

    fn heed(&mut self, immediate: u32) -> Result<(), End> {
        let number = immediate & NUMBERS;
        if immediate & ACKNOWLEDGES != 0 {
            return self.sent.heed_acknowledgement(number).map_err(End::refusal);
        }
        let ahead = number.wrapping_sub(self.taken) & NUMBERS;
        if ahead as usize >= SLOTS || !self.arrived.insert(number) {
            return Err(End::refusal(PeerViolation::Malformed));
        }
        while self.arrived.remove(&self.taken) {
            let index = self.taken as usize % SLOTS;
            self.taken = self.taken.wrapping_add(1) & NUMBERS;
            self.take(index)?;
        }
        Ok(())
    }

    /// Takes the frame in slot `index`.
    fn take(&mut self, index: usize) -> Result<(), End> {
        let start = index * SLOT;
        let malformed = || End::refusal(PeerViolation::Malformed);
        let slot = self.ground.landing.get(start..start + SLOT).ok_or_else(malformed)?;
        let bytes = slot.as_slice();
        let (header, body) = bytes.split_first_chunk::<HEADER>().ok_or_else(malformed)?;
        match Frame::decode(header).ok_or_else(malformed)? {
            Frame::Part { range, key, total, immediate } => {
                let body = body.get(..range.length as usize).ok_or_else(malformed)?;
                self.ground.land(&range, key, body)?;
                immediate.map_or(Ok(()), |immediate| self.ground.deliver(immediate, total))
            }
            Frame::Farewell => {
                let (cause, detail) = (LossCause::ClosedByPeer, "the peer closed the connection".to_owned());
                Err(End::silent(FabricError::PeerLost { kind: KIND, cause, detail }))
            }
            Frame::Refusal(Reason::Violation(reason)) => {
                Err(End::silent(FabricError::RemoteRefused { kind: KIND, reason }))
            }
            Frame::Refusal(Reason::ReceiverNotReady) => {
                let depth = self.ground.link.core.config().receive_depth;
                Err(End::silent(FabricError::ReceiverNotReady { kind: KIND, depth }))
            }
        }
    }

    /// Sends a last frame, and waits until the peer's device has it.
    async fn say(&mut self, frame: Frame) {
        while !self.room() {
            if self.step_of_farewell().await.is_err() {
                return;
            }
        }
        self.send(Outgoing { frame, payload: tensorwire_memory::Buf::empty(), ends: None });
        while let Some(written) = self.writes.next().await {
            if written.result.is_err() {
                return;
            }
        }
    }

    /// Like [`step`](Self::step), but takes no more frames: only acknowledgements matter.
    async fn step_of_farewell(&mut self) -> Result<(), End> {
        let rdma = self.ground.rdma.clone();
        tokio::select! {
            biased;
            immediate = rdma.receive_write_imm() => {
                let immediate = immediate.map_err(|error| End::failed_write(&error))?;
                if immediate & ACKNOWLEDGES == 0 {
                    return Ok(());
                }
                self.sent.heed_acknowledgement(immediate & NUMBERS).map_err(End::refusal)
            }
            Some(written) = self.writes.next() => {
                // The operation of this write has failed with the connection.
                self.give_back(Written { ends: None, ..written })
            }
        }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        let detail = "the runtime that drove the connection has shut down".to_owned();
        let cause = LossCause::DeviceLost;
        // The first failure stays: after an orderly end this changes nothing.
        self.ground.link.end(&FabricError::PeerLost { kind: KIND, cause, detail });
        outlive(self.ground.landing.clone());
    }
}

impl Ground {
    /// Copies a payload from the landing area to its destination, after the checks that a NIC makes.
    fn land(&self, range: &RemoteRange, key: u32, body: &[u8]) -> Result<(), End> {
        if body.is_empty() {
            return Ok(());
        }
        let (target, _) = self.table.write_target(range, key).map_err(End::refusal)?;
        target.write_at(0, body, CopyReason::Local).map_err(|_| End::refusal(PeerViolation::NotGranted))?;
        self.link.core.count_received(body.len() as u64);
        Ok(())
    }

    fn deliver(&self, immediate: Immediate, length: u64) -> Result<(), End> {
        let delivered = self.link.core.deliver(Arrival::Immediate { immediate, length });
        delivered.map_err(|error| End { error, farewell: Some(Frame::Refusal(Reason::ReceiverNotReady)) })
    }
}

/// Writes the first `length` bytes of `local`.
async fn write(
    rdma: &Rdma,
    local: &LocalMr,
    token: MrToken,
    length: usize,
    immediate: u32,
) -> std::io::Result<()> {
    let wrong = || std::io::Error::other("a range outside the slot");
    let part = local.get(0..length).ok_or_else(wrong)?;
    let mut remote = RemoteMr::new(token);
    let mut remote = remote.get_mut(0..length)?;
    rdma.write_with_imm(&part, &mut remote, immediate).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state after `frames` frames of a connection whose peer has acknowledged all of them.
    fn all_acknowledged(frames: u32) -> SentFrames {
        SentFrames { next: frames, acknowledged: frames }
    }

    #[test]
    fn any_number_of_acknowledgements_may_overtake_one() {
        const LAST: u32 = 400;
        for overtaken in 0..LAST {
            let mut sent = all_acknowledged(LAST);
            assert_eq!(sent.heed_acknowledgement(overtaken), Ok(()), "{overtaken} after {LAST}");
            assert_eq!((sent.acknowledged, sent.open()), (LAST, 0), "{overtaken} after {LAST}");
        }
    }

    #[test]
    fn a_frame_that_was_not_sent_is_not_acknowledged() {
        for frames in [0, 7, NUMBERS] {
            let mut sent = all_acknowledged(frames);
            let next = frames.wrapping_add(1) & NUMBERS;
            assert_eq!(sent.heed_acknowledgement(next), Err(PeerViolation::Malformed), "after {frames}");
            sent.next = next;
            assert_eq!(sent.heed_acknowledgement(next), Ok(()), "after {frames}");
            assert_eq!(sent.open(), 0, "after {frames}");
        }
    }
}
