//! What the pages of exposed arenas may contain.
//!
//! A page has one content of one writer, and that is none which another has certainly replaced. Only a transfer that failed or was given
//! up may leave parts of several contents.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
};

use tensorwire_rendezvous::pages::Written;
use tensorwire_sim::{Handle, Violation};

/// A worker's number, and the number of a page of its exposed arena.
pub(super) type Place = (usize, u32);

/// Notes that are counted instead of returned.
pub(super) const COUNTED: u64 = 7;

/// A write of one page, at ticks of the model's clock.
#[derive(Debug, Clone, Copy)]
struct Write {
    content: u64,
    number: u64,
    began: u64,
    /// When it was certainly over.
    ended: Option<u64>,
    /// The page had all of the content then.
    is_whole: bool,
}

/// A write with a note.
#[derive(Debug)]
struct Noted {
    by: usize,
    to: usize,
    places: Vec<Place>,
    number: u64,
    came: bool,
    is_done: bool,
}

#[derive(Debug, Default)]
struct State {
    tick: u64,
    latest: u64,
    writes: BTreeMap<Place, Vec<Write>>,
    noted: BTreeMap<u64, Noted>,
    /// Counted writes to a worker that began, and those that ended well.
    counted: BTreeMap<usize, (u64, u64)>,
    /// Pages that had parts of the contents of these writes, which must not end well.
    suspected: Vec<(String, Vec<(Place, u64)>)>,
    /// Workers that lost notes in this round.
    forgetful: BTreeSet<usize>,
    /// A fault was injected.
    is_disturbed: bool,
}

/// Shared by all tasks of a run.
#[derive(Debug, Clone)]
pub(super) struct Model {
    handle: Handle,
    state: Arc<Mutex<State>>,
}

/// A write under way. If this is dropped, it is uncertain what became of it.
#[derive(Debug)]
pub(super) struct Writing {
    model: Model,
    number: u64,
    to: usize,
    places: Vec<Place>,
    note: Option<u64>,
}

impl Model {
    pub(super) fn new(handle: &Handle) -> Self {
        Self { handle: handle.clone(), state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn fail(&self, text: String) {
        self.handle.fail(Violation::Data(text));
    }

    /// A number that names a content, a write or a note.
    pub(super) fn new_number(&self) -> u64 {
        let mut state = self.lock();
        state.latest += 1;
        // No note is one that is counted.
        1000 + state.latest
    }

    /// A moment before everything that begins later.
    pub(super) fn now(&self) -> u64 {
        let mut state = self.lock();
        state.tick += 1;
        state.tick
    }

    pub(super) fn disturb(&self) {
        self.lock().is_disturbed = true;
    }

    pub(super) fn is_disturbed(&self) -> bool {
        self.lock().is_disturbed
    }

    /// The worker's notes are lost from now on until the next round.
    pub(super) fn lose_notes(&self, worker: usize) {
        self.lock().forgetful.insert(worker);
    }

    /// The bytes of a content, which begin with its number.
    pub(super) fn fill(&self, content: u64, page: &mut [u8]) {
        let (number, rest) = page.split_at_mut(8);
        number.copy_from_slice(&content.to_le_bytes());
        self.handle.pattern().fill(content, rest);
    }

    fn bytes(&self, content: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.fill(content, &mut bytes);
        bytes
    }

    /// The number of the content, if it is whole.
    pub(super) fn content_of(&self, page: &[u8]) -> Option<u64> {
        let content = u64::from_le_bytes(*page.first_chunk()?);
        self.handle.pattern().verify(content, &page[8..]).is_ok().then_some(content)
    }

    /// A worker writes contents to pages of another's, or of its own.
    pub(super) fn begin(&self, (by, to): (usize, usize), pages: &[(u32, u64)], note: Option<u64>) -> Writing {
        let (number, began) = (self.new_number(), self.now());
        let mut state = self.lock();
        for (page, content) in pages {
            let write = Write { content: *content, number, began, ended: None, is_whole: false };
            state.writes.entry((to, *page)).or_default().push(write);
        }
        let places: Vec<_> = pages.iter().map(|(page, _)| (to, *page)).collect();
        match note {
            Some(COUNTED) => state.counted.entry(to).or_default().0 += 1,
            Some(note) => {
                let noted = Noted { by, to, places: places.clone(), number, came: false, is_done: false };
                state.noted.insert(note, noted);
            }
            None => {}
        }
        drop(state);
        Writing { model: self.clone(), number, to, places, note }
    }

    /// A note came to the program of `worker`: once, and behind its pages.
    pub(super) fn noted(&self, worker: usize, written: &Written) {
        let mut state = self.lock();
        let Some(noted) = state.noted.get_mut(&written.note) else {
            drop(state);
            return self.fail(format!("{written:?} came, which nobody sent"));
        };
        let is_own = noted.to == worker && written.peer == super::name(noted.by);
        let is_first = !std::mem::replace(&mut noted.came, true);
        let (places, number) = (noted.places.clone(), noted.number);
        state.end(&places, number);
        drop(state);
        if !is_own || !is_first {
            self.fail(format!("{written:?} came to worker {worker}: its own {is_own}, once {is_first}"));
        }
    }

    /// Checks that a page of an exposed arena, as it was seen at some time since `began`, has what it may have. Returns its content if it
    /// is whole.
    pub(super) fn check(&self, place: Place, page: &[u8], began: u64) -> Option<u64> {
        let candidates = self.lock().candidates(place, began);
        let content = self.content_of(page);
        if content.is_some_and(|content| candidates.iter().any(|write| write.content == content)) {
            return content;
        }
        let contents: Vec<_> = candidates.iter().map(|write| write.content).collect();
        let text = format!("page {place:?} has {content:?} instead of one of {candidates:?}");
        let open: Vec<_> =
            candidates.iter().filter(|write| !write.is_whole).map(|write| (place, write.number)).collect();
        if open.is_empty() || !self.is_mix(page, &contents) {
            self.fail(text);
        } else {
            self.lock().suspected.push((text, open));
        }
        None
    }

    /// Whether each byte of the page is of one of these contents.
    pub(super) fn is_mix(&self, page: &[u8], contents: &[u64]) -> bool {
        let all: Vec<_> = contents.iter().map(|content| self.bytes(*content, page.len())).collect();
        page.iter().enumerate().all(|(at, byte)| all.iter().any(|bytes| bytes[at] == *byte))
    }

    /// What the page may have had at some time since `began`.
    pub(super) fn contents(&self, place: Place, began: u64) -> Vec<u64> {
        self.lock().candidates(place, began).iter().map(|write| write.content).collect()
    }

    /// All transfers are over. Checks what can be known then, and forgets all writes.
    pub(super) fn end_round(&self) {
        let mut state = self.lock();
        let suspected = std::mem::take(&mut state.suspected);
        let torn = suspected
            .into_iter()
            .find(|(_, open)| open.iter().all(|(place, number)| state.is_whole(*place, *number)));
        let lost = |noted: &Noted| noted.is_done && !noted.came && !state.forgetful.contains(&noted.to);
        let missed = state
            .noted
            .iter()
            .find(|(_, noted)| lost(noted))
            .map(|(note, noted)| format!("{note}, {noted:?}"));
        state.noted.retain(|_, noted| !noted.came);
        state.noted.values_mut().for_each(|noted| noted.is_done = false);
        state.writes.clear();
        state.counted.clear();
        state.forgetful.clear();
        drop(state);
        if let Some((text, _)) = torn {
            self.fail(format!("parts of two contents were seen: {text}"));
        }
        if let Some(missed) = missed {
            self.fail(format!("a note did not come: {missed}"));
        }
    }

    /// Least and most counted writes to the worker in this round.
    pub(super) fn counted(&self, worker: usize) -> Option<(u64, u64)> {
        let state = self.lock();
        let (most, least) = state.counted.get(&worker).copied().unwrap_or_default();
        (!state.forgetful.contains(&worker)).then_some((least, most))
    }
}

impl State {
    /// The writes to a page whose content it may have had at some time since `began`.
    fn candidates(&self, place: Place, began: u64) -> Vec<Write> {
        let writes = self.writes.get(&place).map_or(&[][..], Vec::as_slice);
        let replaces = |later: &Write, write: &Write| {
            later.is_whole
                && later.ended.is_some_and(|ended| ended < began)
                && write.ended.is_some_and(|ended| ended < later.began)
        };
        let may_be = |write: &&Write| !writes.iter().any(|later| replaces(later, write));
        writes.iter().filter(may_be).copied().collect()
    }

    /// The pages have what this write brought.
    fn end(&mut self, places: &[Place], number: u64) {
        self.tick += 1;
        let now = self.tick;
        for place in places {
            let writes = self.writes.get_mut(place).into_iter().flatten();
            writes.filter(|write| write.number == number).for_each(|write| {
                write.ended.get_or_insert(now);
                write.is_whole = true;
            });
        }
    }

    fn is_whole(&self, place: Place, number: u64) -> bool {
        let writes = self.writes.get(&place).into_iter().flatten();
        writes.filter(|write| write.number == number).all(|write| write.is_whole)
    }
}

impl Writing {
    /// It ended well.
    pub(super) fn done(self) {
        let mut state = self.model.lock();
        state.end(&self.places, self.number);
        match self.note {
            Some(COUNTED) => state.counted.entry(self.to).or_default().1 += 1,
            Some(note) => drop(state.noted.get_mut(&note).map(|noted| noted.is_done = true)),
            None => {}
        }
    }

    /// It was refused before it began.
    pub(super) fn never_began(self) {
        let mut state = self.model.lock();
        for place in &self.places {
            if let Some(writes) = state.writes.get_mut(place) {
                writes.retain(|write| write.number != self.number);
            }
        }
    }
}
