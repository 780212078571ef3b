//! The calls to the file system. None waits for another process.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::{
    super::{StoreError, rules::sum},
    lock::{self, Lock},
    name::file_name,
    record,
};

/// How often a file is opened again that another process has replaced meanwhile.
const STALE_MAX: usize = 16;

/// A folder of records.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// A random number that distinguishes this store from others that write into the folder.
    writer: u64,
    /// The process, for error messages.
    process: String,
    next_file: AtomicU64,
}

/// A write under its key's lock.
#[derive(Debug)]
pub(super) enum Change {
    Set(Vec<u8>),
    Add(i64),
    CompareSet { expected: Option<Vec<u8>>, value: Vec<u8> },
    Delete,
}

/// The result of a [`Change`].
#[derive(Debug)]
pub(super) enum Changed {
    Set,
    Sum(i64),
    Value(Option<Vec<u8>>),
    Deleted(bool),
}

impl Folder {
    /// # Errors
    /// Those of the file system.
    pub(super) fn open(path: &Path, writer: u64) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let host =
            fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "an unknown host".to_owned());
        let process = format!("process {} on {}", std::process::id(), host.trim());
        // An absolute path: the process may change its working folder.
        let path = path.canonicalize()?;
        Ok(Self { path, writer, process, next_file: AtomicU64::new(0) })
    }

    pub(super) fn store(&self) -> String {
        format!("the store in {}", self.path.display())
    }

    /// The values of `keys`.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`].
    pub(super) fn read_all(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        // When a folder is opened, an NFS client asks the server for its files again. Otherwise it may report a file as missing
        // for half a minute.
        fs::read_dir(&self.path).map_err(|error| self.failed(&self.path, &error))?;
        keys.iter().map(|key| self.read(key)).collect()
    }

    /// Makes `change` under the lock of `key`. `None` if another process has the lock.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn try_change(&self, key: &str, change: &Change) -> Result<Option<Changed>, StoreError> {
        let Some(_lock) = self.lock(key)? else { return Ok(None) };
        let found = if matches!(change, Change::Set(_)) { None } else { self.read(key)? };
        let changed = match change {
            Change::Set(value) => self.write(key, value).map(|()| Changed::Set),
            Change::Add(delta) => {
                let sum =
                    sum(found.as_deref(), *delta).map_err(|why| why.error(self.store(), key, *delta))?;
                self.write(key, sum.to_string().as_bytes()).map(|()| Changed::Sum(sum))
            }
            Change::CompareSet { expected, value } if found == *expected => {
                self.write(key, value).map(|()| Changed::Value(Some(value.clone())))
            }
            Change::CompareSet { .. } => Ok(Changed::Value(found)),
            Change::Delete => self.remove(key).map(Changed::Deleted),
        };
        changed.map(Some)
    }

    /// The error if the lock of `key` is not released.
    pub(super) fn lock_stays(&self, key: &str, limit: Duration) -> StoreError {
        let path = self.lock_path(key);
        let held = match lock::holder(&path, &self.own_path()) {
            Some((owner, Some(age))) => format!("held by {owner} since {age:.1?}"),
            Some((owner, None)) => format!("held by {owner}"),
            None => "held by several processes in turn".to_owned(),
        };
        let detail = format!(
            "`{key}` cannot be written: its lock {} was not free within {limit:?} ({held}); if that process has ended, remove \
             the file",
            path.display()
        );
        StoreError::Unreachable { store: self.store(), detail }
    }

    fn lock(&self, key: &str) -> Result<Option<Lock>, StoreError> {
        let (path, own) = (self.lock_path(key), self.own_path());
        let number = self.next_file.load(Ordering::Relaxed);
        let owner = format!("{}, writer {:016x}, lock {number}", self.process, self.writer);
        lock::take(&path, &own, owner).map_err(|error| self.failed(&path, &error))
    }

    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path_of(key);
        let file = match read_again(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failed(&path, &error)),
        };
        let bad = |why| self.unreachable(format!("{}: {why}", path.display()));
        record::decode(file, key).map(Some).map_err(bad)
    }

    /// Writes a temporary file and renames it, so that no reader sees a part.
    fn write(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let (path, own) = (self.path_of(key), self.own_path());
        let written = fs::write(&own, record::encode(key, value)).and_then(|()| fs::rename(&own, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&own);
            self.failed(&path, &error)
        })
    }

    fn remove(&self, key: &str) -> Result<bool, StoreError> {
        let path = self.path_of(key);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed(&path, &error)),
        }
    }

    fn path_of(&self, key: &str) -> PathBuf {
        self.path.join(file_name(key))
    }

    fn lock_path(&self, key: &str) -> PathBuf {
        self.path.join(format!(".lock-{}", file_name(key)))
    }

    /// A new name for a temporary file.
    fn own_path(&self) -> PathBuf {
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        self.path.join(format!(".new-{:016x}-{number}", self.writer))
    }

    fn failed(&self, path: &Path, error: &io::Error) -> StoreError {
        self.unreachable(format!("{}: {error}; check the folder and its permissions", path.display()))
    }

    fn unreachable(&self, detail: String) -> StoreError {
        StoreError::Unreachable { store: self.store(), detail }
    }
}

/// On NFS, reading a file fails if it was replaced after it was opened.
fn read_again(path: &Path) -> io::Result<Vec<u8>> {
    for _ in 1..STALE_MAX {
        match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => {}
            other => return other,
        }
    }
    fs::read(path)
}
