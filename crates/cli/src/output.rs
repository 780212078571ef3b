//! The targets of a pull: files that appear complete or not at all, in a folder or alone, or a stream.

mod draft;
mod folder;
mod partial;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::{fd::AsFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};

use self::draft::Draft;
pub(crate) use self::folder::Target;

/// The name of standard output.
const STDOUT: &str = "-";

/// Why an output can't be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum OutputError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("--output = `{path}`: it names no file: give a file's name, in a directory that is there")]
    NoName { path: PathBuf },
    #[error("--output = `{path}`: it is a {kind}: {remedy}")]
    Kind { path: PathBuf, kind: &'static str, remedy: &'static str },
    #[error("--output = `-`: standard output is closed: redirect it into a file or a pipe, or name a file")]
    Closed,
    #[error("--output = `{path}`: it is there already: name another file, or leave --no-clobber out")]
    Exists { path: PathBuf },
    #[error("--output = `{path}`: the server serves a folder: name a folder, or one to be made")]
    NoFolder { path: PathBuf },
    #[error(
        "--output = `{path}`: the file takes {needed} bytes, and {free} are free on its file system: make room, or name \
         a file on another one"
    )]
    Space { path: PathBuf, needed: u64, free: u64 },
}

/// How files are written.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Writing {
    /// A file that is there must not be replaced.
    pub(crate) no_clobber: bool,
    /// A file that is not finished stays, and the next pull continues it.
    pub(crate) resume: bool,
}

/// A file or a stream. Dropping this before [`finish`](Self::finish) removes the file; a stream keeps the bytes written
/// until then.
#[derive(Debug)]
pub(crate) struct Output {
    /// The path that the user gave.
    path: PathBuf,
    writing: Writing,
    place: Place,
}

#[derive(Debug)]
enum Place {
    File(Draft),
    /// A stream, written in order.
    Stream {
        file: File,
        written: u64,
    },
}

impl Output {
    /// Opens the target that `path` names: an existing pipe or character device, or a new file, which will replace an
    /// existing file at `path`. For a FIFO this waits for the reader.
    pub(crate) fn open(path: &Path, writing: Writing) -> Result<Self, OutputError> {
        let failed = |source| OutputError::Io { path: path.to_owned(), source };
        let place = if path == Path::new(STDOUT) {
            if is_closed(io::stdout()).map_err(|error| failed(error.into()))? {
                return Err(OutputError::Closed);
            }
            let file = io::stdout().as_fd().try_clone_to_owned().map(File::from).map_err(failed)?;
            Place::Stream { file, written: 0 }
        } else {
            match fs::metadata(path) {
                Ok(metadata) if metadata.is_file() && writing.no_clobber => {
                    return Err(OutputError::Exists { path: path.to_owned() });
                }
                Ok(metadata) if metadata.is_file() => {
                    Place::File(Draft::create(path, Some(&metadata), writing.resume).map_err(failed)?)
                }
                Ok(metadata) => stream_at(path, metadata.file_type())?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let draft =
                        Draft::create(path, None, writing.resume).map_err(|error| match error.kind() {
                            io::ErrorKind::IsADirectory => OutputError::NoName { path: path.to_owned() },
                            _ => failed(error),
                        });
                    Place::File(draft?)
                }
                Err(error) => return Err(failed(error)),
            }
        };
        Ok(Self { path: path.to_owned(), writing, place })
    }

    /// Whether written bytes cannot be taken back.
    pub(crate) fn is_stream(&self) -> bool {
        matches!(self.place, Place::Stream { .. })
    }

    /// Whether an earlier pull has left bytes in it.
    fn had_content(&self) -> bool {
        matches!(&self.place, Place::File(draft) if draft.had_content())
    }

    /// Reads bytes of a file that an earlier pull has left.
    fn read_at(&self, bytes: &mut [u8], place: u64) -> io::Result<()> {
        match &self.place {
            Place::File(draft) => draft.read_at(bytes, place),
            Place::Stream { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether it is a file where nothing was when it was opened.
    fn is_new(&self) -> bool {
        matches!(&self.place, Place::File(draft) if !draft.replaces())
    }

    /// Allocates `bytes` bytes on the disk, so that space cannot run out later, and writes the first of them.
    pub(crate) fn begin(&mut self, prefix: &[u8], bytes: u64) -> Result<(), OutputError> {
        if let Place::File(draft) = &self.place {
            draft.reserve(bytes).map_err(|error| match error.kind() {
                io::ErrorKind::StorageFull => {
                    let (path, free) = (self.path.clone(), draft.free_bytes().unwrap_or_default());
                    OutputError::Space { path, needed: bytes, free }
                }
                _ => self.failed(error),
            })?;
        }
        self.write_at(prefix, 0)
    }

    /// Writes `bytes` at `place`. A stream must be written in order.
    pub(crate) fn write_at(&mut self, bytes: &[u8], place: u64) -> Result<(), OutputError> {
        let written = match &mut self.place {
            Place::File(draft) => draft.write_at(bytes, place),
            Place::Stream { written, .. } if *written != place => {
                Err(io::Error::other(format!("byte {place} of a stream that has {written}")))
            }
            Place::Stream { file, written } => {
                *written += bytes.len() as u64;
                file.write_all(bytes)
            }
        };
        written.map_err(|error| self.failed(error))
    }

    /// Waits until the bytes of a file are on the disk.
    fn sync(&self) -> Result<(), OutputError> {
        match &self.place {
            Place::File(draft) => draft.sync().map_err(|error| self.failed(error)),
            Place::Stream { .. } => Ok(()),
        }
    }

    /// Gives a file its name, once its bytes are on the disk.
    pub(crate) fn finish(self) -> Result<(), OutputError> {
        let Self { path, writing: Writing { no_clobber, .. }, place } = self;
        let Place::File(draft) = place else { return Ok(()) };
        draft.finish(no_clobber).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists if no_clobber => OutputError::Exists { path },
            _ => OutputError::Io { path, source },
        })
    }

    fn failed(&self, source: io::Error) -> OutputError {
        OutputError::Io { path: self.path.clone(), source }
    }
}

/// Whether the process was started without this stream. Rust opens `/dev/null` for reading and writing in its place; shells
/// that redirect a stream there open it for writing.
fn is_closed(stream: impl AsFd) -> rustix::io::Result<bool> {
    let null = rustix::fs::makedev(1, 3);
    let is_null = rustix::fs::fstat(&stream)?.st_rdev == null;
    Ok(is_null && rustix::fs::fcntl_getfl(&stream)? & OFlags::ACCMODE == OFlags::RDWR)
}

/// Opens a target that is not a regular file for writing, without creating, truncating or replacing anything.
fn stream_at(path: &Path, kind: fs::FileType) -> Result<Place, OutputError> {
    let refused = |kind, remedy| Err(OutputError::Kind { path: path.to_owned(), kind, remedy });
    if kind.is_dir() {
        return refused("directory", "name a file in it");
    }
    if kind.is_socket() {
        return refused("socket", "name a file, or a FIFO");
    }
    if kind.is_block_device() {
        return refused("block device", "name a file, or write to it from `--output -`");
    }
    let io = |source| OutputError::Io { path: path.to_owned(), source };
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map(File::from);
    let file = file.map_err(|error| io(error.into()))?;
    let opened = file.metadata().map_err(io)?.file_type();
    if !opened.is_fifo() && !opened.is_char_device() {
        return refused("name that something else has just got", "try again");
    }
    Ok(Place::Stream { file, written: 0 })
}
