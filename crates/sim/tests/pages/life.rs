//! One life of a worker that exposes an arena, and moves pages between others and arenas of its own.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{Either, select},
};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{
    Worker, WorkerError,
    pages::{Arena, Count, Exposed, PageError, Pages, RemoteArena, Transfer},
};
use tensorwire_sim::{Handle, Node, Rng};

use super::{
    Settings, address,
    model::{COUNTED, Model, Writing},
    name,
};

/// The name of every exposed arena.
pub(super) const NAME: &str = "kv";

/// What the program knows of a page of an arena that is not exposed.
#[derive(Debug, Clone)]
enum Slot {
    /// The content that it has, whole.
    Whole(u64),
    /// The bytes that were seen in it after a transfer that failed.
    Parts(Vec<u8>),
    /// A task uses it.
    Claimed,
    /// A transfer that was dropped has it, or had it.
    Left,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) index: usize,
    pub(super) node: Node,
    pub(super) worker: Worker,
    handle: Handle,
    settings: Settings,
    model: Model,
    /// What peers read and write.
    pub(super) arena: Arena,
    /// What no peer knows.
    local: Arena,
    slots: Mutex<Vec<Slot>>,
    /// Pages of `arena` that a task of this program uses, and how often.
    used: Mutex<BTreeMap<u32, u32>>,
    /// The arenas of the others, once they were found.
    found: Mutex<BTreeMap<usize, RemoteArena>>,
    exposed: Mutex<Option<Exposed>>,
    count: Mutex<Option<Count>>,
    is_over: AtomicBool,
}

/// Pages of `arena` that a task uses.
struct Used<'a>(&'a Life, u32);

impl Drop for Used<'_> {
    fn drop(&mut self) {
        *self.0.used.lock().unwrap().entry(self.1).or_default() -= 1;
    }
}

/// How a task ends a transfer.
#[derive(Debug, Clone, Copy)]
enum Until {
    End,
    Polls(usize),
    Moment(Duration),
}

/// What a transfer moves.
struct Moves {
    peer: usize,
    remote: Vec<u32>,
    local: Vec<u32>,
    /// What the local pages had before.
    before: Vec<Slot>,
    /// Before the transfer.
    began: u64,
}

impl Life {
    pub(super) async fn start(handle: &Handle, settings: Settings, model: &Model, index: usize) -> Arc<Self> {
        let node = handle.start_node(&address(index)).unwrap();
        let start = settings.builder(&node, &name(index)).start();
        let worker = node.run("start", start).await.unwrap().unwrap();
        for other in (0..settings.workers).filter(|other| *other != index) {
            worker.set_address(&name(other), &address(other)).unwrap();
        }
        let arena = worker.arena(settings.pages, settings.page_bytes).await.unwrap();
        // Every other worker has memory of its own.
        let local = match index % 2 {
            0 => worker.arena(settings.pages, settings.page_bytes).await.unwrap(),
            _ => {
                let memory = vec![0_u8; settings.pages as usize * settings.page_bytes];
                worker.arena_of(memory, settings.page_bytes).unwrap()
            }
        };
        assert!(local.page(0).unwrap().iter().all(|byte| *byte == 0));
        let life = Self {
            index,
            node,
            worker,
            handle: handle.clone(),
            settings,
            model: model.clone(),
            slots: Mutex::new(vec![Slot::Left; settings.pages as usize]),
            arena,
            local,
            used: Mutex::default(),
            found: Mutex::default(),
            exposed: Mutex::default(),
            count: Mutex::default(),
            is_over: AtomicBool::new(false),
        };
        (0..settings.pages).for_each(|page| {
            life.rewrite(page);
            life.refill(page);
        });
        let exposed = life.expose();
        *life.exposed.lock().unwrap() = Some(exposed);
        Arc::new(life)
    }

    fn expose(&self) -> Exposed {
        let exposed = self.worker.expose(NAME, &self.arena).unwrap();
        *self.count.lock().unwrap() = Some(exposed.count(COUNTED).unwrap());
        exposed
    }

    /// Gives a page of the exposed arena a new content, at once.
    pub(super) fn rewrite(&self, page: u32) {
        let content = self.model.new_number();
        let writing = self.model.begin((self.index, self.index), &[(page, content)], None);
        self.model.fill(content, &mut self.arena.page_mut(page).unwrap());
        writing.done();
    }

    /// Gives a page of the other arena a new content, which must be free.
    fn refill(&self, page: u32) {
        let content = self.model.new_number();
        match self.local.page_mut(page) {
            Ok(mut bytes) => self.model.fill(content, &mut bytes),
            Err(error) => {
                return self.model.fail(format!("a page is not free when its transfer is over: {error}"));
            }
        }
        self.set(page, Slot::Whole(content));
    }

    fn set(&self, page: u32, slot: Slot) {
        self.slots.lock().unwrap()[page as usize] = slot;
    }

    pub(super) async fn rest(&self, rng: &mut Rng, longest: Duration) {
        let moment = rng.duration(longest);
        self.node.runtime().sleep(moment).await;
    }

    /// Does some deeds, one after the other.
    pub(super) async fn act(self: Arc<Self>, mut rng: Rng) {
        for _ in 0..self.settings.deeds {
            match rng.below(10) {
                0 => self.write_own(&mut rng).await,
                1 => self.read_own(&mut rng).await,
                2 => self.use_local(&mut rng),
                _ => self.transfer(&mut rng).await,
            }
            let longest = rng.pick([0, 10, 500, 20_000]);
            self.rest(&mut rng, Duration::from_micros(longest)).await;
        }
    }

    fn use_page(&self, page: u32) -> Used<'_> {
        *self.used.lock().unwrap().entry(page).or_default() += 1;
        Used(self, page)
    }

    /// Writes a page of the exposed arena, and takes its time.
    async fn write_own(&self, rng: &mut Rng) {
        let page = rng.below(self.settings.pages as usize) as u32;
        let Ok(mut bytes) = self.arena.page_mut(page) else { return };
        let _used = self.use_page(page);
        let content = self.model.new_number();
        let writing = self.model.begin((self.index, self.index), &[(page, content)], None);
        let whole = {
            let mut whole = vec![0; bytes.len()];
            self.model.fill(content, &mut whole);
            whole
        };
        let half = bytes.len() / 2;
        bytes[..half].copy_from_slice(&whole[..half]);
        let rest = bytes[half..].to_vec();
        self.rest(rng, Duration::from_micros(500)).await;
        if bytes[..half] != whole[..half] || bytes[half..] != rest {
            self.model.fail(format!("page {page} changed while this program wrote it"));
        }
        bytes[half..].copy_from_slice(&whole[half..]);
        drop(bytes);
        writing.done();
    }

    /// Looks at a page of the exposed arena for some time.
    async fn read_own(&self, rng: &mut Rng) {
        let page = rng.below(self.settings.pages as usize) as u32;
        let began = self.model.now();
        let Ok(view) = self.arena.page(page) else { return };
        let _used = self.use_page(page);
        self.model.check((self.index, page), &view, began);
        let then = view.to_vec();
        self.rest(rng, Duration::from_micros(500)).await;
        if view[..] != then {
            self.model.fail(format!("page {page} changed while this program had a view of it"));
        }
    }

    /// Looks at all pages that no transfer has, and writes one.
    fn use_local(&self, rng: &mut Rng) {
        self.check_local();
        let page = rng.below(self.settings.pages as usize) as u32;
        let slot = self.slots.lock().unwrap()[page as usize].clone();
        match slot {
            Slot::Whole(_) | Slot::Parts(_) => self.refill(page),
            // Nobody may change it once it is free.
            Slot::Left if self.local.page_mut(page).is_ok() => self.refill(page),
            Slot::Left | Slot::Claimed => {}
        }
    }

    /// No transfer has changed a page that it did not have.
    pub(super) fn check_local(&self) {
        let slots = self.slots.lock().unwrap().clone();
        for (page, slot) in (0..).zip(&slots) {
            let view = || self.local.page(page).unwrap();
            let is_kept = match slot {
                Slot::Whole(content) => self.model.content_of(&view()) == Some(*content),
                Slot::Parts(bytes) => view()[..] == bytes[..],
                Slot::Claimed | Slot::Left => true,
            };
            if !is_kept {
                self.model.fail(format!("page {page} of worker {} is not {slot:?} any more", self.index));
            }
        }
    }

    /// Pages that no task uses.
    fn claim(&self, count: usize, for_reading: bool, rng: &mut Rng) -> Option<(Vec<u32>, Vec<Slot>)> {
        let mut slots = self.slots.lock().unwrap();
        let with_left = !for_reading && rng.chance(1, 2);
        let is_free = |slot: &Slot| match slot {
            Slot::Whole(_) => true,
            Slot::Parts(_) => !for_reading,
            Slot::Left => with_left,
            Slot::Claimed => false,
        };
        let mut free: Vec<u32> =
            (0..).zip(slots.iter()).filter(|(_, slot)| is_free(slot)).map(|(page, _)| page).collect();
        let pages: Vec<_> =
            (0..count.min(free.len())).map(|_| free.swap_remove(rng.below(free.len()))).collect();
        let claim = |page: &u32| std::mem::replace(&mut slots[*page as usize], Slot::Claimed);
        let before = pages.iter().map(claim).collect();
        (!pages.is_empty()).then_some((pages, before))
    }

    async fn remote(&self, peer: usize, rng: &mut Rng) -> Option<RemoteArena> {
        let found = self.found.lock().unwrap().get(&peer).cloned();
        if found.is_some() && rng.chance(3, 4) {
            return found;
        }
        match self.worker.peer(&name(peer)).unwrap().arena(NAME).await {
            Ok(remote) => {
                assert_eq!(
                    (remote.count(), remote.page_bytes()),
                    (self.arena.count(), self.arena.page_bytes())
                );
                self.found.lock().unwrap().insert(peer, remote.clone());
                Some(remote)
            }
            Err(error) => {
                self.explain(&error);
                None
            }
        }
    }

    /// An error without a fault must be that of a page or an arena in use.
    fn explain(&self, error: &WorkerError) {
        let is_usual = match error {
            WorkerError::Config { field: "page", .. } => true,
            // CANCELLED: the exposure ended before the note was read.
            WorkerError::Remote { status, .. } => {
                matches!(status.code, Code::Unavailable | Code::NotFound | Code::Cancelled)
            }
            _ => false,
        };
        if !is_usual && !self.model.is_disturbed() {
            self.model.fail(format!("worker {}: {error}", self.index));
        }
    }

    /// Moves some pages, or gives up.
    async fn transfer(&self, rng: &mut Rng) {
        let peer = (self.index + 1 + rng.below(self.settings.workers - 1)) % self.settings.workers;
        let Some(remote) = self.remote(peer, rng).await else { return };
        let is_write = rng.chance(1, 2);
        let count = rng.pick([1, 1, 2, 3, 7, 20]);
        let Some((local, before)) = self.claim(count, is_write, rng) else { return };
        let mut all: Vec<u32> = (0..self.settings.pages).collect();
        let places = local.iter().map(|_| all.swap_remove(rng.below(all.len()))).collect();
        let moves = Moves { peer, remote: places, local, before, began: self.model.now() };
        if is_write { self.write(&remote, moves, rng).await } else { self.read(&remote, moves, rng).await }
    }

    async fn read(&self, remote: &RemoteArena, moves: Moves, rng: &mut Rng) {
        let (from, at) = (Pages::from(moves.remote.as_slice()), Pages::from(moves.local.as_slice()));
        let transfer = remote.read(&from, &self.local, &at);
        let (ended, is_over) = self.run(transfer, rng).await;
        match ended {
            Some(Ok(())) => self.came(&moves),
            Some(Err(WorkerError::Config { field: "page", .. })) => {
                // A page that was left is in use still; nothing has happened to the others.
                self.put_back(&moves);
            }
            _ if is_over => self.came_in_parts(&moves),
            _ => moves.local.iter().for_each(|page| self.set(*page, Slot::Left)),
        }
    }

    fn put_back(&self, moves: &Moves) {
        moves.local.iter().zip(&moves.before).for_each(|(page, slot)| self.set(*page, slot.clone()));
    }

    /// A read ended well: exactly its pages are there.
    fn came(&self, moves: &Moves) {
        for (page, from) in moves.local.iter().zip(&moves.remote) {
            let Ok(bytes) = self.local.page_mut(*page) else {
                self.model.fail(format!("page {page} is not free after its read"));
                continue;
            };
            let content = self.model.check((moves.peer, *from), &bytes, moves.began);
            self.set(*page, content.map_or_else(|| Slot::Parts(bytes.to_vec()), Slot::Whole));
        }
    }

    /// A read failed or was given up, and is over: its pages are free, and have what they had or what the peer's have.
    fn came_in_parts(&self, moves: &Moves) {
        for ((page, before), from) in moves.local.iter().zip(&moves.before).zip(&moves.remote) {
            let Ok(bytes) = self.local.page_mut(*page) else {
                // An earlier transfer, which was dropped, may have it still, if this one failed before it began.
                if !matches!(before, Slot::Left) {
                    self.model.fail(format!("page {page} is not free after its read was given up"));
                }
                self.set(*page, Slot::Left);
                continue;
            };
            let mut contents = self.model.contents((moves.peer, *from), moves.began);
            if let Slot::Whole(content) = before {
                contents.push(*content);
                if !self.model.is_mix(&bytes, &contents) {
                    self.model.fail(format!("page {page} has what was not read: none of {contents:?}"));
                }
            }
            let content = self.model.content_of(&bytes);
            self.set(*page, content.map_or_else(|| Slot::Parts(bytes.to_vec()), Slot::Whole));
        }
    }

    async fn write(&self, remote: &RemoteArena, moves: Moves, rng: &mut Rng) {
        let contents = moves.before.iter().map(|slot| match slot {
            Slot::Whole(content) => *content,
            other => panic!("{other:?} was claimed"),
        });
        let pages: Vec<_> = moves.remote.iter().copied().zip(contents).collect();
        let note = rng.pick([None, None, Some(COUNTED), Some(0), Some(0)]);
        let note = note.map(|note| if note == COUNTED { note } else { self.model.new_number() });
        let (from, at) = (Pages::from(moves.local.as_slice()), Pages::from(moves.remote.as_slice()));
        let transfer = remote.write(&self.local, &from, &at);
        let transfer = note.into_iter().fold(transfer, Transfer::note);
        let writing = self.model.begin((self.index, moves.peer), &pages, note);
        let (ended, is_over) = self.run(transfer, rng).await;
        settle(ended.as_ref(), writing);
        if !is_over {
            return moves.local.iter().for_each(|page| self.set(*page, Slot::Left));
        }
        self.put_back(&moves);
        // What the pages have from now on must not be sent.
        moves.local.iter().for_each(|page| self.refill(*page));
    }

    /// Runs a transfer to its end, or gives it up. Returns its result, if it has one, and whether all of its pages must be free.
    async fn run(&self, mut transfer: Transfer, rng: &mut Rng) -> (Option<Result<(), WorkerError>>, bool) {
        let until = match rng.below(8) {
            0 => Until::Polls(rng.below(5)),
            1 | 2 => {
                let longest = rng.pick([1, 100, 5000, 50_000]);
                Until::Moment(rng.duration(Duration::from_micros(longest)))
            }
            _ => Until::End,
        };
        let ended = self.until(&mut transfer, until).await;
        if let Some(Err(error)) = &ended {
            self.explain(error);
        }
        let is_well = matches!(ended, Some(Ok(())));
        let cancels = rng.chance(2, 3);
        if cancels {
            transfer.cancel().await;
        }
        (ended, is_well || cancels)
    }

    async fn until(&self, transfer: &mut Transfer, until: Until) -> Option<Result<(), WorkerError>> {
        match until {
            Until::End => Some(transfer.await),
            Until::Polls(polls) => {
                let mut left = polls;
                poll_fn(|context| {
                    if left == 0 {
                        return Poll::Ready(None);
                    }
                    left -= 1;
                    transfer.poll_unpin(context).map(Some)
                })
                .await
            }
            Until::Moment(moment) => {
                let runtime = self.node.runtime();
                match select(transfer, pin!(runtime.sleep(moment))).await {
                    Either::Left((ended, _)) => Some(ended),
                    Either::Right(_) => None,
                }
            }
        }
    }

    /// Takes the notes of one round, and ends the exposure now and then.
    pub(super) async fn take_notes(self: Arc<Self>, mut rng: Rng) {
        let mut exposed = self.exposed.lock().unwrap().take().unwrap();
        loop {
            match timeout(&*self.node.runtime(), Duration::from_millis(20), exposed.next()).await {
                Ok(written) => self.model.noted(self.index, &written),
                Err(_) if self.is_over.load(Ordering::Relaxed) => {
                    // After a stop of the process, the time may be over although there are notes.
                    while let Some(written) = exposed.next().now_or_never() {
                        self.model.noted(self.index, &written);
                    }
                    break;
                }
                Err(_) if rng.chance(1, 30) => exposed = self.expose_again(exposed).await,
                Err(_) => {}
            }
            if rng.chance(1, 8) {
                self.rest(&mut rng, Duration::from_millis(20)).await;
            }
        }
        *self.exposed.lock().unwrap() = Some(exposed);
    }

    /// Ends the exposure, after which no peer has a page.
    async fn expose_again(&self, exposed: Exposed) -> Exposed {
        self.model.lose_notes(self.index);
        exposed.end().await;
        self.check_free();
        self.expose()
    }

    /// Every page of the exposed arena is free, unless this program uses it.
    pub(super) fn check_free(&self) {
        let used = self.used.lock().unwrap().clone();
        for page in 0..self.settings.pages {
            let is_used = used.get(&page).is_some_and(|uses| *uses > 0);
            if let Err(PageError::Busy { .. }) = self.arena.page_mut(page)
                && !is_used
            {
                self.model.fail(format!("page {page} of worker {} is not free", self.index));
            }
        }
    }

    /// The tasks that act are over, and `take_notes` ends soon.
    pub(super) fn end_round(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    pub(super) fn begin_round(&self) {
        self.is_over.store(false, Ordering::Relaxed);
    }

    /// No transfer is under way any more: all pages are free, and have what they must have.
    pub(super) fn check_quiet(&self) {
        self.check_free();
        let began = self.model.now();
        for page in 0..self.settings.pages {
            self.model.check((self.index, page), &self.arena.page(page).unwrap(), began);
            let is_left = matches!(self.slots.lock().unwrap()[page as usize], Slot::Left | Slot::Claimed);
            if is_left {
                self.refill(page);
            }
        }
        self.check_local();
        self.check_counted();
        let memory = self.worker.receive_memory();
        assert_eq!((memory.leaked_bytes, memory.waiting), (0, 0), "worker {}", self.index);
    }

    fn check_counted(&self) {
        let mut count = self.count.lock().unwrap();
        let (Some(count), Some((least, most))) = (count.as_mut(), self.model.counted(self.index)) else {
            return;
        };
        let now = count.now();
        let reached = count.reach(least).now_or_never();
        if now < least || now > most || reached != Some(true) {
            self.model.fail(format!("{now} writes were counted, of {least} to {most}"));
        }
    }

    /// The contents of the next round begin with those that are there, and whole ones where there are none.
    pub(super) fn settle(&self) {
        let exposed = self.exposed.lock().unwrap();
        let exposed = exposed.as_ref().unwrap();
        let mut count = self.count.lock().unwrap();
        *count = None;
        *count = Some(exposed.count(COUNTED).unwrap());
        for page in 0..self.settings.pages {
            let content = self.model.content_of(&self.arena.page(page).unwrap());
            match content {
                Some(content) => self.model.begin((self.index, self.index), &[(page, content)], None).done(),
                None => self.rewrite(page),
            }
        }
    }

    /// Everything of a living peer can be read, and written.
    pub(super) async fn reads_all(&self, peer: usize) {
        let remote = self.worker.peer(&name(peer)).unwrap().arena(NAME).await.unwrap();
        let all = Pages::from(0..self.settings.pages);
        let began = self.model.now();
        remote.read(&all, &self.local, &all).await.unwrap();
        for page in 0..self.settings.pages {
            let content = self.model.check((peer, page), &self.local.page(page).unwrap(), began);
            self.set(page, content.map_or(Slot::Left, Slot::Whole));
        }
        let contents: Vec<_> = (0..self.settings.pages)
            .filter_map(|page| Some((page, self.model.content_of(&self.local.page(page).unwrap())?)))
            .collect();
        let writing = self.model.begin((self.index, peer), &contents, None);
        remote.write(&self.local, &all, &all).await.unwrap();
        writing.done();
    }

    /// The worker has ended: no peer has a page, and its memory returns with its arenas.
    pub(super) async fn is_gone(self: Arc<Self>) {
        self.handle.runtime().sleep(Duration::from_millis(900)).await;
        self.check_free();
        for page in 0..self.settings.pages {
            if self.local.page_mut(page).is_err() {
                self.model.fail(format!("page {page} of worker {} is not free at the end", self.index));
            }
        }
        let worker = self.worker.clone();
        drop(Arc::into_inner(self).expect("no task is left"));
        let memory = worker.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes, memory.waiting), (0, 0, 0));
    }
}

/// What became of a write.
fn settle(ended: Option<&Result<(), WorkerError>>, writing: Writing) {
    match ended {
        Some(Ok(())) => writing.done(),
        Some(Err(WorkerError::Config { field: "page", .. })) => writing.never_began(),
        _ => drop(writing),
    }
}
