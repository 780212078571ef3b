//! What `tensorwire serve` serves: a file, a folder of files, or the files of an index.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tensorwire_protocol::{limits::NAME_BYTES_MAX, text::check_name};

use crate::{
    checkpoint::{Checkpoint, CheckpointError},
    index::{Index, IndexError},
    layout::{INDEX_END, TENSORS_END, header_name, index_name, is_text},
};

/// Why files can't be served together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SourceError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("published name = `{name}`: {path} has a tensor of this name: {remedy}; rename it in the file")]
    TensorName { path: PathBuf, name: String, remedy: String },
    #[error("{path}: the folder has no {TENSORS_END} file: name another folder, or a file")]
    Empty { path: PathBuf },
    #[error("{path}: the name is too long, not UTF-8, or has control characters: rename the file")]
    FileName { path: PathBuf },
    #[error("`{tensor}` is in {one} and in {other}: remove one of the files, or rename the tensor")]
    Double { tensor: String, one: PathBuf, other: PathBuf },
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// The path that the user gave.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    File(PathBuf),
    Folder(PathBuf),
    Index(PathBuf),
}

/// Distinguishes states of a file. A change of its content changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// When the content was changed, in milliseconds since 1970.
    fn modified_ms(self) -> u64 {
        let (seconds, nanoseconds) = self.modified;
        let milliseconds = seconds.saturating_mul(1000).saturating_add(nanoseconds / 1_000_000);
        u64::try_from(milliseconds).unwrap_or_default()
    }
}

/// A state of the files, without their contents.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Look {
    /// By their names.
    pub(crate) files: BTreeMap<String, (PathBuf, Stamp)>,
    index: Option<(Stamp, Arc<Index>)>,
}

impl Look {
    /// When a file was changed last, in milliseconds since 1970.
    pub(crate) fn modified_ms(&self) -> u64 {
        let stamps = self.files.values().map(|(_, stamp)| *stamp);
        let stamps = stamps.chain(self.index.as_ref().map(|(stamp, _)| *stamp));
        stamps.map(Stamp::modified_ms).max().unwrap_or_default()
    }

    /// Whether the file called `name` is in the same state in both.
    pub(crate) fn is_same(&self, name: &str, other: &Self) -> bool {
        self.files.get(name).is_some_and(|file| other.files.get(name) == Some(file))
    }
}

impl Source {
    /// What `path` names.
    pub(crate) fn of(path: &Path) -> Result<Self, SourceError> {
        let metadata =
            fs::metadata(path).map_err(|source| SourceError::Io { path: path.to_owned(), source })?;
        let path = path.to_owned();
        Ok(match path.extension() {
            _ if metadata.is_dir() => Self::Folder(path),
            Some(end) if end == INDEX_END.trim_start_matches('.') => Self::Index(path),
            _ => Self::File(path),
        })
    }

    /// The path that the user gave.
    pub(crate) fn path(&self) -> &Path {
        let (Self::File(path) | Self::Folder(path) | Self::Index(path)) = self;
        path
    }

    /// The state of the files at present.
    pub(crate) fn look(&self) -> Result<Look, SourceError> {
        match self {
            Self::File(path) => {
                let files = BTreeMap::from([(String::new(), (path.clone(), stamp(path)?))]);
                Ok(Look { files, index: None })
            }
            Self::Folder(path) => Ok(Look { files: in_folder(path)?, index: None }),
            Self::Index(path) => {
                let stamp_before = stamp(path)?;
                let index = Arc::new(Index::read(path)?);
                let folder = path.parent().unwrap_or(Path::new(""));
                let mut files = BTreeMap::new();
                for name in index.files() {
                    let path = folder.join(name);
                    files.insert(name.to_owned(), (path.clone(), stamp(&path)?));
                }
                Ok(Look { files, index: Some((stamp_before, index)) })
            }
        }
    }
}

fn stamp(path: &Path) -> Result<Stamp, SourceError> {
    let io = |source| SourceError::Io { path: path.to_owned(), source };
    fs::metadata(path).map(|metadata| Stamp::of(&metadata)).map_err(io)
}

/// The files of a folder whose names end as those of files with tensors do. Hidden files are left out.
fn in_folder(folder: &Path) -> Result<BTreeMap<String, (PathBuf, Stamp)>, SourceError> {
    let io = |source| SourceError::Io { path: folder.to_owned(), source };
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default();
        if !name.as_encoded_bytes().ends_with(TENSORS_END.as_bytes())
            || name.as_encoded_bytes().starts_with(b".")
        {
            continue;
        }
        let io = |source| SourceError::Io { path: path.clone(), source };
        let metadata = fs::metadata(&path).map_err(io)?;
        let Some(name) = name.to_str() else { return Err(SourceError::FileName { path }) };
        if metadata.is_file() {
            files.insert(name.to_owned(), (path.clone(), Stamp::of(&metadata)));
        }
    }
    if files.is_empty() {
        return Err(SourceError::Empty { path: folder.to_owned() });
    }
    Ok(files)
}

/// A file whose header has been checked.
#[derive(Debug)]
pub(crate) struct OpenFile {
    /// `None` if it is served alone.
    pub(crate) name: Option<String>,
    pub(crate) checkpoint: Checkpoint,
}

/// All files of a state, opened, and checked to fit together.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) files: Vec<OpenFile>,
    /// The name of the published text of the index, and the text.
    pub(crate) index: Option<(String, Arc<Index>)>,
}

impl Opened {
    /// Opens the files of `look`; with `map` they are mapped, too, if that is safe.
    pub(crate) fn open(source: &Source, look: &Look, map: bool) -> Result<Self, SourceError> {
        let is_alone = matches!(source, Source::File(_));
        let mut files = Vec::with_capacity(look.files.len());
        for (name, (path, _)) in &look.files {
            let checkpoint = Checkpoint::open(path, map)?;
            let name = (!is_alone).then(|| name.clone());
            check_published(&header_name(name.as_deref()), path)?;
            files.push(OpenFile { name, checkpoint });
        }
        let index = look.index.as_ref().map(|(_, index)| {
            let name = source.path().file_name().and_then(|name| name.to_str()).unwrap_or_default();
            (index_name(name), index.clone())
        });
        if let Some((name, _)) = &index {
            check_published(name, source.path())?;
        }
        let opened = Self { files, index };
        opened.check()?;
        Ok(opened)
    }

    /// Refuses names of tensors that cannot be published or occur twice, and files that are not those of the index.
    fn check(&self) -> Result<(), SourceError> {
        let mut seen: HashMap<&str, &OpenFile> = HashMap::new();
        for file in &self.files {
            let path = || file.checkpoint.path().to_owned();
            for entry in file.checkpoint.header().entries() {
                let name = entry.name.as_str();
                let checked = match name.len() {
                    _ if is_text(name) => Err("the server itself publishes one of that name".to_owned()),
                    1..=NAME_BYTES_MAX => check_name(name),
                    _ => Err(format!("a name has 1 to {NAME_BYTES_MAX} bytes")),
                };
                checked.map_err(|remedy| SourceError::TensorName {
                    path: path(),
                    name: name.to_owned(),
                    remedy,
                })?;
                if let Some(one) = seen.insert(name, file) {
                    let (one, other) = (one.checkpoint.path().to_owned(), path());
                    return Err(SourceError::Double { tensor: name.to_owned(), one, other });
                }
            }
        }
        if let Some((_, index)) = &self.index {
            let of = |name: &str| seen.get(name).and_then(|file| file.name.as_deref());
            index.check(of, seen.keys().copied())?;
        }
        Ok(())
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        let bytes = self.files.iter().map(|file| file.checkpoint.header().data_bytes());
        bytes.fold(0, u64::saturating_add)
    }

    /// Number of tensors.
    pub(crate) fn tensors(&self) -> usize {
        self.files.iter().map(|file| file.checkpoint.header().entries().len()).sum()
    }
}

/// Refuses the name of a file that cannot be part of a published name.
fn check_published(name: &str, path: &Path) -> Result<(), SourceError> {
    match name.len() <= NAME_BYTES_MAX && check_name(name).is_ok() {
        true => Ok(()),
        false => Err(SourceError::FileName { path: path.to_owned() }),
    }
}
