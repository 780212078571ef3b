//! Published tensors: they stay until they are replaced or withdrawn, and any number of receivers may fetch them.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    ops::Bound,
    sync::{
        Arc, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_fabric::{Catalogue, CellContent, CellNumber};
use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, Metadata, Status, Wanted};
use tensorwire_testpoints::sync::{Mutex, RwLock};

use crate::{
    error::WorkerError,
    values::{
        catalogue::{self, Listing, OwnCatalogue},
        latch::Latch,
        takers::{Takers, Turn},
        tensor::Tensor,
    },
};

/// Identifies a publication by the worker's incarnation and a number. The number grows with every publication of that
/// worker under any name, and starts again in each incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version {
    pub(crate) incarnation: u64,
    pub(crate) number: u64,
}

impl Version {
    /// The number. A larger number of the same incarnation is newer.
    pub fn number(self) -> u64 {
        self.number
    }

    /// The incarnation of the worker that published it.
    pub fn incarnation(self) -> u64 {
        self.incarnation
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:016x}", self.number, self.incarnation)
    }
}

/// An entry in the list of a worker's published tensors.
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let listed = peer.list().await?;
/// assert_eq!((listed[0].name.as_str(), listed[0].metadata.byte_length), ("w", 4));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its name.
    pub name: String,
    /// Element type, shape and size.
    pub metadata: Metadata,
    /// The version.
    pub version: Version,
    /// XXH3-64 of the bytes, if it was requested.
    pub checksum: Option<u64>,
}

/// A published tensor and the number of its version.
#[derive(Debug, Clone)]
pub(crate) struct Edition {
    pub(crate) version: u64,
    /// How many publications there were under the name since the first one, or since it was withdrawn.
    pub(crate) sequence: u64,
    /// The version of the first of these.
    pub(crate) began: u64,
    pub(crate) tensor: Tensor,
    /// Whether it is in the catalogue.
    pub(crate) listing: Listing,
}

impl Edition {
    /// One that is not published under a name.
    pub(crate) fn unnamed(version: u64, tensor: Tensor, listing: Listing) -> Self {
        Self { version, sequence: 0, began: 0, tensor, listing }
    }

    /// What neighbours read.
    pub(crate) fn content(&self) -> Option<CellContent> {
        catalogue::content(self.version, &self.tensor)
    }

    /// Enters the content into `cell` of `catalogue`, if there is a cell for it. Returns memory to be dropped without a lock.
    pub(crate) fn enter(&mut self, catalogue: &Arc<dyn Catalogue>, cell: Option<CellNumber>) -> Vec<Buf> {
        self.listing = cell.map_or(Listing::Refused, Listing::Cell);
        cell.map(|cell| catalogue.write(cell, self.content())).unwrap_or_default()
    }
}

/// The longest content in bytes that is written with the published tensors locked: fetches wait for it.
const IN_PLACE_MAX: usize = 1 << 20;

/// The edition that a publication replaces, and the memory that the catalogue has released.
type Replaced = (Option<Edition>, Vec<Buf>);

/// The published tensors of this worker.
#[derive(Debug)]
pub(crate) struct PublishedSet {
    /// The incarnation of the worker.
    incarnation: u64,
    /// Sorted by name, so that the cost of a page of a list depends on the length of the page, not on how much is
    /// published.
    entries: RwLock<BTreeMap<String, Edition>>,
    versions: AtomicU64,
    /// Written with `entries` locked.
    catalogue: OwnCatalogue,
    waiting: Mutex<WaitLists>,
    /// The subscribers that want every version.
    pub(crate) takers: Takers,
    /// How many entries were visited to make pages.
    #[cfg(test)]
    visited: AtomicU64,
}

/// The wait lists for publications, by name.
#[derive(Debug, Default)]
struct WaitLists {
    /// Set by the shutdown: new waits end with this status.
    over: Option<Status>,
    /// Empty lists are removed, so that names which are no longer waited for use no memory.
    lines: BTreeMap<String, WaitList>,
    next: u64,
}

/// Answers to one peer that wait for publications.
pub(crate) trait WaitingAnswers: fmt::Debug + Send + Sync {
    /// Sends the answers that a publication has woken, unless they must wait.
    fn send(&self);
}

#[derive(Debug)]
struct WaitList {
    number: u64,
    news: Latch<()>,
    waiting: usize,
    /// The waiting answers to peers, each group once.
    answers: Vec<Arc<dyn WaitingAnswers>>,
}

/// Membership in a wait list, which ends when this is dropped.
struct WaitListPlace<'set> {
    set: &'set PublishedSet,
    name: &'set str,
    line: u64,
    news: Latch<()>,
    /// The group of answers that it belongs to, if it is an answer.
    answers: Option<Arc<dyn WaitingAnswers>>,
}

/// The result of a lookup.
enum Stand<'set> {
    /// The edition exists.
    Found(Edition),
    /// The edition is not published yet, but an older one may be.
    Waits { place: WaitListPlace<'set>, is_there: bool },
}

impl Drop for WaitListPlace<'_> {
    fn drop(&mut self) {
        let mut waiting = self.set.waiting();
        let line = waiting.lines.get_mut(self.name).filter(|line| line.number == self.line);
        let Some(line) = line else { return };
        line.waiting -= 1;
        if let Some(answers) = &self.answers
            && let Some(index) = line.answers.iter().position(|other| Arc::ptr_eq(other, answers))
        {
            line.answers.swap_remove(index);
        }
        if line.waiting == 0 {
            waiting.lines.remove(self.name);
        }
    }
}

impl PublishedSet {
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            entries: RwLock::default(),
            versions: AtomicU64::new(0),
            catalogue: OwnCatalogue::default(),
            waiting: Mutex::default(),
            takers: Takers::default(),
            #[cfg(test)]
            visited: AtomicU64::new(0),
        }
    }

    pub(crate) fn publish(&self, name: &str, tensor: Tensor) -> Version {
        let (version, replaced) = self.put(name, tensor, None);
        // Dropped outside the lock, because the last drop of a tensor frees pool memory, which may wake tasks.
        drop(replaced);
        self.tell(name);
        Version { incarnation: self.incarnation, number: version }
    }

    /// As [`publish`](Self::publish), with a number of the caller's, which grows with every publication under the name. An older one
    /// changes nothing.
    pub(crate) fn publish_as(&self, name: &str, number: u64, tensor: Tensor) {
        let (_, replaced) = self.put(name, tensor, Some(number));
        drop(replaced);
        self.tell(name);
    }

    pub(crate) fn withdraw(&self, name: &str) -> bool {
        let withdrawn = {
            let mut entries = self.entries_mut();
            let edition = entries.remove(name);
            let cell = edition.as_ref().and_then(|edition| edition.listing.cell());
            let unlisted = cell.map(|cell| self.catalogue.write(cell, None)).unwrap_or_default();
            (edition, unlisted)
        };
        let was_there = withdrawn.0.is_some();
        drop(withdrawn);
        self.tell(name);
        was_there
    }

    /// Publishes the next version of a tensor in the memory of the one before: with `content` in place of its bytes from `at` on. False,
    /// and nothing has changed, if the tensor is not there or [cannot be overwritten](Tensor::try_overwrite), or `content` is longer than
    /// [`IN_PLACE_MAX`].
    pub(crate) fn overwrite(&self, name: &str, at: usize, content: &[u8]) -> bool {
        if content.len() > IN_PLACE_MAX {
            return false;
        }
        let mut entries = self.entries_mut();
        let Some((key, Edition { version, sequence, began, tensor, listing })) = entries.remove_entry(name)
        else {
            return false;
        };
        let write = |content| listing.cell().map(|cell| self.catalogue.write(cell, content));
        // Neighbours find nothing before the memory changes. If one of them views it, the catalogue keeps its handle on it.
        let place = tensor.buf().place();
        let mut released = write(None).unwrap_or_default();
        released.retain(|bytes| bytes.place() != place);
        let (version, tensor, is_done) = match tensor.try_overwrite(at, content) {
            Ok(tensor) => (self.versions.fetch_add(1, Ordering::Relaxed) + 1, tensor, true),
            Err(tensor) => (version, tensor, false),
        };
        let sequence = sequence + u64::from(is_done);
        let edition = Edition { version, sequence, began, tensor, listing };
        released.extend(write(edition.content()).unwrap_or_default());
        entries.insert(key, edition);
        drop(entries);
        drop(released);
        if is_done {
            self.tell(name);
        }
        is_done
    }

    /// Lists `name` in `catalogue`, if neighbours read that catalogue and it has room.
    pub(crate) fn list(&self, name: &str, catalogue: &Arc<dyn Catalogue>) {
        let Some(own) = self.catalogue.get_or_set(catalogue) else { return };
        let mut entries = self.entries_mut();
        let Some(edition) = entries.get_mut(name).filter(|edition| edition.listing == Listing::Unlisted)
        else {
            return;
        };
        let unlisted = edition.enter(own, own.cell(name));
        drop(entries);
        drop(unlisted);
    }

    /// Waits until every subscriber that wants every version has taken the present one. The caller publishes while it has the turn.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn turn(&self, name: &str) -> Turn {
        self.takers.turn(name, || self.get(name).map_or(0, |edition| edition.version)).await
    }

    /// Ends every current and later wait with `status`.
    pub(crate) fn close(&self, status: Status) {
        let lines = {
            let mut waiting = self.waiting();
            waiting.over.get_or_insert(status);
            std::mem::take(&mut waiting.lines)
        };
        lines.into_values().for_each(|line| line.news.set(Some(())));
    }

    pub(crate) fn get(&self, name: &str) -> Option<Edition> {
        self.entries().get(name).cloned()
    }

    /// Waits for the `wanted` edition under `name`, for one of the `answers` or a fetch of this worker.
    ///
    /// # Errors
    /// The tensor was withdrawn during the wait, or the worker is shut down.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn edition(
        &self,
        name: &str,
        wanted: Wanted,
        answers: Option<&Arc<dyn WaitingAnswers>>,
    ) -> Result<Edition, Status> {
        let mut was_there = false;
        loop {
            match self.stand(name, (wanted, answers), was_there)? {
                Stand::Found(edition) => return Ok(edition),
                Stand::Waits { place, is_there } => {
                    was_there |= is_there;
                    place.news.wait().await;
                }
            }
        }
    }

    /// The edition, or membership in the wait list of the name.
    fn stand<'set>(
        &'set self,
        name: &'set str,
        (wanted, answers): (Wanted, Option<&Arc<dyn WaitingAnswers>>),
        was_there: bool,
    ) -> Result<Stand<'set>, Status> {
        let mut waiting = self.waiting();
        // Looked up with the wait lists locked: `publish` inserts the edition first and wakes the list afterwards, so
        // an edition that is missed here wakes the list joined below.
        let edition = self.get(name);
        let is_there = edition.is_some();
        if let Some(edition) = edition.filter(|edition| wanted.is_met_by(self.incarnation, edition.version)) {
            return Ok(Stand::Found(edition));
        }
        if let Some(status) = &waiting.over {
            return Err(status.clone());
        }
        if was_there && !is_there {
            let message = format!("`{name}` was withdrawn while a newer version was waited for");
            return Err(Status::new(Code::NotFound, message));
        }
        let WaitLists { lines, next, .. } = &mut *waiting;
        let line = lines.entry(name.to_owned()).or_insert_with(|| {
            *next += 1;
            WaitList { number: *next, news: Latch::new(), waiting: 0, answers: Vec::new() }
        });
        line.waiting += 1;
        line.answers.extend(answers.cloned());
        let (news, answers) = (line.news.clone(), answers.cloned());
        let place = WaitListPlace { set: self, name, line: line.number, news, answers };
        Ok(Stand::Waits { place, is_there })
    }

    /// Wakes the tasks that wait for a publication of `name`, and sends the waiting answers.
    fn tell(&self, name: &str) {
        let line = self.waiting().lines.remove(name);
        if let Some(line) = line {
            line.news.set(Some(()));
            line.answers.iter().for_each(|answers| answers.send());
        }
    }

    /// The number of names with waiting tasks.
    #[cfg(test)]
    fn awaited(&self) -> usize {
        self.waiting().lines.len()
    }

    fn waiting(&self) -> MutexGuard<'_, WaitLists> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Up to `most` entries with names after `after`, sorted by name. Visits no other entry.
    pub(crate) fn page(&self, after: Option<&str>, most: usize) -> Vec<(String, Edition)> {
        let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = self.entries();
        let page = entries.range::<str, _>((begin, Bound::Unbounded));
        let page = page.take(most);
        #[cfg(test)]
        let page = page.inspect(|_| {
            self.visited.fetch_add(1, Ordering::Relaxed);
        });
        page.map(|(name, edition)| (name.clone(), edition.clone())).collect()
    }

    /// Inserts an edition, with the next number unless there is one. Returns its number and the edition that it replaces.
    fn put(&self, name: &str, tensor: Tensor, number: Option<u64>) -> (u64, Replaced) {
        let mut entries = self.entries_mut();
        let older = |edition: &&Edition| number.is_some_and(|number| number <= edition.version);
        if let Some(newer) = entries.get(name).filter(older) {
            return (newer.version, (None, Vec::new()));
        }
        // The number is assigned under the lock, so that of two concurrent publications the one with the greater number
        // stays.
        let version = number.unwrap_or_else(|| self.versions.fetch_add(1, Ordering::Relaxed) + 1);
        let edition = Edition { version, sequence: 1, began: version, tensor, listing: Listing::Unlisted };
        match entries.entry(name.to_owned()) {
            Entry::Occupied(mut place) => {
                if tensorwire_testpoints::planted!(
                    "a version of the same shape does not replace the one before"
                ) && place.get().tensor.metadata() == edition.tensor.metadata()
                {
                    place.get_mut().version = version;
                    place.get_mut().sequence += 1;
                    return (version, (None, Vec::new()));
                }
                let Edition { sequence, began, listing, .. } = *place.get();
                let edition = Edition { sequence: sequence + 1, began, listing, ..edition };
                let cell = edition.listing.cell();
                // Neighbours find the new edition before the memory of the old one can be reused.
                let unlisted =
                    cell.map(|cell| self.catalogue.write(cell, edition.content())).unwrap_or_default();
                (version, (Some(place.insert(edition)), unlisted))
            }
            Entry::Vacant(place) => {
                place.insert(edition);
                (version, (None, Vec::new()))
            }
        }
    }

    fn entries(&self) -> RwLockReadGuard<'_, BTreeMap<String, Edition>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries_mut(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Edition>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From now on, neighbours that still have the catalogue find nothing in it, and the memory of the tensors is free.
impl Drop for PublishedSet {
    fn drop(&mut self) {
        let cells = self.entries().values().filter_map(|edition| edition.listing.cell()).collect::<Vec<_>>();
        for cell in cells {
            drop(self.catalogue.write(cell, None));
        }
    }
}

/// Checks that `name` can be the name of a tensor that a user publishes.
pub(crate) fn check_published(name: &str) -> Result<(), WorkerError> {
    let most = tensorwire_protocol::limits::NAME_BYTES_MAX;
    let checked = if !(1..=most).contains(&name.len()) {
        Err(format!("a published name has 1 to {most} bytes"))
    } else {
        tensorwire_protocol::text::check_name(name)
    };
    checked.map_err(|remedy| WorkerError::Config { field: "published name", value: name.to_owned(), remedy })
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use tensorwire_memory::{Pool, PoolConfig};
    use tensorwire_protocol::{DataType, Metadata, Shape};

    use super::*;

    const FIRST: Wanted = Wanted::NewerThan { incarnation: 0, version: 0 };

    fn newer_than(version: Version) -> Wanted {
        Wanted::NewerThan { incarnation: version.incarnation(), version: version.number() }
    }

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn tensor() -> Tensor {
        Tensor::received(
            Metadata::dead(DataType::U8, Shape::default()),
            tensorwire_memory::Buf::empty(),
            None,
        )
    }

    #[test]
    fn s6_a_page_of_a_list_looks_at_its_own_entries_only() {
        const NAMES: usize = 100_000;
        const PAGE: usize = 256;
        let set = PublishedSet::new(7);
        // In an order other than that of the names.
        for number in 0..NAMES {
            set.publish(&format!("{:06}", number * 7919 % NAMES), tensor());
        }
        let (mut after, mut listed, mut visited) = (None::<String>, 0, 0);
        loop {
            let page = set.page(after.as_deref(), PAGE);
            let looked_at = set.visited.load(Ordering::Relaxed) - visited;
            visited += looked_at;
            assert!(
                looked_at <= PAGE as u64,
                "{looked_at} entries were looked at for a page of {}",
                page.len()
            );
            for (name, _) in &page {
                assert_eq!(*name, format!("{listed:06}"));
                listed += 1;
            }
            let Some((last, _)) = page.into_iter().next_back() else { break };
            after = Some(last);
        }
        assert_eq!(listed, NAMES);
        assert!(set.page(Some("999999"), PAGE).is_empty());
        assert_eq!(
            set.page(Some("000041x"), 1)[0].0,
            "000042",
            "a page may begin after a name that is not there"
        );
    }

    #[test]
    fn s4_names_that_nobody_waits_for_any_more_take_no_memory() {
        let set = PublishedSet::new(7);
        for name in ["a", "b", "c"] {
            let (mut one, mut two) =
                (Box::pin(set.edition(name, FIRST, None)), Box::pin(set.edition(name, FIRST, None)));
            assert!(poll(one.as_mut()).is_pending() && poll(two.as_mut()).is_pending());
            assert!(poll(one.as_mut()).is_pending());
            assert_eq!(set.awaited(), 1);
            drop(one);
            assert_eq!(set.awaited(), 1);
            set.publish("another", tensor());
            assert!(poll(two.as_mut()).is_pending());
            if name == "c" {
                assert_eq!(set.publish(name, tensor()).number(), 4);
                assert!(matches!(poll(two.as_mut()), Poll::Ready(Ok(Edition { version: 4, .. }))));
            }
            drop(two);
            assert_eq!(set.awaited(), 0);
        }
    }

    #[test]
    fn a_place_of_an_old_line_leaves_the_new_one_alone() {
        let set = PublishedSet::new(7);
        let mut old = Box::pin(set.edition("a", FIRST, None));
        assert!(poll(old.as_mut()).is_pending());
        let version = set.publish("a", tensor());
        let mut new = pin!(set.edition("a", newer_than(version), None));
        assert!(poll(new.as_mut()).is_pending());
        drop(old);
        assert_eq!(set.awaited(), 1);
        set.close(Status::new(Code::Unavailable, "over"));
        assert!(matches!(poll(new), Poll::Ready(Err(status)) if status.message == "over"));
        // Published tensors are still returned; no call waits.
        assert!(matches!(poll(pin!(set.edition("a", FIRST, None))), Poll::Ready(Ok(_))));
        assert!(matches!(poll(pin!(set.edition("b", FIRST, None))), Poll::Ready(Err(_))));
    }

    #[test]
    fn a_tensor_is_overwritten_in_place_unless_anything_holds_it() {
        let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("test") }).unwrap();
        let set = PublishedSet::new(7);
        assert!(!set.overwrite("a", 0, &[]));
        let first = set.publish("a", Tensor::from_values(&pool, &[4], &[0u8; 4]).unwrap());
        let place = set.get("a").unwrap().tensor.bytes().as_ptr();
        let mut newer = pin!(set.edition("a", newer_than(first), None));
        assert!(poll(newer.as_mut()).is_pending());
        assert!(set.overwrite("a", 1, &[8, 9]));
        let Poll::Ready(Ok(edition)) = poll(newer) else { panic!("nothing was published") };
        let bytes = edition.tensor.bytes();
        assert_eq!((edition.version, bytes, bytes.as_ptr()), (2, &[0, 8, 9, 0][..], place));

        assert!(!set.overwrite("a", 0, &[1]), "it is held");
        drop(edition);
        for (at, content) in [(3, &[1; 2][..]), (5, &[]), (usize::MAX, &[1])] {
            assert!(!set.overwrite("a", at, content), "{at} leaves it");
        }
        let edition = set.get("a").unwrap();
        assert_eq!((edition.version, edition.tensor.bytes()), (2, &[0, 8, 9, 0][..]));
    }
}
