//! An open folder. The store trusts only regular files, in a folder that no other user can write to.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, linkat, openat, renameat, statat, unlinkat},
    io::Errno,
};

use super::record::RECORD_BYTES_MAX;

/// The permissions by which others may write.
const OTHERS_WRITE: u32 = 0o022;

/// The permission of a folder in which all may make files, and none may remove those of others.
const STICKY: u32 = 0o1000;

/// A folder that is open for one call. Its files are addressed by their names, so that nobody can lead a path elsewhere.
#[derive(Debug)]
pub(super) struct OpenFolder(OwnedFd);

impl OpenFolder {
    /// Opens the folder. Each call does, because an NFS client then asks the server for its files again. Otherwise it may report
    /// a file as missing for half a minute.
    ///
    /// # Errors
    /// Those of the file system. One with a remedy if others may write into the folder.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let folder = openat(CWD, path, flags(OFlags::DIRECTORY), Mode::empty())?;
        let mode = fstat(&folder)?.st_mode & 0o7777;
        if mode & OTHERS_WRITE == 0 {
            return Ok(Self(folder));
        }
        let path = path.display();
        let own = if mode & STICKY == 0 { format!("run `chmod go-w {path}`, or ") } else { String::new() };
        Err(refused(format!(
            "other users may write into the folder (its mode is {mode:o}), and could replace its records: {own}give a folder that \
             does not exist yet, such as {path}/job, which the store makes for its own user"
        )))
    }

    /// Makes a file of this name for a moment.
    ///
    /// # Errors
    /// As [`create`](Self::create). One with a remedy if the folder is of another user than the file.
    pub(super) fn check_owner(&self, name: &str) -> io::Result<()> {
        // The file server may map users, so this process's user id is not comparable.
        let own = self.create(name, &[]).and_then(|()| self.stat(name));
        let _ = self.remove(name);
        let (own, owner) = (own?.st_uid, fstat(&self.0)?.st_uid);
        if own == owner {
            return Ok(());
        }
        Err(refused(format!(
            "the folder is of user {owner}, and this process is user {own}: give a folder that does not exist yet, which the \
             store makes for its own user"
        )))
    }

    /// Makes a new file. Follows no link.
    ///
    /// # Errors
    /// Those of the file system. The file may then exist with a part of `bytes`.
    pub(super) fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(bytes)
    }

    /// Reads a regular file that is not longer than a record. Does not wait for a writer, as a FIFO would, and follows no link.
    ///
    /// # Errors
    /// Those of the file system. One with a remedy for any other file.
    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        const REMEDY: &str = "remove it, and give the store its own folder";
        let file = match openat(&self.0, name, flags(OFlags::NONBLOCK | OFlags::NOCTTY), Mode::empty()) {
            Err(Errno::LOOP) => return Err(refused(format!("it is a link: {REMEDY}"))),
            file => file?,
        };
        if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(refused(format!("it is not a regular file: {REMEDY}")));
        }
        let mut bytes = Vec::new();
        File::from(file).take(RECORD_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(refused(format!("it is longer than any record: {REMEDY}")));
        }
        Ok(bytes)
    }

    pub(super) fn stat(&self, name: &str) -> io::Result<Stat> {
        Ok(statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    pub(super) fn link(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(linkat(&self.0, from, &self.0, to, AtFlags::empty())?)
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, from, &self.0, to)?)
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, AtFlags::empty())?)
    }
}

fn flags(others: OFlags) -> OFlags {
    OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | others
}

/// An error that has its remedy.
fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// The error's text, with `remedy` if the error has none of its own.
pub(super) fn explained(error: &io::Error, remedy: &str) -> String {
    if error.get_ref().is_some() { error.to_string() } else { format!("{error}; {remedy}") }
}
