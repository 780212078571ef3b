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

use self::{folder::Folder, open_folder::explained};
use super::{
    StoreError,
    backend::Backend,
    request::{Answer, Request},
    wanted::Pause,
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

    /// Makes the change of `key` that `request` asks for, when no other process makes one.
    async fn change(&self, key: String, request: Request) -> Result<Answer, StoreError> {
        let change = Arc::new((key, request));
        let (begun, mut pause) = (self.runtime.now(), self.pauses());
        loop {
            let again = Arc::clone(&change);
            let changed = self.on_thread(move |folder| folder.try_change(&again.0, &again.1)).await?;
            if let Some(changed) = changed {
                return Ok(changed);
            }
            if self.runtime.now().saturating_sub(begun) >= self.limit {
                let limit = self.limit;
                return Err(self.on_thread(move |folder| folder.lock_stays(&change.0, limit)).await?);
            }
            pause.sleep(&*self.runtime, PAUSE_MAX).await;
        }
    }
}

/// The error of a file system that does not respond.
fn silent(limit: Duration) -> String {
    format!(
        "the file system did not respond within {limit:?}, and the request may still take effect; check that the file server runs, and \
         that the path does not block"
    )
}

impl Backend for FileStore {
    fn name(&self) -> String {
        self.folder.store()
    }

    fn runtime(&self) -> &dyn Runtime {
        &*self.runtime
    }

    fn pauses(&self) -> Pause {
        Pause::new(PAUSE_MIN, PAUSE_MAX)
    }

    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        async move {
            let key = match &request {
                Request::Get { keys } | Request::Wait { keys, .. } => {
                    let keys = keys.clone();
                    return self.on_thread(move |folder| folder.read_all(&keys)).await.map(Answer::values);
                }
                Request::Set { key, .. }
                | Request::Add { key, .. }
                | Request::CompareSet { key, .. }
                | Request::Delete { key } => key.clone(),
            };
            self.change(key, request).await
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use tensorwire_fabric::TokioRuntime;

    use super::{super::Store as _, *};

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
