//! A regular file that appears complete or not at all.

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

use super::partial::Partial;
use crate::signals::RemovedAtEnd;

/// Maximum number of symbolic links that are followed from the name that the user gave: the kernel's limit.
const LINKS_MAX: usize = 40;

/// Bytes of a block, in which the kernel counts what a file takes.
const BLOCK_BYTES: u64 = 512;

/// Permissions of a new file, before the umask.
const NEW_MODE: u32 = 0o666;

/// Permissions of a new file until it gets those of the file that it replaces.
const PRIVATE_MODE: u32 = 0o600;

/// An unfinished file in the directory of its target. Dropping it before [`finish`](Self::finish) removes it, unless a later pull is to
/// continue it. If the file system supports files without a name, SIGKILL removes it, too.
#[derive(Debug)]
pub(super) struct Draft {
    /// Not a symbolic link.
    target: PathBuf,
    /// The file that was there.
    replaces: Option<Replaced>,
    file: Unfinished,
}

#[derive(Debug)]
enum Unfinished {
    /// Has no name until it is finished.
    Unnamed(File),
    /// Hidden beside the target, removed on drop, and when a signal ends the process.
    Named { file: NamedTempFile, _removed: RemovedAtEnd },
    /// Stays.
    Partial(Partial),
}

impl Draft {
    /// Begins a file that will get the name to which `path` leads. It gets owner and mode of the file that it
    /// `replaces`, as far as this process may set them.
    ///
    /// # Errors
    /// [`io::ErrorKind::IsADirectory`] when `path` can only be that of a directory.
    pub(super) fn create(path: &Path, replaces: Option<&Metadata>, resume: bool) -> io::Result<Self> {
        let target = followed(path)?;
        if !names_a_file(&target) {
            return Err(Errno::ISDIR.into());
        }
        let mode = if replaces.is_some() { PRIVATE_MODE } else { NEW_MODE };
        let directory = directory_of(&target);
        let file = match resume {
            true => Unfinished::Partial(Partial::open(directory, &target, mode)?),
            false => begin(directory, mode)?,
        };
        let draft = Self { file, target, replaces: replaces.map(Replaced::of) };
        match (&draft.replaces, &draft.file) {
            // It stays this user's until it is finished.
            (None, _) | (_, Unfinished::Partial(_)) => {}
            (Some(replaced), _) => replaced.give_to(draft.file())?,
        }
        Ok(draft)
    }

    /// Whether it will replace a file that was there when it was begun.
    pub(super) fn replaces(&self) -> bool {
        self.replaces.is_some()
    }

    /// Whether an earlier pull has left bytes in it.
    pub(super) fn had_content(&self) -> bool {
        matches!(&self.file, Unfinished::Partial(partial) if partial.had_content())
    }

    /// Allocates `bytes` bytes on the disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when fewer bytes are free.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<()> {
        // The kernel would fill the disk before it fails.
        let own = self.file().metadata()?;
        let taken = own.blocks().saturating_mul(BLOCK_BYTES);
        if self.capacity()?.is_some_and(|free| free < bytes.saturating_sub(taken)) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if own.len() > bytes {
            self.file().set_len(bytes)?;
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

    /// Free bytes of the file's file system, including those reserved for the administrator; `None` if it does not
    /// report them.
    fn capacity(&self) -> io::Result<Option<u64>> {
        let system = rustix::fs::fstatvfs(self.file())?;
        Ok((system.f_blocks > 0).then(|| system.f_bfree.saturating_mul(system.f_frsize)))
    }

    pub(super) fn write_at(&self, bytes: &[u8], place: u64) -> io::Result<()> {
        self.file().write_all_at(bytes, place)
    }

    pub(super) fn read_at(&self, bytes: &mut [u8], place: u64) -> io::Result<()> {
        self.file().read_exact_at(bytes, place)
    }

    /// Waits until its bytes are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file().sync_all()
    }

    /// Names the file once its bytes are on the disk. With `no_clobber` it replaces nothing.
    pub(super) fn finish(self, no_clobber: bool) -> io::Result<()> {
        let directory = directory_of(&self.target);
        if let (Unfinished::Partial(partial), Some(replaced)) = (&self.file, &self.replaces) {
            replaced.give_to(partial.file())?;
        }
        self.sync()?;
        let beside = match self.file {
            Unfinished::Partial(partial) => {
                partial.persist(&self.target, no_clobber)?;
                return sync_names(directory);
            }
            Unfinished::Named { file, .. } => file.into_temp_path(),
            // Unlike a rename, a link does not replace an existing file.
            Unfinished::Unnamed(file) => {
                hidden().make_in(directory, |path| Ok(link(&file, path)?))?.into_temp_path()
            }
        };
        let named =
            if no_clobber { beside.persist_noclobber(&self.target) } else { beside.persist(&self.target) };
        named.map_err(|error| error.error)?;
        sync_names(directory)
    }

    fn file(&self) -> &File {
        match &self.file {
            Unfinished::Unnamed(file) => file,
            Unfinished::Named { file, .. } => file.as_file(),
            Unfinished::Partial(partial) => partial.file(),
        }
    }
}

fn begin(directory: &Path, mode: u32) -> io::Result<Unfinished> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::from_raw_mode(mode)) {
        Ok(descriptor) => {
            let file = File::from(descriptor);
            // The name `.` exists, so this call makes nothing; any other error would also occur when the file is
            // finished.
            let can_be_named = link(&file, &directory.join(".")) == Err(Errno::EXIST);
            if can_be_named { Ok(Unfinished::Unnamed(file)) } else { named(directory, mode) }
        }
        // A file with a name could not be made there either, and that error would show the temporary name.
        Err(error @ (Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::ROFS)) => Err(error.into()),
        // The file system or the kernel does not support files without a name.
        Err(_) => named(directory, mode),
    }
}

fn named(directory: &Path, mode: u32) -> io::Result<Unfinished> {
    let file = hidden().permissions(Permissions::from_mode(mode)).tempfile_in(directory)?;
    let _removed = RemovedAtEnd::new(file.path())?;
    Ok(Unfinished::Named { file, _removed })
}

/// Gives a file without a name the name `path`: by its descriptor if the kernel allows that (since 6.10, or with
/// `CAP_DAC_READ_SEARCH`), otherwise through `/proc`.
fn link(file: &File, path: &Path) -> rustix::io::Result<()> {
    match rustix::fs::linkat(file, "", CWD, path, AtFlags::EMPTY_PATH) {
        Err(Errno::NOENT) => {
            let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(CWD, descriptor, CWD, path, AtFlags::SYMLINK_FOLLOW)
        }
        linked => linked,
    }
}

/// Writes the names in `directory` to the disk. If this user may not read the directory, or its file system does not
/// support that, the file exists nevertheless.
fn sync_names(directory: &Path) -> io::Result<()> {
    let why = match File::open(directory).map(|directory| directory.sync_all()) {
        Err(error) => error,
        Ok(Err(error))
            if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
        {
            error
        }
        Ok(synced) => return synced,
    };
    tracing::warn!(%why, "the file is complete; its folder cannot be synced, so a power failure now may remove its name");
    Ok(())
}

/// Temporary names in the target's directory. They are short, so that they are allowed if the target's name is.
fn hidden() -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(".pull.").suffix(".part");
    builder
}

/// Owner and permissions of a file that is replaced.
#[derive(Debug)]
struct Replaced {
    user: u32,
    group: u32,
    mode: u32,
}

impl Replaced {
    fn of(metadata: &Metadata) -> Self {
        Self { user: metadata.uid(), group: metadata.gid(), mode: metadata.mode() }
    }

    /// Gives them to `file`, as far as this process may set them.
    fn give_to(&self, file: &File) -> io::Result<()> {
        let (user, group) = (Some(self.user), Some(self.group));
        let has_group = fchown(file, user, group).is_ok() || fchown(file, None, group).is_ok();
        // A new group does not get the rights of the old one.
        let mask = if has_group { 0o777 } else { 0o707 };
        file.set_permissions(Permissions::from_mode(self.mode & mask))
    }
}

/// The target of `path`, whether it exists or not.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(to) => path = directory_of(&path).join(to),
            // `path` is no link, or does not exist.
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

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    use rustix::process::{Pid, Signal, kill_process};

    use super::{PRIVATE_MODE, Path, Unfinished, begin, fs, named};

    /// Environment variable of the process that is killed: the folder of its draft.
    const FOLDER: &str = "TENSORWIRE_TEST_DRAFT";

    #[test]
    fn a_draft_has_no_name_where_it_can_get_one_later() {
        let directory = tempfile::tempdir().unwrap();
        let draft = begin(directory.path(), PRIVATE_MODE).unwrap();
        let Unfinished::Unnamed(file) = draft else { panic!("a file system without O_TMPFILE: {draft:?}") };
        let path = directory.path().join("file");
        super::link(&file, &path).unwrap();
        assert_eq!(super::link(&file, &path), Err(super::Errno::EXIST));
    }

    #[test]
    fn a_draft_with_a_name_goes_when_its_process_is_told_to_end() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            let _draft = named(Path::new(&folder), PRIVATE_MODE).unwrap();
            println!("\nready");
            loop {
                std::thread::park();
            }
        }
        for signal in [Signal::INT, Signal::TERM] {
            let directory = tempfile::tempdir().unwrap();
            let mut command = Command::new(std::env::current_exe().unwrap());
            let test = "output::draft::tests::a_draft_with_a_name_goes_when_its_process_is_told_to_end";
            command.args([test, "--exact", "--nocapture"]).env(FOLDER, directory.path());
            let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
            assert!(lines.any(|line| line == "ready"));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
            kill_process(Pid::from_child(&process), signal).unwrap();
            assert_eq!(process.wait().unwrap().code(), Some(128 + signal.as_raw()));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }
}
