//! An unfinished file that stays when its process ends, so that a later pull continues it.

use std::{
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    io::Errno,
};
use tempfile::TempPath;

/// How often the file is opened again because another process has just finished it.
const TRIES_MAX: usize = 8;

/// A hidden file beside its target, whose name follows from that of the target. It is locked, so that no two pulls write it. Dropping it
/// leaves it there, unless it is empty.
#[derive(Debug)]
pub(super) struct Partial {
    file: File,
    path: PathBuf,
    had_content: bool,
}

impl Partial {
    /// Opens the file that an earlier pull has left for `target` in `directory`, or makes one with the permissions `mode`.
    ///
    /// # Errors
    /// Another pull writes it, or it is not a file of this user.
    pub(super) fn open(directory: &Path, target: &Path, mode: u32) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().as_bytes();
        // Short enough wherever the target's name is.
        let path = directory.join(format!(".pull.{:016x}.part", twox_hash::XxHash3_64::oneshot(name)));
        // A FIFO in its place must not block.
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        for _ in 0..TRIES_MAX {
            let file = File::from(rustix::fs::open(&path, flags, Mode::from_raw_mode(mode))?);
            lock(&file)?;
            let own = file.metadata()?;
            let there = fs::symlink_metadata(&path).ok().map(|there| (there.dev(), there.ino()));
            if there != Some((own.dev(), own.ino())) {
                // Its owner has given it its name before it was locked here.
                continue;
            }
            if !own.is_file() || own.uid() != rustix::process::geteuid().as_raw() || own.nlink() != 1 {
                let problem = format!("{}: it is not a file of this user alone: remove it", path.display());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
            }
            return Ok(Self { file, path, had_content: own.len() > 0 });
        }
        Err(busy())
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Whether an earlier pull has left bytes.
    pub(super) fn had_content(&self) -> bool {
        self.had_content
    }

    /// Gives it the name `target`. If that fails, it stays as it is.
    pub(super) fn persist(&self, target: &Path, no_clobber: bool) -> io::Result<()> {
        let path = TempPath::try_from_path(&self.path)?;
        let named = if no_clobber { path.persist_noclobber(target) } else { path.persist(target) };
        named.map_err(|error| {
            // Otherwise it would be removed.
            let _ = error.path.keep();
            error.error
        })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.file.metadata().is_ok_and(|own| own.len() == 0) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(busy()),
        locked => Ok(locked?),
    }
}

fn busy() -> io::Error {
    let problem = "another pull with --resume writes it: wait until that has ended";
    io::Error::new(io::ErrorKind::ResourceBusy, problem)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::Partial;

    #[test]
    fn one_process_has_it_and_the_next_one_finds_its_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let (folder, target) = (directory.path(), directory.path().join("file"));
        let partial = Partial::open(folder, &target, 0o600).unwrap();
        let busy = Partial::open(folder, &target, 0o600).unwrap_err().to_string();
        assert!(busy.contains("another pull") && !partial.had_content(), "{busy}");
        // That of another target is another one.
        assert!(Partial::open(folder, &folder.join("other"), 0o600).is_ok());
        partial.file().set_len(3).unwrap();
        drop(partial);
        let partial = Partial::open(folder, &target, 0o600).unwrap();
        assert!(partial.had_content());
        fs::write(&target, b"before").unwrap();
        assert!(partial.persist(&target, true).is_err());
        partial.persist(&target, false).unwrap();
        assert_eq!(fs::read(&target).unwrap(), [0; 3]);
        drop(partial);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
    }

    #[test]
    fn an_empty_one_goes() {
        let directory = tempfile::tempdir().unwrap();
        drop(Partial::open(directory.path(), &directory.path().join("file"), 0o600).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn s5_a_link_and_a_file_with_another_name_are_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let (folder, target) = (directory.path(), directory.path().join("file"));
        let path = Partial::open(folder, &target, 0o600).unwrap().path.clone();
        fs::write(folder.join("precious"), b"before").unwrap();
        fs::hard_link(folder.join("precious"), &path).unwrap();
        let error = Partial::open(folder, &target, 0o600).unwrap_err().to_string();
        assert!(error.contains("remove it"), "{error}");
        fs::remove_file(&path).unwrap();
        symlink("precious", &path).unwrap();
        assert!(Partial::open(folder, &target, 0o600).is_err());
        assert_eq!(fs::read(folder.join("precious")).unwrap(), b"before");
    }
}
