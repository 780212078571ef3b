//! The mailboxes of two sides, and what happens between two steps of a side.

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex},
};

use tensorwire_protocol::{Mailbox, Note};

/// Lanes whose notes travel in the mailbox.
const LANES: usize = 4;

/// Notes that fit into a mailbox, and the longest.
pub(crate) const NOTES: usize = 4;
pub(crate) const BYTES_MAX: usize = 20;

/// What one side has put for the other, and which lanes it has parked how often.
#[derive(Debug, Default)]
struct Written {
    notes: VecDeque<(u64, Note)>,
    parked: [u64; LANES],
}

impl Written {
    fn next(&self, messages: u64) -> Option<&Note> {
        self.notes.front().filter(|next| next.0 == messages).map(|(_, note)| note)
    }
}

/// What is done between two accesses of a side, after so many, once.
#[derive(Clone, Default)]
pub(crate) struct Meanwhile(Arc<Mutex<Option<Planned>>>);

type Planned = (usize, Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meanwhile").finish_non_exhaustive()
    }
}

impl Meanwhile {
    pub(crate) fn plan(&self, after: usize, act: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some((after, Box::new(act)));
    }

    /// Whether it was planned for after more accesses than there were. Then it is never done.
    pub(crate) fn is_left(&self) -> bool {
        self.0.lock().unwrap().take().is_some()
    }

    fn step(&self) {
        let due = match &mut *self.0.lock().unwrap() {
            Some((after @ 1.., _)) => {
                *after -= 1;
                None
            }
            due => due.take(),
        };
        if let Some((_, act)) = due {
            act();
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct TestMailbox {
    own: Arc<Mutex<Written>>,
    peer: Arc<Mutex<Written>>,
    /// How often each lane of the peer was parked when it was woken last.
    woken: Arc<Mutex<[u64; LANES]>>,
    pub(crate) meanwhile: Meanwhile,
}

impl TestMailbox {
    /// Of both sides.
    pub(crate) fn two() -> [Self; 2] {
        let one = Self::default();
        let other = Self { own: one.peer.clone(), peer: one.own.clone(), ..Self::default() };
        [one, other]
    }

    fn step<T>(&self, written: &Mutex<Written>, access: impl FnOnce(&mut Written) -> T) -> T {
        self.meanwhile.step();
        let accessed = access(&mut written.lock().unwrap());
        self.meanwhile.step();
        accessed
    }
}

impl Mailbox for TestMailbox {
    fn put(&self, (channel, lane): (u64, u16), parts: &[&[u8]], messages: u64) -> bool {
        let note = Note::of(channel, lane, parts);
        let note = note.filter(|note| note.bytes.len() <= BYTES_MAX && usize::from(lane) < LANES);
        self.step(&self.own, |own| {
            let note = note.filter(|_| own.notes.len() < NOTES);
            let is_put = note.is_some();
            own.notes.extend(note.map(|note| (messages, note)));
            is_put
        })
    }

    fn has_next(&self, messages: u64) -> bool {
        self.step(&self.peer, |peer| peer.next(messages).is_some())
    }

    fn take(&self, messages: u64) -> Option<Note> {
        self.step(&self.peer, |peer| {
            peer.next(messages)?;
            peer.notes.pop_front().map(|(_, note)| note)
        })
    }

    fn park(&self, lane: u16) {
        self.step(&self.own, |own| own.parked.get_mut(usize::from(lane)).map(|parked| *parked += 1));
    }

    fn is_parked(&self, lane: u16) -> bool {
        let woken = self.woken.lock().unwrap().get(usize::from(lane)).copied();
        woken.is_some_and(|woken| self.step(&self.peer, |peer| peer.parked[usize::from(lane)] != woken))
    }

    fn must_wake(&self, lane: u16) -> bool {
        let parked = self.step(&self.peer, |peer| peer.parked.get(usize::from(lane)).copied());
        let mut woken = self.woken.lock().unwrap();
        parked.is_some_and(|parked| mem::replace(&mut woken[usize::from(lane)], parked) != parked)
    }
}
