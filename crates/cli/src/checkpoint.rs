//! A safetensors file on disk, read tensor by tensor.

use std::{
    fs::{self, File, FileType},
    io,
    ops::Range,
    os::unix::fs::{FileExt, FileTypeExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use tensorwire::memory::{Mapping, MemoryError};

use crate::header::{Entry, HEADER_BYTES_MAX, Header, HeaderError, PREFIX_BYTES};

/// The remedy if a user names something else.
const NO_FILE: &str =
    "name a .safetensors file, a folder of such files, or an index whose name ends with .json";

/// Why a file can't be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CheckpointError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: it is a {kind}: {remedy}")]
    Kind { path: PathBuf, kind: &'static str, remedy: &'static str },
    #[error("{path}: {source}; or serve it without --mmap")]
    Map { path: PathBuf, source: Box<MemoryError> },
    #[error(
        "{path}: the length field of the header is {claimed}, but the file has {file} bytes and a header at most \
         {HEADER_BYTES_MAX}: it is no safetensors file, or it is truncated"
    )]
    HeaderLength { path: PathBuf, claimed: u64, file: u64 },
    #[error(
        "{path}: it has {file} bytes, fewer than the {PREFIX_BYTES} of the header's length: it is no safetensors file, or \
         it is truncated"
    )]
    TooShort { path: PathBuf, file: u64 },
    #[error("{path}: the header is not valid: {source}; write the file again with a safetensors library")]
    Header { path: PathBuf, source: HeaderError },
    #[error("{path}: the header is not UTF-8: it is no safetensors file")]
    HeaderText { path: PathBuf },
    #[error(
        "{path}: the header promises a file of {promised} bytes, but it has {file}: it is truncated or was written \
         twice; copy it again"
    )]
    Length { path: PathBuf, promised: u64, file: u64 },
}

/// How a file's tensors are brought into memory.
#[derive(Debug)]
pub(crate) enum Access {
    /// They are read.
    Read,
    /// They are read, because a mapping could not be protected from the file's owner.
    Unleased(MemoryError),
    /// They are mapped, under a lease.
    Mapped(Arc<Mapping>),
}

/// An open file whose header has been checked.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    path: PathBuf,
    file: File,
    header: Header,
    access: Access,
}

impl Checkpoint {
    /// Opens a file and checks that it has the length that its header declares. With `map` it is mapped, too, if that
    /// is safe; then a handler of SIGIO must be installed.
    pub(crate) fn open(path: &Path, map: bool) -> Result<Self, CheckpointError> {
        let path = path.to_owned();
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        // First, because opening a FIFO waits for its writer.
        check_kind(&path, fs::metadata(&path).map_err(io)?.file_type())?;
        let file = File::open(&path).map_err(io)?;
        // Before the checks, because the file cannot change under the lease.
        let access = if map { Self::map(&path, &file)? } else { Access::Read };
        let file_bytes = file.metadata().map_err(io)?.len();
        let header = Self::read_header(&path, &file, file_bytes)?;
        let promised = header.file_bytes();
        if promised != file_bytes {
            return Err(CheckpointError::Length { path, promised, file: file_bytes });
        }
        Ok(Self { path, file, header, access })
    }

    fn map(path: &Path, file: &File) -> Result<Access, CheckpointError> {
        match Mapping::leased(file) {
            Ok(mapping) => Ok(Access::Mapped(Arc::new(mapping))),
            Err(refused @ MemoryError::NoLease { .. }) => Ok(Access::Unleased(refused)),
            Err(source) => Err(CheckpointError::Map { path: path.to_owned(), source: Box::new(source) }),
        }
    }

    fn read_header(path: &Path, file: &File, file_bytes: u64) -> Result<Header, CheckpointError> {
        let path = || path.to_owned();
        let io = |source| CheckpointError::Io { path: path(), source };
        if file_bytes < PREFIX_BYTES as u64 {
            return Err(CheckpointError::TooShort { path: path(), file: file_bytes });
        }
        let mut prefix = [0; PREFIX_BYTES];
        file.read_exact_at(&mut prefix, 0).map_err(io)?;
        let claimed = u64::from_le_bytes(prefix);
        // Text at the position of the length never gives the length of a file.
        if prefix.starts_with(b"{") && claimed > file_bytes {
            return Err(CheckpointError::Kind { path: path(), kind: "JSON text", remedy: NO_FILE });
        }
        let fits = claimed <= file_bytes - PREFIX_BYTES as u64;
        let length = match usize::try_from(claimed) {
            Ok(length) if fits && length <= HEADER_BYTES_MAX => length,
            _ => return Err(CheckpointError::HeaderLength { path: path(), claimed, file: file_bytes }),
        };
        let mut text = vec![0; length];
        file.read_exact_at(&mut text, PREFIX_BYTES as u64).map_err(io)?;
        let text = String::from_utf8(text).map_err(|_| CheckpointError::HeaderText { path: path() })?;
        Header::parse(text).map_err(|source| CheckpointError::Header { path: path(), source })
    }

    /// The file's header.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// How its tensors are brought into memory.
    pub(crate) fn access(&self) -> &Access {
        &self.access
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The range of a tensor's bytes in the file.
    pub(crate) fn place(&self, entry: &Entry) -> Range<u64> {
        let start = self.header.data_start();
        start + entry.range.start..start + entry.range.end
    }

    /// Reads a tensor's bytes; `into` has its length.
    pub(crate) fn read(&self, entry: &Entry, into: &mut [u8]) -> Result<(), CheckpointError> {
        self.file
            .read_exact_at(into, self.place(entry).start)
            .map_err(|source| CheckpointError::Io { path: self.path.clone(), source })
    }
}

fn check_kind(path: &Path, kind: FileType) -> Result<(), CheckpointError> {
    let (kind, remedy) = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => ("folder", NO_FILE),
        kind if kind.is_fifo() => ("FIFO", "write it into a file first"),
        _ => ("device or socket", "write it into a file first"),
    };
    Err(CheckpointError::Kind { path: path.to_owned(), kind, remedy })
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::{Checkpoint, CheckpointError};

    const HEADER: &str = r#"{"x":{"dtype":"I16","shape":[3],"data_offsets":[0,6]}}"#;

    fn file(directory: &tempfile::TempDir, claimed: u64, rest: &[u8]) -> PathBuf {
        let path = directory.path().join("file.safetensors");
        fs::write(&path, [&claimed.to_le_bytes(), rest].concat()).unwrap();
        path
    }

    #[test]
    fn reads_a_tensor_at_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = [HEADER.as_bytes(), &[1, 2, 3, 4, 5, 6]].concat();
        let checkpoint = Checkpoint::open(&file(&directory, HEADER.len() as u64, &bytes), false).unwrap();
        let mut read = [0; 6];
        checkpoint.read(&checkpoint.header().entries()[0], &mut read).unwrap();
        assert_eq!(read, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn truncated_data_is_named_with_both_lengths() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = [HEADER.as_bytes(), &[1, 2, 3]].concat();
        let error = Checkpoint::open(&file(&directory, HEADER.len() as u64, &bytes), false).unwrap_err();
        assert!(matches!(error, CheckpointError::Length { promised: 68, file: 65, .. }), "{error}");
    }

    #[test]
    fn header_longer_than_the_file_is_refused_before_memory_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        for claimed in [HEADER.len() as u64 + 1, 100_000_001, u64::MAX] {
            let error = Checkpoint::open(&file(&directory, claimed, HEADER.as_bytes()), false).unwrap_err();
            assert!(matches!(error, CheckpointError::HeaderLength { .. }), "{claimed}: {error}");
        }
    }

    #[test]
    fn what_is_no_file_of_the_format_is_refused_at_once_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let index = directory.path().join("model.safetensors.index");
        fs::write(&index, "{\n  \"weight_map\": {}\n}").unwrap();
        for path in [directory.path(), &index] {
            let error = Checkpoint::open(path, false).unwrap_err().to_string();
            assert!(error.contains("a folder of such files"), "{error}");
        }
        let fifo = directory.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        for path in [fifo.as_path(), "/dev/null".as_ref()] {
            let error = Checkpoint::open(path, false).unwrap_err();
            assert!(matches!(error, CheckpointError::Kind { .. }), "{error}");
        }
    }

    #[test]
    fn files_of_other_formats_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("short");
        fs::write(&path, b"abc").unwrap();
        let error = Checkpoint::open(&path, false).unwrap_err();
        assert!(matches!(error, CheckpointError::TooShort { file: 3, .. }), "{error}");
        let error = Checkpoint::open(&file(&directory, 4, b"\xff\xfe\xfd\xfc"), false).unwrap_err();
        assert!(matches!(error, CheckpointError::HeaderText { .. }), "{error}");
        let error = Checkpoint::open(&file(&directory, 4, b"[]  "), false).unwrap_err();
        assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
    }
}
