//! The calls to the file system. None waits for another process.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::Runtime;
use tensorwire_protocol::text::escaped;

use super::{
    super::{
        StoreError,
        request::{Answer, Request},
        rules::sum,
    },
    lock,
    name::file_name,
    open_folder::{OpenFolder, explained},
    record,
};

/// How often a file is opened again that another process has replaced meanwhile.
const STALE_MAX: usize = 16;

/// A folder of records.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// The process, for error messages.
    process: String,
    /// Draws the names of temporary files.
    runtime: Arc<dyn Runtime>,
}

impl Folder {
    /// Opens the folder at `path`, and makes it for the user of this process alone if it does not exist.
    ///
    /// # Errors
    /// Those of the file system. One with a remedy if other users may write into the folder.
    pub(super) fn open(path: &Path, runtime: Arc<dyn Runtime>) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let host =
            fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "an unknown host".to_owned());
        let process = format!("process {} on {}", std::process::id(), host.trim());
        // An absolute path: the process may change its working folder.
        let folder = Self { path: path.canonicalize()?, process, runtime };
        OpenFolder::open(&folder.path)?.check_owner(&folder.own_name())?;
        Ok(folder)
    }

    pub(super) fn store(&self) -> String {
        format!("the store in {}", self.path.display())
    }

    /// The values of `keys`.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`].
    pub(super) fn read_all(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let folder = self.opened()?;
        keys.iter().map(|key| self.read(&folder, key)).collect()
    }

    /// Makes the change of `key` that `request` asks for, under the lock of `key`. `None` if another process has the lock.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn try_change(&self, key: &str, request: &Request) -> Result<Option<Answer>, StoreError> {
        let (folder, name) = (self.opened()?, lock_name(key));
        let owner = format!("{}, lock {:016x}", self.process, self.runtime.random());
        let lock = lock::take(&folder, &name, &self.own_name(), owner);
        let Some(_lock) = lock.map_err(|error| self.failed(&name, &error))? else { return Ok(None) };
        let found = if matches!(request, Request::Set { .. }) { None } else { self.read(&folder, key)? };
        let changed = match request {
            Request::Set { value, .. } => self.write(&folder, key, value).map(|()| Answer::Done),
            Request::Add { delta, .. } => {
                let sum =
                    sum(found.as_deref(), *delta).map_err(|why| why.error(self.store(), key, *delta))?;
                self.write(&folder, key, sum.to_string().as_bytes()).map(|()| Answer::Sum(sum))
            }
            Request::CompareSet { expected, value, .. } if found == *expected => {
                self.write(&folder, key, value).map(|()| Answer::value(Some(value.clone())))
            }
            Request::Delete { .. } => self.remove(&folder, key).map(Answer::Deleted),
            // The others read.
            _ => Ok(Answer::value(found)),
        };
        changed.map(Some)
    }

    /// The error if the lock of `key` is not released.
    ///
    /// # Errors
    /// As [`try_change`](Self::try_change).
    pub(super) fn lock_stays(&self, key: &str, limit: Duration) -> Result<StoreError, StoreError> {
        let (folder, name) = (self.opened()?, lock_name(key));
        let held = match lock::holder(&folder, &name, &self.own_name()) {
            Ok((owner, Some(age))) => format!("held by {owner} since {age:.1?}"),
            Ok((owner, None)) => format!("held by {owner}"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                "held by several processes in turn".to_owned()
            }
            Err(error) => error.to_string(),
        };
        Ok(self.unreachable(format!(
            "`{}` cannot be written: its lock {} was not free within {limit:?} ({held}); if that process has ended, remove the file",
            escaped(key),
            self.path.join(name).display()
        )))
    }

    fn opened(&self) -> Result<OpenFolder, StoreError> {
        OpenFolder::open(&self.path).map_err(|error| self.failed("", &error))
    }

    fn read(&self, folder: &OpenFolder, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let name = file_name(key);
        let file = match read_again(folder, &name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failed(&name, &error)),
        };
        let bad = |why| self.unreachable(format!("{}: {why}", self.path.join(&name).display()));
        record::decode(file, key).map(Some).map_err(bad)
    }

    /// Writes a temporary file and renames it, so that no reader sees a part.
    fn write(&self, folder: &OpenFolder, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let (name, own) = (file_name(key), self.own_name());
        let written = folder.create(&own, &record::encode(key, value));
        written.and_then(|()| folder.rename(&own, &name)).map_err(|error| {
            let _ = folder.remove(&own);
            self.failed(&name, &error)
        })
    }

    fn remove(&self, folder: &OpenFolder, key: &str) -> Result<bool, StoreError> {
        let name = file_name(key);
        match folder.remove(&name) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed(&name, &error)),
        }
    }

    /// A new name for a temporary file, which nobody can guess.
    fn own_name(&self) -> String {
        format!(".new-{:016x}{:016x}", self.runtime.random(), self.runtime.random())
    }

    fn failed(&self, name: &str, error: &io::Error) -> StoreError {
        let why = explained(error, "check the folder and its permissions");
        self.unreachable(format!("{}: {why}", self.path.join(name).display()))
    }

    pub(super) fn unreachable(&self, detail: String) -> StoreError {
        StoreError::Unreachable { store: self.store(), detail }
    }
}

fn lock_name(key: &str) -> String {
    format!(".lock-{}", file_name(key))
}

/// On NFS, reading a file fails if it was replaced after it was opened.
fn read_again(folder: &OpenFolder, name: &str) -> io::Result<Vec<u8>> {
    for _ in 1..STALE_MAX {
        match folder.read(name) {
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => {}
            other => return other,
        }
    }
    folder.read(name)
}
