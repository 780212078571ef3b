//! The wire between two sides. A write is posted, lands, and is taken; the test moves it from each stage to the next. The wire
//! refuses everything that a network adapter refuses.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Poll, Waker},
};

use tensorwire_protocol::{
    ACKNOWLEDGEMENT_IMMEDIATE, Agreed, Channel, ChannelError, Code, Depths, Destination, LentEnd,
    MESSAGE_IMMEDIATE, Mailbox, Message, Mode, Parameters, RecordSlot, RingSpan, Rings, Status, WireError,
    limits::RESULT_BYTES,
    names::NameTable,
    wire::record::{Control, Record, decode_record},
};

use super::{
    Side,
    flip::Flip,
    looks,
    mailbox::TestMailbox,
    memory::{Lent, Memory},
    source::laid_out,
};

/// One write on its way.
#[derive(Debug)]
pub(super) struct Write {
    /// The number of the peer's ring that it writes.
    ring_number: usize,
    pub(super) ring: Vec<(u32, Vec<u8>)>,
    record: Option<(RecordSlot, Vec<u8>)>,
    pub(super) content: Option<(Destination, Vec<u8>)>,
    pub(super) result: Option<[u8; RESULT_BYTES]>,
    pub(super) loan: Option<Vec<u8>>,
    /// A message with a content.
    pub(super) is_eager: bool,
    /// A content of a subscription has none: it lands without an arrival.
    immediate: Option<u32>,
    length: u64,
    /// The entries of the send queue that it takes.
    entries: u32,
    posted_at: u64,
    done: Completion,
}

type Completion = Arc<Mutex<(Option<Result<(), ChannelError>>, Option<Waker>)>>;

fn complete(done: &Completion, result: Result<(), ChannelError>) {
    let waker = {
        let mut done = done.lock().unwrap();
        done.0 = Some(result);
        done.1.take()
    };
    waker.into_iter().for_each(Waker::wake);
}

/// An immediate that has landed and is not taken yet.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    pub(crate) immediate: u32,
    pub(crate) length: u64,
    /// Bytes of the message that it announces.
    pub(crate) ring_bytes: u32,
    /// What the peer lends.
    pub(crate) loan: Option<Vec<u8>>,
    posted_at: u64,
}

/// The state of one side.
#[derive(Debug)]
struct End {
    mode: Mode,
    /// The keys of the messages that were posted here.
    names: NameTable,
    requests_per_message: u32,
    depths: Depths,
    /// Own rings, oldest first.
    rings: Vec<Vec<u8>>,
    /// The own ring that is read.
    reading: usize,
    /// The peer's ring that forged writes go to.
    forging: usize,
    /// Whether no larger ring can be made.
    is_out_of_rings: bool,
    /// How many loans this side may still make; `None` if it can make none at all.
    loans: Option<u32>,
    /// Posts that are left; `None`: any number.
    posts: Option<u32>,
    slots: [Vec<u8>; 2],
    memory: Memory,
    /// Posted here, not landed at the other side.
    posted: VecDeque<Write>,
    /// Landed at the other side, completion not reported here.
    landed: VecDeque<(u64, u32, Completion)>,
    /// Landed here, not taken.
    arrivals: VecDeque<Arrival>,
    send_entries: u32,
    send_entries_seen: u32,
    arrivals_seen: u32,
}

#[derive(Debug)]
struct State {
    a: End,
    b: End,
    now: u64,
    trace: Vec<(Side, &'static str)>,
    /// Messages that took two writes.
    wrapped: u64,
    is_cut: bool,
    flip: Option<Flip>,
}

impl State {
    fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }
}

/// The state of both directions.
#[derive(Debug, Clone)]
pub(crate) struct Wire(Arc<Mutex<State>>);

impl Wire {
    pub(crate) fn new(a: (Parameters, Memory), b: (Parameters, Memory)) -> Self {
        let end = |local: &Parameters, peer: &Parameters, memory| End {
            mode: Agreed::of(local, peer).mode,
            names: NameTable::new(Agreed::of(local, peer).names_max),
            requests_per_message: Agreed::of(local, peer).requests_per_message,
            depths: Depths::of(local, peer),
            rings: vec![vec![0; local.first_ring_bytes() as usize]],
            reading: 0,
            forging: 0,
            is_out_of_rings: false,
            loans: None,
            posts: None,
            slots: Default::default(),
            memory,
            posted: VecDeque::new(),
            landed: VecDeque::new(),
            arrivals: VecDeque::new(),
            send_entries: 0,
            send_entries_seen: 0,
            arrivals_seen: 0,
        };
        let (left, right) = (end(&a.0, &b.0, a.1), end(&b.0, &a.0, b.1));
        let state =
            State { a: left, b: right, now: 0, trace: Vec::new(), wrapped: 0, is_cut: false, flip: None };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn channel(&self, side: Side) -> TestChannel {
        TestChannel { side, wire: self.clone(), mailbox: None }
    }

    /// The first rings of a connection of `side`.
    pub(crate) fn rings(&self, side: Side) -> Rings<Lent> {
        let mut state = self.0.lock().unwrap();
        let memory = state.end(side).memory.clone();
        let peer = ring_at(0, state.end(side.other()).rings[0].len());
        Rings { own: memory.ring(Some(0)), own_slots: memory.ring(None), peer }
    }

    /// A write changes on its way.
    pub(crate) fn flip(&self, flip: Flip) {
        self.0.lock().unwrap().flip = Some(flip);
    }

    /// Whether no write has changed yet.
    pub(crate) fn has_flip(&self) -> bool {
        self.0.lock().unwrap().flip.is_some()
    }

    /// Each post with its side, in order.
    pub(crate) fn trace(&self) -> Vec<(Side, &'static str)> {
        self.0.lock().unwrap().trace.clone()
    }

    pub(crate) fn wrapped(&self) -> u64 {
        self.0.lock().unwrap().wrapped
    }

    /// Writes `bytes` at `offset` of the ring of `side`'s peer, with `immediate`. Nothing is checked.
    pub(crate) fn forge(&self, side: Side, offset: u32, bytes: &[u8], immediate: u32) {
        self.forge_parts(side, vec![(offset, bytes.to_vec())], immediate);
    }

    /// As [`forge`](Self::forge), at several offsets.
    pub(crate) fn forge_parts(&self, side: Side, ring: Vec<(u32, Vec<u8>)>, immediate: u32) {
        let ring_number = self.0.lock().unwrap().end(side).forging;
        self.post(side, "forged", Write { ring_number, ring, ..notification(immediate) }).unwrap();
    }

    pub(crate) fn has_posted(&self, side: Side) -> bool {
        !self.0.lock().unwrap().end(side).posted.is_empty()
    }

    pub(crate) fn has_arrivals(&self, side: Side) -> bool {
        !self.0.lock().unwrap().end(side).arrivals.is_empty()
    }

    pub(crate) fn has_completions(&self, side: Side) -> bool {
        !self.0.lock().unwrap().end(side).landed.is_empty()
    }

    /// The ring that `side` reads, by its number.
    pub(crate) fn reading(&self, side: Side) -> usize {
        self.0.lock().unwrap().end(side).reading
    }

    /// Forged writes of `side` go to this ring of its peer.
    pub(crate) fn forge_into(&self, side: Side, ring: usize) {
        self.0.lock().unwrap().end(side).forging = ring;
    }

    /// The rings that `side` has made, in bytes.
    pub(crate) fn ring_lengths(&self, side: Side) -> Vec<usize> {
        self.0.lock().unwrap().end(side).rings.iter().map(Vec::len).collect()
    }

    /// From now on `side` has no memory for larger rings.
    pub(crate) fn refuse_rings(&self, side: Side) {
        self.0.lock().unwrap().end(side).is_out_of_rings = true;
    }

    /// `side` can post this many times more; then its queue pair fails each post.
    pub(crate) fn allow_posts(&self, side: Side, posts: u32) {
        self.0.lock().unwrap().end(side).posts = Some(posts);
    }

    /// `side` can lend this many times from now on.
    pub(crate) fn allow_loans(&self, side: Side, loans: u32) {
        self.0.lock().unwrap().end(side).loans = Some(loans);
    }

    /// Most send-queue entries, and most arrivals, that `side` has had at once.
    pub(crate) fn seen(&self, side: Side) -> (u32, u32) {
        let mut state = self.0.lock().unwrap();
        let end = state.end(side);
        (end.send_entries_seen, end.arrivals_seen)
    }

    /// The oldest write of `side` lands at the other side.
    pub(crate) fn land(&self, side: Side) {
        let mut state = self.0.lock().unwrap();
        let Some(mut write) = state.end(side).posted.pop_front() else { return };
        if state.flip.is_some_and(|flip| flip.change(&mut write)) {
            state.flip = None;
        }
        state.now += 1;
        let now = state.now;
        let target = state.end(side.other());
        // A script may claim anything of its rings and receives.
        let is_script = target.memory.is_script();
        let ring_bytes = write.ring.iter().map(|(_, bytes)| bytes.len() as u32).sum();
        let is_in_use = write.ring.is_empty() || write.ring_number >= target.reading;
        assert!(is_script || is_in_use, "a write into a ring that was given back");
        for (offset, bytes) in write.ring {
            let offset = offset as usize;
            let ring = target.rings.get_mut(write.ring_number);
            match ring.and_then(|ring| ring.get_mut(offset..offset + bytes.len())) {
                Some(place) => place.copy_from_slice(&bytes),
                None => assert!(is_script, "a write outside all rings"),
            }
        }
        if let Some((slot, bytes)) = write.record {
            target.slots[slot as usize] = bytes;
        }
        if let Some((destination, bytes)) = write.content {
            // The checksum of a content without an immediate comes in a message.
            let has_result = write.immediate.is_some() && destination.result.is_some();
            assert!(
                is_script || write.result.is_some() == has_result,
                "a slot without a result, or the reverse"
            );
            target.memory.write(destination, &bytes, write.result);
        }
        let Write { immediate, length, posted_at, loan, .. } = write;
        target.arrivals.extend(immediate.map(|immediate| Arrival {
            immediate,
            length,
            ring_bytes,
            loan,
            posted_at,
        }));
        let waiting = target.arrivals.len() as u32;
        assert!(is_script || waiting <= target.depths.receive, "receiver not ready: {waiting} arrivals");
        target.arrivals_seen = target.arrivals_seen.max(waiting);
        state.end(side).landed.push_back((now, write.entries, write.done));
    }

    /// Reports the oldest completion to `side`.
    pub(crate) fn complete(&self, side: Side) {
        let done = {
            let mut state = self.0.lock().unwrap();
            let end = state.end(side);
            end.landed.pop_front().map(|(_, entries, done)| {
                end.send_entries -= entries;
                done
            })
        };
        if let Some(done) = done {
            complete(&done, Ok(()));
        }
    }

    /// Takes the oldest arrival of `side`. Completions of writes that may have caused it come first.
    pub(crate) fn take(&self, side: Side) -> Option<Arrival> {
        let arrival = self.0.lock().unwrap().end(side).arrivals.pop_front()?;
        loop {
            let is_due = |end: &End| end.landed.front().is_some_and(|&(at, ..)| at < arrival.posted_at);
            if !is_due(self.0.lock().unwrap().end(side)) {
                return Some(arrival);
            }
            self.complete(side);
        }
    }

    /// The connection breaks: nothing lands any more, every write under way ends with an error.
    pub(crate) fn cut(&self) {
        let all: Vec<Completion> = {
            let mut state = self.0.lock().unwrap();
            state.is_cut = true;
            let mut all = Vec::new();
            for side in Side::BOTH {
                let end = state.end(side);
                all.extend(end.posted.drain(..).map(|write| write.done));
                all.extend(end.landed.drain(..).map(|(_, _, done)| done));
                end.arrivals.clear();
            }
            all
        };
        for done in all {
            complete(&done, Err(ChannelError("the wire was cut".to_owned())));
        }
    }

    fn post(&self, side: Side, name: &'static str, mut write: Write) -> Result<(), ChannelError> {
        let mut state = self.0.lock().unwrap();
        if state.is_cut {
            return Err(ChannelError("the wire was cut".to_owned()));
        }
        if let Some(posts) = &mut state.end(side).posts {
            let left = posts.checked_sub(1);
            *posts = left.ok_or_else(|| ChannelError("the queue pair has failed".to_owned()))?;
        }
        state.now += 1;
        write.posted_at = state.now;
        state.trace.push((side, name));
        state.wrapped += u64::from(write.entries > 1);
        let has_script = state.end(side.other()).memory.is_script();
        let end = state.end(side);
        end.send_entries += write.entries;
        if end.send_entries > end.depths.send {
            // A script may return what it has not taken yet.
            assert!(has_script, "the send queue is full");
            end.send_entries -= write.entries;
            return Err(ChannelError("the send queue is full".to_owned()));
        }
        end.send_entries_seen = end.send_entries_seen.max(end.send_entries);
        end.posted.push_back(write);
        Ok(())
    }
}

/// The destination of the ring with this number.
pub(crate) fn ring_at(region: u32, ring_bytes: usize) -> Destination {
    let capacity = ring_bytes as u64;
    Destination { region, generation: 0, offset: 0, capacity, result: None }
}

/// One end of the wire.
#[derive(Debug)]
pub(crate) struct TestChannel {
    side: Side,
    wire: Wire,
    pub(crate) mailbox: Option<TestMailbox>,
}

fn notification(immediate: u32) -> Write {
    Write {
        ring_number: 0,
        ring: Vec::new(),
        record: None,
        content: None,
        result: None,
        loan: None,
        is_eager: false,
        immediate: Some(immediate),
        length: 0,
        entries: 1,
        posted_at: 0,
        done: Completion::default(),
    }
}

fn is_eager(record: &Record) -> bool {
    match record {
        Record::Message(Message::MetaDataResponse(response)) => response.content.is_some(),
        Record::Message(Message::TensorWrite(write)) => write.value.content.is_some(),
        _ => false,
    }
}

fn name(record: &Record) -> &'static str {
    match record {
        Record::Message(message) => message.name(),
        Record::Control(Control::CountOnly) => "counts",
        Record::Control(Control::RingOffer(_)) => "RING_OFFER",
        Record::Control(Control::RingMoved) => "RING_MOVED",
        Record::Control(other) => panic!("{other:?}"),
    }
}

impl TestChannel {
    fn write(&self, name: &'static str, write: Write) -> <Self as Channel>::Write {
        let done = write.done.clone();
        if let Err(error) = self.wire.post(self.side, name, write) {
            complete(&done, Err(error));
        }
        Box::pin(poll_fn(move |context| {
            let mut done = done.lock().unwrap();
            match done.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    done.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl Channel for TestChannel {
    type Bytes = Vec<u8>;
    type Lent = Lent;
    type Write = Pin<Box<dyn Future<Output = Result<(), ChannelError>> + Send>>;

    fn post_message(
        &self,
        ring_at: Destination,
        first: RingSpan,
        second: RingSpan,
        bytes: &[u8],
    ) -> Result<(), ChannelError> {
        assert_eq!((first.length + second.length) as usize, bytes.len());
        assert!(first.length > 0);
        let (head, tail) = bytes.split_at(first.length as usize);
        let mut ring = vec![(first.offset, head.to_vec())];
        if second.length > 0 {
            ring.push((second.offset, tail.to_vec()));
        }
        let entries = ring.len() as u32;
        let length = ring.last().map_or(0, |(_, part)| part.len() as u64);
        let (message, is_eager) = {
            let mut state = self.wire.0.lock().unwrap();
            let end = state.end(self.side);
            match decode_record(end.mode, bytes, &mut end.names, end.requests_per_message) {
                Ok((_, record)) => (name(&record), is_eager(&record)),
                Err(WireError::UnknownName(_)) => ("forged", false),
                Err(error) => panic!("an own message cannot be decoded: {error}"),
            }
        };
        let ring_number = ring_at.region as usize;
        let write = Write { ring_number, ring, length, entries, is_eager, ..notification(MESSAGE_IMMEDIATE) };
        self.wire.post(self.side, message, write)
    }

    fn post_acknowledgement(&self) -> Result<(), ChannelError> {
        self.wire.post(self.side, "ack", notification(ACKNOWLEDGEMENT_IMMEDIATE))
    }

    fn post_record(&self, slot: RecordSlot, bytes: &[u8]) -> Result<(), ChannelError> {
        let name = match slot {
            RecordSlot::Ask => "ASK",
            RecordSlot::Answer => "ANSWER",
        };
        let (record, length) = (Some((slot, bytes.to_vec())), bytes.len() as u64);
        self.wire.post(self.side, name, Write { record, length, ..notification(ACKNOWLEDGEMENT_IMMEDIATE) })
    }

    fn write_content(
        &self,
        bytes: Option<Vec<u8>>,
        destination: Option<(Destination, u64)>,
        immediate: Option<u32>,
        result: Option<[u8; RESULT_BYTES]>,
    ) -> Self::Write {
        let destination = destination.map(|(destination, ahead)| {
            assert_eq!(ahead, 0, "nothing was written ahead");
            destination
        });
        assert_eq!(bytes.is_some(), destination.is_some(), "bytes without a destination, or the reverse");
        let content = destination.zip(bytes);
        let written = content.as_ref().map_or(0, |(_, bytes)| bytes.len());
        let length = (written + result.map_or(0, |result| result.len())) as u64;
        assert!(immediate.is_some() || content.is_some(), "neither a content nor a notification");
        let write = Write { content, result, length, immediate, ..notification(0) };
        self.write("content", write)
    }

    fn check_pages(&self, pages: &[(Vec<u8>, u64)]) -> Result<(), Status> {
        (pages.len() <= 4)
            .then_some(())
            .ok_or_else(|| Status::new(Code::FailedPrecondition, "too many pages"))
    }

    /// As one content, with zeros between the pages.
    fn write_pages(
        &self,
        pages: Vec<(Vec<u8>, u64)>,
        destination: Destination,
        immediate: u32,
    ) -> Self::Write {
        let length = pages.iter().map(|(page, _)| page.len() as u64).sum();
        let content = Some((destination, laid_out(pages)));
        self.write("pages", Write { content, length, ..notification(immediate) })
    }

    fn settle(lent: Lent) -> Result<Lent, Status> {
        Ok(lent.copied())
    }

    fn content(lent: &Lent) -> &[u8] {
        lent.content()
    }

    fn result(lent: &Lent) -> Option<[u8; RESULT_BYTES]> {
        lent.result()
    }

    fn can_lend(&self, _: &Vec<u8>) -> bool {
        self.wire.0.lock().unwrap().end(self.side).loans.is_some()
    }

    fn lend_content(&self, bytes: &Vec<u8>, immediate: u32) -> Option<Self::Write> {
        {
            let mut state = self.wire.0.lock().unwrap();
            let loans = state.end(self.side).loans.as_mut()?;
            *loans = loans.checked_sub(1)?;
        }
        let length = bytes.len() as u64;
        Some(self.write("loan", Write { loan: Some(bytes.clone()), length, ..notification(immediate) }))
    }

    fn read(&self, ring: &Lent, offset: u64, into: &mut [u8]) -> Result<(), ChannelError> {
        let mut state = self.wire.0.lock().unwrap();
        let end = state.end(self.side);
        let Some(number) = ring.ring().expect("only rings and slots are read") else {
            into.copy_from_slice(&end.slots[usize::from(offset > 0)]);
            return Ok(());
        };
        end.reading = number;
        let offset = offset as usize;
        let bytes = end.rings[number].get(offset..offset + into.len());
        into.copy_from_slice(bytes.ok_or_else(|| ChannelError("outside the ring".to_owned()))?);
        Ok(())
    }

    async fn make_ring(&self, ring_bytes: u32) -> Option<(Lent, Destination)> {
        let mut state = self.wire.0.lock().unwrap();
        let end = state.end(self.side);
        if end.is_out_of_rings {
            return None;
        }
        end.rings.push(vec![0; ring_bytes as usize]);
        let region = end.rings.len() as u32 - 1;
        let ring = end.memory.ring(Some(region as usize));
        Some((ring, ring_at(region, ring_bytes as usize)))
    }

    fn may_help(&self) -> bool {
        looks::are_allowed()
    }

    fn help(&self) -> bool {
        looks::finds()
    }

    fn mailbox(&self) -> Option<&dyn Mailbox> {
        self.mailbox.as_ref().map(|mailbox| mailbox as _)
    }

    fn take_back(&self, lent: Lent, end: LentEnd) {
        if let Some(Some(number)) = lent.ring()
            && end == LentEnd::RingMoved
        {
            self.wire.0.lock().unwrap().end(self.side).reading = number + 1;
        }
        lent.end(end);
    }
}
