//! A regular file that appears whole or not at all.

use std::{
    fs::{self, File, Metadata, Permissions},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt, PermissionsExt, fchown},
        },
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags},
    io::Errno,
};
use tempfile::{Builder, NamedTempFile};

/// Symbolic links that are followed from the name that the user gave, at most; as many as the kernel follows.
const LINKS_MAX: usize = 40;

/// Permissions of a new file, before the umask.
const NEW_MODE: u32 = 0o666;

/// Permissions of a file that is to get those of the one it replaces.
const PRIVATE_MODE: u32 = 0o600;

/// A file that has no name yet, in the directory of its target. If it is dropped before [`finish`](Self::finish) it is
/// removed; after SIGKILL too, where the file system supports files without a name.
#[derive(Debug)]
pub(super) struct Draft {
    /// No symbolic link.
    target: PathBuf,
    file: Unfinished,
}

#[derive(Debug)]
enum Unfinished {
    /// Has no name until it is finished.
    Unnamed(File),
    /// Hidden beside the target, removed on drop.
    Named(NamedTempFile),
}

impl Draft {
    /// Begins a file that will be at the target of `path`. It gets owner and mode of the file that it `replaces`, as far as
    /// this process may set them.
    ///
    /// # Errors
    /// [`io::ErrorKind::IsADirectory`] when `path` can only be that of a directory.
    pub(super) fn create(path: &Path, replaces: Option<&Metadata>) -> io::Result<Self> {
        let target = followed(path)?;
        if !names_a_file(&target) {
            return Err(Errno::ISDIR.into());
        }
        let mode = if replaces.is_some() { PRIVATE_MODE } else { NEW_MODE };
        let draft = Self { file: begin(directory_of(&target), mode)?, target };
        if let Some(replaced) = replaces {
            take_after(draft.file(), replaced)?;
        }
        Ok(draft)
    }

    /// Allocates `bytes` bytes on the disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when so many are not free.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<()> {
        // The kernel would fill the disk before it fails.
        if self.capacity()?.is_some_and(|free| free < bytes) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        loop {
            match rustix::fs::fallocate(self.file(), FallocateFlags::empty(), 0, bytes) {
                Err(Errno::INTR) => {}
                // The file system cannot allocate ahead: a write fails if there is no space.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return self.file().set_len(bytes),
                taken => return taken.map_err(io::Error::from),
            }
        }
    }

    /// Bytes that this user may take on the file's file system.
    pub(super) fn free_bytes(&self) -> io::Result<u64> {
        let system = rustix::fs::fstatvfs(self.file())?;
        Ok(system.f_bavail.saturating_mul(system.f_frsize))
    }

    /// Bytes that are free there, including those reserved for the administrator; `None` where it does not report them.
    fn capacity(&self) -> io::Result<Option<u64>> {
        let system = rustix::fs::fstatvfs(self.file())?;
        Ok((system.f_blocks > 0).then(|| system.f_bfree.saturating_mul(system.f_frsize)))
    }

    pub(super) fn write_at(&self, bytes: &[u8], place: u64) -> io::Result<()> {
        self.file().write_all_at(bytes, place)
    }

    /// Names the file once its bytes are on the disk. With `no_clobber` it replaces nothing.
    pub(super) fn finish(self, no_clobber: bool) -> io::Result<()> {
        self.file().sync_all()?;
        let directory = directory_of(&self.target);
        let beside = match self.file {
            Unfinished::Named(file) => file.into_temp_path(),
            // Unlike a rename, a link does not replace an existing file.
            Unfinished::Unnamed(file) => {
                let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
                let link = |path: &Path| {
                    let linked =
                        rustix::fs::linkat(CWD, descriptor.as_str(), CWD, path, AtFlags::SYMLINK_FOLLOW);
                    linked.map_err(io::Error::from)
                };
                hidden().make_in(directory, link)?.into_temp_path()
            }
        };
        let named =
            if no_clobber { beside.persist_noclobber(&self.target) } else { beside.persist(&self.target) };
        named.map_err(|error| error.error)?;
        File::open(directory)?.sync_all()
    }

    fn file(&self) -> &File {
        match &self.file {
            Unfinished::Unnamed(file) => file,
            Unfinished::Named(file) => file.as_file(),
        }
    }
}

fn begin(directory: &Path, mode: u32) -> io::Result<Unfinished> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::from_raw_mode(mode)) {
        Ok(descriptor) => Ok(Unfinished::Unnamed(File::from(descriptor))),
        // A file with a name could not be made there either, and that error would show its name.
        Err(error @ (Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::ROFS)) => Err(error.into()),
        // The file system or the kernel does not support files without a name.
        Err(_) => {
            hidden().permissions(Permissions::from_mode(mode)).tempfile_in(directory).map(Unfinished::Named)
        }
    }
}

/// Names beside the target. Short, so that they fit wherever the target's fits.
fn hidden() -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(".pull.").suffix(".part");
    builder
}

/// Gives `file` the owner and the permissions of the one that it replaces.
fn take_after(file: &File, replaced: &Metadata) -> io::Result<()> {
    let (owner, group) = (replaced.uid(), Some(replaced.gid()));
    let has_group = fchown(file, Some(owner), group).is_ok() || fchown(file, None, group).is_ok();
    // The rights of the old group are not given to a new one.
    let mask = if has_group { 0o777 } else { 0o707 };
    file.set_permissions(Permissions::from_mode(replaced.mode() & mask))
}

/// The target of `path`, whether it exists or not.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(to) => path = directory_of(&path).join(to),
            // It is no link, or nothing is there.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(Errno::LOOP.into())
}

/// Whether the name after the last `/` can be a file's. [`Path`] itself ignores a `/` at the end.
fn names_a_file(target: &Path) -> bool {
    let name = target.as_os_str().as_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    !matches!(name, b"" | b"." | b"..")
}

fn directory_of(target: &Path) -> &Path {
    match target.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}
