//! A safetensors file on disk, read tensor by tensor.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use safetensors::SafeTensorError;
use tensorwire::{Mapping, MemoryError};

use crate::header::{Entry, HEADER_BYTES_MAX, Header, PREFIX_BYTES};

/// Why a file can't be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CheckpointError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}; or serve it without --mmap")]
    Map { path: PathBuf, source: Box<MemoryError> },
    #[error(
        "{path}: the header is said to be {claimed} bytes long, but the file has {file} bytes and a header at most \
         {HEADER_BYTES_MAX}: it is no safetensors file, or it is truncated"
    )]
    HeaderLength { path: PathBuf, claimed: u64, file: u64 },
    #[error("{path}: the header is not valid: {source}; write the file again with a safetensors library")]
    Header { path: PathBuf, source: SafeTensorError },
    #[error("{path}: the header is not UTF-8: it is no safetensors file")]
    HeaderText { path: PathBuf },
    #[error(
        "{path}: the header promises a file of {promised} bytes, but it has {file}: it is truncated or was written \
         twice; copy it again"
    )]
    Length { path: PathBuf, promised: u64, file: u64 },
}

/// An open file whose header has been checked.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    path: PathBuf,
    file: File,
    header: Header,
}

impl Checkpoint {
    /// Opens a file and checks that it is as long as its header says.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = path.to_owned();
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let header = Self::read_header(&path, &file, file_bytes)?;
        let promised = header.data_start().saturating_add(header.data_bytes());
        if promised != file_bytes {
            return Err(CheckpointError::Length { path, promised, file: file_bytes });
        }
        Ok(Self { path, file, header })
    }

    fn read_header(path: &Path, file: &File, file_bytes: u64) -> Result<Header, CheckpointError> {
        let path = || path.to_owned();
        let io = |source| CheckpointError::Io { path: path(), source };
        if file_bytes < PREFIX_BYTES as u64 {
            return Err(CheckpointError::HeaderLength { path: path(), claimed: 0, file: file_bytes });
        }
        let mut prefix = [0; PREFIX_BYTES];
        file.read_exact_at(&mut prefix, 0).map_err(io)?;
        let claimed = u64::from_le_bytes(prefix);
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

    /// Maps the file, which is read from disk as its bytes are used.
    pub(crate) fn map(&self) -> Result<Mapping, CheckpointError> {
        Mapping::of_file(&self.file)
            .map_err(|source| CheckpointError::Map { path: self.path.clone(), source: Box::new(source) })
    }

    /// Where a tensor's bytes lie in the file.
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
        let checkpoint = Checkpoint::open(&file(&directory, HEADER.len() as u64, &bytes)).unwrap();
        let mut read = [0; 6];
        checkpoint.read(&checkpoint.header().entries()[0], &mut read).unwrap();
        assert_eq!(read, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn truncated_data_is_named_with_both_lengths() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = [HEADER.as_bytes(), &[1, 2, 3]].concat();
        let error = Checkpoint::open(&file(&directory, HEADER.len() as u64, &bytes)).unwrap_err();
        assert!(matches!(error, CheckpointError::Length { promised: 68, file: 65, .. }), "{error}");
    }

    #[test]
    fn header_longer_than_the_file_is_refused_before_memory_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        for claimed in [HEADER.len() as u64 + 1, 100_000_001, u64::MAX] {
            let error = Checkpoint::open(&file(&directory, claimed, HEADER.as_bytes())).unwrap_err();
            assert!(matches!(error, CheckpointError::HeaderLength { .. }), "{claimed}: {error}");
        }
    }

    #[test]
    fn files_of_other_formats_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("short");
        fs::write(&path, b"abc").unwrap();
        assert!(matches!(Checkpoint::open(&path), Err(CheckpointError::HeaderLength { .. })));
        let error = Checkpoint::open(&file(&directory, 4, b"\xff\xfe\xfd\xfc")).unwrap_err();
        assert!(matches!(error, CheckpointError::HeaderText { .. }), "{error}");
        let error = Checkpoint::open(&file(&directory, 4, b"[]  ")).unwrap_err();
        assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
    }
}
