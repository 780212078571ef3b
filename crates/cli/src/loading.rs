//! Reads the tensors of files into memory. Tensors that have not changed stay those of the state before.

use std::{collections::BTreeMap, sync::Arc};

use indicatif::ProgressBar;
use tensorwire::{
    DataType, Tensor, WorkerError,
    arrays::from_safetensors_dtype,
    memory::{Buf, Pool},
};

use crate::{
    checkpoint::Checkpoint,
    failure::Failure,
    header::Entry,
    layout::header_name,
    source::{Look, OpenFile, Opened},
};

/// A state of the files that is served.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) look: Look,
    pub(crate) version: u64,
    /// The published tensors by name, with the texts of headers and index.
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

/// A tensor of the new state.
#[derive(Debug)]
pub(crate) struct LoadedTensor {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Whether it differs from the tensor of that name in the state before.
    pub(crate) is_new: bool,
}

/// All tensors of a state, and the texts after them.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) tensors: Vec<LoadedTensor>,
    pub(crate) texts: Vec<LoadedTensor>,
}

/// Reads the files of a state.
#[derive(Debug)]
pub(crate) struct Loading {
    pub(crate) pool: Pool,
    pub(crate) opened: Opened,
    pub(crate) look: Look,
    /// The bytes of each file, if that is mapped.
    pub(crate) mapped: Vec<Option<Buf>>,
    pub(crate) before: Option<Arc<State>>,
    pub(crate) progress: ProgressBar,
}

impl Loading {
    /// Reads all tensors.
    pub(crate) fn run(self) -> Result<Loaded, Failure> {
        let mut loaded = Loaded::default();
        for (file, mapped) in self.opened.files.iter().zip(&self.mapped) {
            let is_unchanged = self.is_unchanged(file);
            for entry in file.checkpoint.header().entries() {
                let (name, old) = (entry.name.clone(), self.old(&entry.name));
                loaded.tensors.push(match old.filter(|_| is_unchanged) {
                    Some(old) => LoadedTensor { name, tensor: old.clone(), is_new: false },
                    None => {
                        let bytes = match mapped {
                            Some(mapped) => mapped_bytes(mapped, &file.checkpoint, entry)?,
                            None => self.read(&file.checkpoint, entry)?,
                        };
                        newer(name, tensor(bytes, entry)?, old)
                    }
                });
                self.progress.inc(entry.byte_length());
            }
        }
        let headers = self.opened.files.iter();
        let headers =
            headers.map(|file| (header_name(file.name.as_deref()), file.checkpoint.header().text()));
        let index = self.opened.index.iter().map(|(name, index)| (name.clone(), index.text()));
        for (name, text) in headers.chain(index) {
            let text = Tensor::from_bytes(&self.pool, DataType::U8, &[text.len() as u64], text.as_bytes())?;
            let old = self.old(&name);
            loaded.texts.push(newer(name, text, old));
        }
        Ok(loaded)
    }

    fn old(&self, name: &str) -> Option<&Tensor> {
        self.before.as_ref()?.tensors.get(name)
    }

    /// Whether the file was the same in the state before.
    fn is_unchanged(&self, file: &OpenFile) -> bool {
        let name = file.name.as_deref().unwrap_or_default();
        self.before.as_ref().is_some_and(|before| before.look.is_same(name, &self.look))
    }

    /// Reads one tensor straight into a block of the pool.
    fn read(&self, checkpoint: &Checkpoint, entry: &Entry) -> Result<Buf, Failure> {
        let length = addressable(entry, entry.byte_length())?;
        let mut buffer = self.pool.try_alloc(length).map_err(WorkerError::from)?;
        checkpoint.read(entry, &mut buffer)?;
        Ok(buffer.freeze())
    }
}

/// `tensor`, or `old` if that is the same.
fn newer(name: String, tensor: Tensor, old: Option<&Tensor>) -> LoadedTensor {
    match old.filter(|old| is_equal(old, &tensor)) {
        Some(old) => LoadedTensor { name, tensor: old.clone(), is_new: false },
        None => LoadedTensor { name, tensor, is_new: true },
    }
}

/// Whether both have the same type, shape and bytes.
pub(crate) fn is_equal(one: &Tensor, other: &Tensor) -> bool {
    one.metadata() == other.metadata() && one.bytes() == other.bytes()
}

/// The bytes of one tensor in the mapped file.
fn mapped_bytes(mapped: &Buf, checkpoint: &Checkpoint, entry: &Entry) -> Result<Buf, Failure> {
    let place = checkpoint.place(entry);
    let place = addressable(entry, place.start)?..addressable(entry, place.end)?;
    // The file was longer when its header was checked.
    let bytes = entry.byte_length();
    mapped.slice(place).ok_or_else(|| Failure::TooLarge { name: entry.name.clone(), bytes })
}

fn addressable(entry: &Entry, number: u64) -> Result<usize, Failure> {
    let bytes = entry.byte_length();
    usize::try_from(number).map_err(|_| Failure::TooLarge { name: entry.name.clone(), bytes })
}

fn tensor(bytes: Buf, entry: &Entry) -> Result<Tensor, Failure> {
    let shape: Vec<u64> = entry.shape.iter().map(|&dimension| dimension as u64).collect();
    let length = bytes.len() as u64;
    let tensor = match from_safetensors_dtype(entry.dtype) {
        Some(dtype) => Tensor::shared(bytes, dtype, &shape),
        // The wire has no such element type; the published header has its name.
        None => Tensor::shared(bytes, DataType::U8, &[length]),
    };
    Ok(tensor?)
}
