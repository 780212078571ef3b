//! The store in a folder.

mod folder;
mod lock;
mod name;
mod record;

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Duration,
};

use futures::{FutureExt, channel::oneshot};
use tensorwire_verbs_reactor::{BoxFuture, Runtime};

use self::folder::{Change, Changed, Folder};
use super::{
    Store, StoreError,
    rules::{check_compare, check_key, check_keys, check_value},
    wanted::{Pause, look_for},
};

/// The pause before a wait, or a write whose lock is taken, tries again. It doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A folder that all ranks can access, with a file for each key. Clones share it. The folder may be on NFS.
///
/// A value is written to a temporary file, which is then renamed, so no reader sees a part of it. Each write holds the key's
/// lock, which is a file too, so that writes of several processes happen one after the other. A process that ends in between
/// leaves its lock: later writes of the key fail, with an error that names the lock's file, its owner and its age. Remove that
/// file, or the folder.
///
/// Waits poll their keys, with pauses of up to 50 ms. On NFS a value may be seen later than that, by as long as the client
/// caches; the mount option `lookupcache=none` avoids it.
///
/// The keys stay in the folder: give each job, and each attempt of it, its own folder.
///
/// One thread of the store makes all calls to the file system, so that a slow file server does not block the runtime. It ends
/// with the last clone.
#[derive(Debug, Clone)]
pub struct FileStore {
    folder: Arc<Folder>,
    limit: Duration,
    runtime: Arc<dyn Runtime>,
    calls: mpsc::Sender<Call>,
}

/// A task for the store's thread.
type Call = Box<dyn FnOnce(&Folder) + Send>;

impl FileStore {
    /// Opens the folder at `path`, and creates it if it does not exist. `limit` is how long a write waits for others of its key.
    /// This call uses the file system on the caller's thread; no other does.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`].
    pub fn open(path: &Path, limit: Duration, runtime: Arc<dyn Runtime>) -> Result<Self, StoreError> {
        let failed = |error: std::io::Error| StoreError::Unreachable {
            store: format!("the store in {}", path.display()),
            detail: format!("cannot open it: {error}; give a folder that all ranks may write to"),
        };
        let folder = Arc::new(Folder::open(path, runtime.random()).map_err(failed)?);
        let (calls, received) = mpsc::channel::<Call>();
        let own = Arc::clone(&folder);
        let thread = std::thread::Builder::new().name("tensorwire file store".to_owned());
        thread.spawn(move || received.iter().for_each(|call| call(&own))).map_err(failed)?;
        Ok(Self { folder, limit, runtime, calls })
    }

    /// Runs `call` on the store's thread. It also runs if the future is dropped.
    async fn on_thread<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Folder) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, result) = oneshot::channel();
        // The thread outlives the sender. If it has ended nevertheless, `result` fails.
        let _ = self.calls.send(Box::new(move |folder| drop(done.send(call(folder)))));
        let ended = |_| StoreError::Unreachable {
            store: self.folder.store(),
            detail: "its thread ended: open the store again".to_owned(),
        };
        result.await.unwrap_or_else(|canceled| Err(ended(canceled)))
    }

    async fn change(&self, key: &str, change: Change) -> Result<Changed, StoreError> {
        let change = Arc::new(change);
        let (begun, mut pause) = (self.runtime.now(), Pause::new(PAUSE_MIN, PAUSE_MAX));
        loop {
            let (own_key, change) = (key.to_owned(), Arc::clone(&change));
            if let Some(changed) = self.on_thread(move |folder| folder.try_change(&own_key, &change)).await? {
                return Ok(changed);
            }
            if self.runtime.now().saturating_sub(begun) >= self.limit {
                let (own_key, limit) = (key.to_owned(), self.limit);
                return Err(self.on_thread(move |folder| Ok(folder.lock_stays(&own_key, limit))).await?);
            }
            pause.sleep(&*self.runtime, PAUSE_MAX).await;
        }
    }

    async fn read(&self, keys: Vec<String>) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        self.on_thread(move |folder| folder.read_all(&keys)).await
    }

    async fn wait_for(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        check_keys(keys)?;
        let looking = (&*self.runtime, Pause::new(PAUSE_MIN, PAUSE_MAX));
        look_for(keys, limit, looking, || self.folder.store(), |missing| self.read(missing)).await
    }

    fn unexpected(&self) -> StoreError {
        StoreError::Unreachable {
            store: self.folder.store(),
            detail: "internal error: a write returned another kind of result".to_owned(),
        }
    }
}

impl Store for FileStore {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            check_key(key)?;
            check_value(value)?;
            self.change(key, Change::Set(value.to_vec())).await.map(drop)
        }
        .boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move {
            check_keys(keys)?;
            self.read(keys.to_vec()).await
        }
        .boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.wait_for(keys, limit).boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move {
            check_key(key)?;
            match self.change(key, Change::Add(delta)).await? {
                Changed::Sum(sum) => Ok(sum),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move {
            check_compare(key, expected, value)?;
            let expected = expected.map(<[u8]>::to_vec);
            match self.change(key, Change::CompareSet { expected, value: value.to_vec() }).await? {
                Changed::Value(value) => Ok(value),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move {
            check_key(key)?;
            match self.change(key, Change::Delete).await? {
                Changed::Deleted(had_one) => Ok(had_one),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }
}
