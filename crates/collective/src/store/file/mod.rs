//! The store in a folder.

mod folder;
mod lock;
mod name;
mod open_folder;
mod record;

use std::{
    io,
    path::Path,
    sync::{Arc, mpsc},
    time::Duration,
};

use futures::{FutureExt, channel::oneshot};
use tensorwire_fabric::{BoxFuture, Runtime, timeout};

use self::{
    folder::{Change, Changed, Folder},
    open_folder::explained,
};
use super::{
    Store, StoreError,
    rules::{check_compare, check_key, check_keys, check_value},
    wanted::{Pause, look_for},
};

/// The pause before a wait, or a write whose lock is taken, tries again. It doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The most calls that wait for the store's thread.
const CALLS_MAX: usize = 1024;

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
/// with the last clone. A call to which the file system does not respond ends at the store's limit, a wait at the sum of both
/// limits.
///
/// # Trust
/// A process that may write into the folder can replace all records. So the folder must be of the user of this process, and writable by
/// that user alone; a folder that the store makes has the mode 0700. The store refuses other folders, also `/tmp` itself. It
/// follows no links in the folder, and reads regular files only.
#[derive(Debug, Clone)]
pub struct FileStore {
    folder: Arc<Folder>,
    limit: Duration,
    runtime: Arc<dyn Runtime>,
    calls: mpsc::SyncSender<Call>,
}

/// A task for the store's thread.
type Call = Box<dyn FnOnce(&Folder) + Send>;

impl FileStore {
    /// Opens the folder at `path`, and makes it if it does not exist. `limit` is how long each later operation without its own
    /// limit may take. This call blocks the caller's thread until the file system responds, for `limit` at most.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`], also if other users may write into the folder.
    pub fn open(path: &Path, limit: Duration, runtime: Arc<dyn Runtime>) -> Result<Self, StoreError> {
        let unreachable = |detail: String| StoreError::Unreachable {
            store: format!("the store in {}", path.display()),
            detail: format!("cannot open it: {detail}"),
        };
        let failed =
            |error: io::Error| unreachable(explained(&error, "give a folder that all ranks may write to"));
        let (calls, received) = mpsc::sync_channel::<Call>(CALLS_MAX);
        let (opened, folder) = mpsc::sync_channel(1);
        let (own_path, own_runtime) = (path.to_owned(), Arc::clone(&runtime));
        let thread = std::thread::Builder::new().name("tensorwire file store".to_owned());
        let run = move || {
            let folder = Folder::open(&own_path, own_runtime).map(Arc::new);
            let own = folder.as_ref().ok().map(Arc::clone);
            // The caller may not wait any more.
            let _ = opened.send(folder);
            if let Some(own) = own {
                received.iter().for_each(|call| call(&own));
            }
        };
        thread.spawn(run).map_err(failed)?;
        let folder = folder.recv_timeout(limit).map_err(|_| unreachable(silent(limit)))?;
        Ok(Self { folder: folder.map_err(failed)?, limit, runtime, calls })
    }

    /// Runs `call` on the store's thread, within the store's limit. It is not run if the future is dropped before its turn.
    async fn on_thread<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Folder) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, result) = oneshot::channel();
        let call = Box::new(move |folder: &Folder| {
            if !done.is_canceled() {
                drop(done.send(call(folder)));
            }
        });
        self.calls
            .try_send(call)
            .map_err(|_| self.folder.unreachable(format!("{CALLS_MAX} calls wait for the file system")))?;
        match timeout(&*self.runtime, self.limit, result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(self.folder.unreachable("its thread ended: open the store again".to_owned())),
            Err(_) => Err(self.folder.unreachable(silent(self.limit))),
        }
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
                return Err(self.on_thread(move |folder| folder.lock_stays(&own_key, limit)).await?);
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
        self.folder.unreachable("internal error: a write returned another kind of result".to_owned())
    }
}

/// The error of a file system that does not respond.
fn silent(limit: Duration) -> String {
    format!(
        "the file system did not respond within {limit:?}, and the request may still take effect; check that the file server runs, and \
         that the path does not block"
    )
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

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use tensorwire_fabric::TokioRuntime;

    use super::*;

    #[tokio::test]
    async fn the_callers_stop_waiting_for_a_file_system_that_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let mut store = FileStore::open(folder.path(), Duration::from_secs(60), runtime).unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let blocking = store.calls.try_send(Box::new(move |_| assert!(blocked.recv().is_err())));
        assert!(blocking.is_ok());
        store.limit = Duration::from_millis(50);
        let (key, never) = (["a".to_owned()], Duration::from_millis(50));
        let errors = [
            store.delete("a").await.unwrap_err(),
            store.set("a", b"1").await.unwrap_err(),
            store.get(&key).await.unwrap_err(),
            store.wait(&key, never).await.unwrap_err(),
            store.add("a", 1).await.unwrap_err(),
        ];
        assert!(
            errors.iter().all(|error| error.to_string().contains("did not respond within 50ms")),
            "{errors:?}"
        );
        // The calls that wait for it are bounded, too.
        let waiting: Vec<_> = (0..CALLS_MAX).map(|_| store.read(key.to_vec()).now_or_never()).collect();
        assert!(waiting.iter().all(|read| read.as_ref().is_none_or(Result::is_err)));
        assert!(store.get(&key).await.unwrap_err().to_string().contains("1024 calls wait"));
        store.limit = Duration::from_secs(60);
        drop(release);
        while store.get(&key).await.is_err() {}
        assert_eq!(
            store.get(&key).await.unwrap(),
            [None],
            "a write whose caller has gone does not happen later"
        );
    }

    #[test]
    fn own_files_are_new_ones() {
        let folder = tempfile::tempdir().unwrap();
        let open = open_folder::OpenFolder::open(folder.path()).unwrap();
        let (victim, target) = (folder.path().join("victim"), folder.path().join("own"));
        std::fs::write(&victim, "secret").unwrap();
        std::fs::set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
        for planted in
            [|from, to| std::os::unix::fs::symlink(from, to), |from, to| std::fs::hard_link(from, to)]
        {
            planted(&victim, &target).unwrap();
            assert_eq!(open.create("own", b"x").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(std::fs::read(&victim).unwrap(), b"secret");
            std::fs::remove_file(&target).unwrap();
        }
        open.create("own", b"x").unwrap();
        assert_eq!(target.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
