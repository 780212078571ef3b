//! The lock of a key.
//!
//! A lock is a file that is a hard link to a temporary file of its owner. Creating a link fails if the name exists, on every file
//! system, NFS included. NFS may lose the reply, so the link count of the temporary file shows whether the link was created.
//!
//! A lock is never taken from its owner, because an owner that was stopped for a while would go on with its write. Locks are
//! held for milliseconds. If a lock stays longer, its owner has ended, and the error asks the user to remove the lock.

use std::{io, time::Duration};

use tensorwire_protocol::text::escaped_within;

use super::open_folder::OpenFolder;

/// The most bytes of an owner's text in an error.
const OWNER_BYTES: usize = 200;

/// The lock of a key, released when dropped.
#[derive(Debug)]
pub(super) struct Lock<'a> {
    folder: &'a OpenFolder,
    name: &'a str,
    /// The content of the lock's file, different for each lock.
    owner: String,
}

/// Takes the lock of this name for `owner`. `None` if another has it. `own` is a name for a temporary file.
///
/// # Errors
/// Those of the file system.
pub(super) fn take<'a>(
    folder: &'a OpenFolder,
    name: &'a str,
    own: &str,
    owner: String,
) -> io::Result<Option<Lock<'a>>> {
    let linked = folder.create(own, owner.as_bytes()).map(|()| folder.link(own, name));
    let taken = match linked {
        Err(error) => Err(error),
        Ok(Ok(())) => Ok(true),
        Ok(Err(error)) if has_no_links(&error) => create(folder, name, &owner),
        Ok(Err(error)) if folder.stat(own).is_ok_and(|own| own.st_nlink == 2) => {
            log!(DEBUG, %error, "created a lock although the reply was lost");
            Ok(true)
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Ok(Err(error)) => Err(error),
    };
    let _ = folder.remove(own);
    Ok(taken?.then_some(Lock { folder, name, owner }))
}

/// The owner of the lock, and for how long it has had it. `own` is a name for a temporary file.
///
/// # Errors
/// Those of the file system, as if the lock is free.
pub(super) fn holder(folder: &OpenFolder, name: &str, own: &str) -> io::Result<(String, Option<Duration>)> {
    let owner = folder.read(name)?;
    let owner = escaped_within(&String::from_utf8_lossy(&owner), OWNER_BYTES);
    Ok((owner, age(folder, name, own).ok()))
}

/// Measured by the clock of the file server alone, because the clocks of two machines differ.
fn age(folder: &OpenFolder, name: &str, own: &str) -> io::Result<Duration> {
    let now = folder.create(own, &[]).and_then(|()| folder.stat(own));
    let _ = folder.remove(own);
    Ok(Duration::from_secs(now?.st_mtime.abs_diff(folder.stat(name)?.st_mtime)))
}

/// Some file systems have no hard links, such as those of memory cards and object stores.
fn has_no_links(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied)
}

fn create(folder: &OpenFolder, name: &str, owner: &str) -> io::Result<bool> {
    match folder.create(name, owner.as_bytes()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Someone may have removed it, and another process taken it.
        if self.folder.read(self.name).is_ok_and(|owner| owner == self.owner.as_bytes())
            && let Err(error) = self.folder.remove(self.name)
        {
            log!(WARN, lock = self.name, %error, "cannot release a lock: remove its file");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder() -> (tempfile::TempDir, OpenFolder) {
        let folder = tempfile::tempdir().unwrap();
        let open = OpenFolder::open(folder.path()).unwrap();
        (folder, open)
    }

    #[test]
    fn a_lock_has_one_owner_and_leaves_no_file() {
        let (path, folder) = folder();
        let first = take(&folder, "lock", "own", "first".to_owned()).unwrap().unwrap();
        assert!(take(&folder, "lock", "own", "second".to_owned()).unwrap().is_none());
        let (owner, age) = holder(&folder, "lock", "own").unwrap();
        assert!(owner == "first" && age.is_some());
        drop(first);
        assert_eq!(fs::read_dir(path.path()).unwrap().count(), 0);
        assert!(holder(&folder, "lock", "own").is_err());
        // The fallback for file systems without hard links.
        assert!(create(&folder, "lock", "first").unwrap() && !create(&folder, "lock", "second").unwrap());
    }

    #[test]
    fn a_lock_that_is_anothers_by_now_is_left_to_it() {
        let (path, folder) = folder();
        let first = take(&folder, "lock", "own", "first".to_owned()).unwrap().unwrap();
        fs::remove_file(path.path().join("lock")).unwrap();
        let _second = take(&folder, "lock", "own", "second".to_owned()).unwrap().unwrap();
        drop(first);
        assert!(holder(&folder, "lock", "own").is_ok());
    }
}
