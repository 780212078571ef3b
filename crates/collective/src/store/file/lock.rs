//! The lock of a key.
//!
//! A lock is a file that is a hard link to a temporary file of its owner. Creating a link fails if the name exists, on every file
//! system, NFS included. NFS may lose the reply, so the link count of the temporary file shows whether the link was created.
//!
//! A lock is never taken from its owner, because a process that was stopped for a while would go on with its write. Locks are
//! held for milliseconds. One that stays was left by a process that ended, and the error says to remove it.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// The lock of a key, released when dropped.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    /// The content of the lock's file, different for each lock.
    owner: String,
}

/// Takes the lock at `path` for `owner`. `None` if another has it. `own` is a name for a temporary file.
///
/// # Errors
/// Those of the file system.
pub(super) fn take(path: &Path, own: &Path, owner: String) -> io::Result<Option<Lock>> {
    fs::write(own, &owner)?;
    let linked = fs::hard_link(own, path);
    let taken = match &linked {
        Ok(()) => Ok(true),
        Err(error) if has_no_links(error) => create(path, &owner),
        Err(error) if is_linked(own) => {
            tracing::debug!(%error, "created a lock although the reply was lost");
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(_) => linked.map(|()| true),
    };
    let _ = fs::remove_file(own);
    Ok(taken?.then(|| Lock { path: path.to_owned(), owner }))
}

/// The owner of the lock, and for how long it has had it. `None` if the lock is free. `own` is a name for a temporary file.
pub(super) fn holder(path: &Path, own: &Path) -> Option<(String, Option<Duration>)> {
    let owner = fs::read(path).ok()?;
    let owner = String::from_utf8_lossy(&owner).escape_debug().take(200).collect();
    Some((owner, age(path, own).ok()))
}

/// Measured by the clock of the file server alone, because the clocks of two machines differ.
fn age(path: &Path, own: &Path) -> io::Result<Duration> {
    fs::write(own, [])?;
    let now = fs::metadata(own).and_then(|own| own.modified());
    let _ = fs::remove_file(own);
    Ok(now?.duration_since(fs::metadata(path)?.modified()?).unwrap_or_default())
}

fn is_linked(own: &Path) -> bool {
    fs::metadata(own).is_ok_and(|own| own.nlink() == 2)
}

/// Some file systems have no hard links, such as those of memory cards and object stores.
fn has_no_links(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied)
}

fn create(path: &Path, owner: &str) -> io::Result<bool> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(mut file) => file.write_all(owner.as_bytes()).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Someone may have removed it, and another process taken it.
        if fs::read(&self.path).is_ok_and(|owner| owner == self.owner.as_bytes())
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(lock = %self.path.display(), %error, "cannot release a lock: remove its file");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_owner_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, own) = (folder.path().join("lock"), folder.path().join("own"));
        let first = take(&path, &own, "first".to_owned()).unwrap().unwrap();
        assert!(take(&path, &own, "second".to_owned()).unwrap().is_none());
        let (owner, age) = holder(&path, &own).unwrap();
        assert!(owner == "first" && age.is_some());
        drop(first);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(holder(&path, &own).is_none());
        // The fallback for file systems without hard links.
        assert!(create(&path, "first").unwrap() && !create(&path, "second").unwrap());
    }

    #[test]
    fn a_lock_that_is_anothers_by_now_is_left_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, own) = (folder.path().join("lock"), folder.path().join("own"));
        let first = take(&path, &own, "first".to_owned()).unwrap().unwrap();
        fs::remove_file(&path).unwrap();
        let _second = take(&path, &own, "second".to_owned()).unwrap().unwrap();
        drop(first);
        assert!(holder(&path, &own).is_some());
    }
}
