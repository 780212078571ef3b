//! The index of a checkpoint in several files: which tensor is in which file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use crate::{
    header::HEADER_BYTES_MAX,
    layout::{TENSORS_END, is_plain},
};

/// Why an index can't be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum IndexError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{path}: it has {bytes} bytes, more than the {HEADER_BYTES_MAX} of the longest index: it is none"
    )]
    Length { path: PathBuf, bytes: u64 },
    #[error("{path}: it is no index of safetensors files: {source}")]
    Format { path: PathBuf, source: serde_json::Error },
    #[error("{path}: its weight_map names no file")]
    Empty { path: PathBuf },
    #[error(
        "{path}: its weight_map names the file `{file}`: an index is served with the {TENSORS_END} files beside it in its folder"
    )]
    FileName { path: PathBuf, file: String },
    #[error("{path}: it has `{tensor}` in {file}, but that file has no such tensor: write the index again")]
    Missing { path: PathBuf, tensor: String, file: String },
    #[error("{path}: it does not list `{tensor}`, which {file} has: write the index again")]
    Unlisted { path: PathBuf, tensor: String, file: String },
}

/// An index, checked to name only files of its own folder.
#[derive(Debug, PartialEq)]
pub(crate) struct Index {
    path: PathBuf,
    text: String,
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct IndexText {
    weight_map: WeightMap,
}

/// Files by tensor. A tensor that occurs twice is an error; a map would drop one of them.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor).map(Self)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names of tensors to names of files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut files = BTreeMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            if let Some(other) = files.insert(tensor.clone(), file.clone()) {
                return Err(A::Error::custom(format!("`{tensor}` occurs twice, in {other} and in {file}")));
            }
        }
        Ok(files)
    }
}

impl Index {
    /// Reads the index at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, IndexError> {
        let path = path.to_owned();
        let io = |source| IndexError::Io { path: path.clone(), source };
        let bytes = fs::metadata(&path).map_err(io)?.len();
        if bytes > HEADER_BYTES_MAX as u64 {
            return Err(IndexError::Length { path, bytes });
        }
        let text = fs::read_to_string(&path).map_err(io)?;
        let parsed = serde_json::from_str(&text);
        let IndexText { weight_map: WeightMap(weight_map) } =
            parsed.map_err(|source| IndexError::Format { path: path.clone(), source })?;
        if weight_map.is_empty() {
            return Err(IndexError::Empty { path });
        }
        let is_beside = |file: &String| is_plain(file) && file.ends_with(TENSORS_END);
        if let Some(file) = weight_map.values().find(|file| !is_beside(file)).cloned() {
            return Err(IndexError::FileName { path, file });
        }
        Ok(Self { path, text, weight_map })
    }

    /// Its text.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The files that it names.
    pub(crate) fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    /// Refuses the index if the tensors called `names`, which are in the files that `file_of` names, are not exactly those that it
    /// lists.
    pub(crate) fn check<'a>(
        &self,
        file_of: impl Fn(&str) -> Option<&'a str>,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<(), IndexError> {
        for (tensor, file) in &self.weight_map {
            if file_of(tensor) != Some(file) {
                let (path, tensor, file) = (self.path.clone(), tensor.clone(), file.clone());
                return Err(IndexError::Missing { path, tensor, file });
            }
        }
        let unlisted = names.filter(|name| !self.weight_map.contains_key(*name)).min();
        match unlisted {
            None => Ok(()),
            Some(tensor) => {
                let file = file_of(tensor).unwrap_or_default().to_owned();
                Err(IndexError::Unlisted { path: self.path.clone(), tensor: tensor.to_owned(), file })
            }
        }
    }
}
