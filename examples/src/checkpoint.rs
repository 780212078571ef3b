//! What has been learnt, in a safetensors file: parameters, the optimiser's velocities and the step.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use safetensors::{
    Dtype, SafeTensorError, SafeTensors,
    tensor::{Metadata, TensorView},
};

use crate::{mlp::TensorSpec, model::ModelKind};

/// Bytes before the header of a safetensors file: the header's length.
const PREFIX_BYTES: u64 = 8;
/// Longest header, in bytes: the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// What the name of a tensor of velocities begins with.
const VELOCITY: &str = "velocity/";

/// A training at the beginning of a step: enough to go on from there, bit for bit.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// How many updates have been made.
    pub step: u64,
    /// One list for each tensor.
    pub parameters: Vec<Vec<f32>>,
    /// One list for each tensor, as long as the parameters'.
    pub velocities: Vec<Vec<f32>>,
}

/// Why a checkpoint can't be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system.
    #[error("checkpoint {path}: {source}; give --checkpoint a file in a directory that this user may write")]
    Io {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The file ends too early.
    #[error(
        "checkpoint {path} is cut short: it has {found} bytes, and {expected} are expected; restore a whole copy, or \
         remove it to begin at step 0"
    )]
    CutShort {
        /// The file.
        path: PathBuf,
        /// How long it is.
        found: u64,
        /// How long it says to be.
        expected: u64,
    },
    /// The file is no safetensors file.
    #[error(
        "checkpoint {path} is no safetensors file: {source}; give another with --checkpoint, or remove it to begin at \
         step 0"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafeTensorError,
    },
    /// The file belongs to another training.
    #[error(
        "checkpoint {path}: its {field} is `{found}`, but this training needs `{expected}`; run with the options that \
         it was written with, or give another file with --checkpoint"
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: String,
        /// What the file has.
        found: String,
        /// What the training needs.
        expected: String,
    },
}

impl Checkpoint {
    /// A training that has not begun.
    pub fn fresh(parameters: Vec<Vec<f32>>) -> Self {
        let velocities = parameters.iter().map(|values| vec![0.0; values.len()]).collect();
        Self { step: 0, parameters, velocities }
    }

    /// Writes the checkpoint of a training of `model` with `seed` to `path`: whole, or not at all. Whoever reads the
    /// file meanwhile sees the former one.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] and [`CheckpointError::Format`].
    pub fn write(
        &self,
        path: &Path,
        model: ModelKind,
        seed: u64,
        tensors: &[TensorSpec],
    ) -> Result<(), CheckpointError> {
        let entries = self.entries(tensors);
        let views = entries.iter().map(|(name, shape, bytes)| {
            Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes)?))
        });
        let metadata = HashMap::from([
            ("model".to_owned(), model.name().to_owned()),
            ("seed".to_owned(), seed.to_string()),
            ("step".to_owned(), self.step.to_string()),
        ]);
        let file = views
            .collect::<Result<Vec<_>, _>>()
            .and_then(|views| safetensors::serialize(views, Some(metadata)))
            .map_err(|source| CheckpointError::Format { path: path.to_owned(), source })?;
        write_whole(path, &file).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })
    }

    /// Name, shape and bytes of each tensor of the file.
    fn entries(&self, tensors: &[TensorSpec]) -> Vec<(String, Vec<usize>, Vec<u8>)> {
        let named = |prefix: &'static str, values: &[Vec<f32>]| {
            let entry = |(spec, values): (&TensorSpec, &Vec<f32>)| {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (format!("{prefix}{}", spec.name), spec.shape.clone(), bytes)
            };
            tensors.iter().zip(values).map(entry).collect::<Vec<_>>()
        };
        [named("", &self.parameters), named(VELOCITY, &self.velocities)].concat()
    }

    /// Reads the checkpoint of a training of `model` with `seed` from `path`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`CheckpointError`].
    pub fn read(
        path: &Path,
        model: ModelKind,
        seed: u64,
        tensors: &[TensorSpec],
    ) -> Result<Option<Self>, CheckpointError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Io { path: path.to_owned(), source }),
        };
        CheckpointFile::open(path, &bytes)?.checkpoint(model, seed, tensors).map(Some)
    }
}

/// A checkpoint's bytes, as long as their header says.
struct CheckpointFile<'bytes> {
    path: &'bytes Path,
    header: Metadata,
    content: SafeTensors<'bytes>,
}

impl<'bytes> CheckpointFile<'bytes> {
    fn open(path: &'bytes Path, bytes: &'bytes [u8]) -> Result<Self, CheckpointError> {
        let found = bytes.len() as u64;
        let cut_short = |expected| CheckpointError::CutShort { path: path.to_owned(), found, expected };
        let malformed = |source| CheckpointError::Format { path: path.to_owned(), source };
        let Some((prefix, rest)) = bytes.split_first_chunk() else {
            return Err(cut_short(PREFIX_BYTES));
        };
        let header_bytes = u64::from_le_bytes(*prefix);
        if header_bytes > HEADER_BYTES_MAX {
            return Err(malformed(SafeTensorError::HeaderTooLarge));
        }
        let header =
            rest.get(..header_bytes as usize).ok_or_else(|| cut_short(PREFIX_BYTES + header_bytes))?;
        let header: Metadata = serde_json::from_slice(header)
            .map_err(|source| malformed(SafeTensorError::InvalidHeaderDeserialization(source)))?;
        let expected = (PREFIX_BYTES + header_bytes).saturating_add(header.data_len() as u64);
        if found < expected {
            return Err(cut_short(expected));
        }
        let content = SafeTensors::deserialize(bytes).map_err(malformed)?;
        Ok(Self { path, header, content })
    }

    fn checkpoint(
        &self,
        model: ModelKind,
        seed: u64,
        tensors: &[TensorSpec],
    ) -> Result<Checkpoint, CheckpointError> {
        self.check("model", &self.noted("model"), model.name())?;
        self.check("seed", &self.noted("seed"), &seed.to_string())?;
        let step = self.noted("step");
        let step = step.parse().map_err(|_| self.other("step", &step, "a number of updates"))?;
        let values = |prefix: &str| -> Result<Vec<_>, _> {
            tensors.iter().map(|spec| self.values(&format!("{prefix}{}", spec.name), spec)).collect()
        };
        Ok(Checkpoint { step, parameters: values("")?, velocities: values(VELOCITY)? })
    }

    /// What the header's metadata say of `field`.
    fn noted(&self, field: &str) -> String {
        let noted = self.header.metadata().as_ref().and_then(|metadata| metadata.get(field));
        noted.cloned().unwrap_or_else(|| "not noted".to_owned())
    }

    fn values(&self, name: &str, spec: &TensorSpec) -> Result<Vec<f32>, CheckpointError> {
        let field = format!("tensor `{name}`");
        let expected = format!("F32 {:?}", spec.shape);
        let view = self.content.tensor(name).map_err(|_| self.other(&field, "missing", &expected))?;
        self.check(&field, &format!("{:?} {:?}", view.dtype(), view.shape()), &expected)?;
        let floats = view.data().chunks_exact(size_of::<f32>());
        Ok(floats.map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
    }

    fn check(&self, field: &str, found: &str, expected: &str) -> Result<(), CheckpointError> {
        if found == expected { Ok(()) } else { Err(self.other(field, found, expected)) }
    }

    fn other(&self, field: &str, found: &str, expected: &str) -> CheckpointError {
        let [field, found, expected] = [field, found, expected].map(str::to_owned);
        CheckpointError::Other { path: self.path.to_owned(), field, found, expected }
    }
}

/// Writes beside `path`, has it on the disk, and renames. A process that is killed meanwhile leaves the part beside it,
/// always under the same name, and the next one that writes replaces that.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)
    });
    if written.is_err() {
        // What was wrong is told; that the part can't be removed either says no more.
        let _ = fs::remove_file(&part);
    }
    written?;
    // The new name, too, is to outlive a crash of the machine.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Checkpoint, CheckpointError};
    use crate::model::ModelKind;

    const MODEL: ModelKind = ModelKind::Linear;

    fn tensors() -> Vec<crate::mlp::TensorSpec> {
        MODEL.open(1).tensors()
    }

    fn read(path: &std::path::Path, seed: u64) -> Result<Option<Checkpoint>, CheckpointError> {
        Checkpoint::read(path, MODEL, seed, &tensors())
    }

    fn written() -> (tempfile::TempDir, std::path::PathBuf, Checkpoint) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("line.safetensors");
        let checkpoint = Checkpoint {
            step: 120,
            parameters: vec![vec![1.5], vec![f32::MIN_POSITIVE]],
            velocities: vec![vec![-0.25], vec![0.1]],
        };
        checkpoint.write(&path, MODEL, 7, &tensors()).unwrap();
        (directory, path, checkpoint)
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is_left() {
        let (directory, path, checkpoint) = written();
        assert_eq!(read(&path, 7).unwrap(), Some(checkpoint));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        assert_eq!(read(&directory.path().join("none"), 7).unwrap(), None);
    }

    #[test]
    fn a_file_cut_short_anywhere_is_named_with_both_lengths_and_a_remedy() {
        let (_directory, path, _) = written();
        let whole = fs::read(&path).unwrap();
        for length in [0, 7, 8, 100, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            let error = read(&path, 7).unwrap_err();
            let CheckpointError::CutShort { found, expected, .. } = &error else {
                panic!("{length}: {error}")
            };
            assert!(
                *found == length as u64 && expected > found && *expected <= whole.len() as u64,
                "{error}"
            );
            let text = error.to_string();
            assert!(
                text.contains("line.safetensors") && text.contains("remove it to begin at step 0"),
                "{text}"
            );
        }
    }

    #[test]
    fn files_of_other_trainings_are_refused_by_what_differs() {
        let (_directory, path, _) = written();
        let error = read(&path, 8).unwrap_err().to_string();
        assert!(error.contains("seed is `7`") && error.contains("needs `8`"), "{error}");
        let tensors = ModelKind::Mlp.open(1).tensors();
        let error = Checkpoint::read(&path, ModelKind::Mlp, 7, &tensors).unwrap_err().to_string();
        assert!(error.contains("model is `linear`") && error.contains("needs `mlp`"), "{error}");
        fs::write(&path, b"\x05\0\0\0\0\0\0\0hello and more").unwrap();
        assert!(matches!(read(&path, 7), Err(CheckpointError::Format { .. })));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let missing = std::path::Path::new("/no/such/directory/file");
        let error = written().2.write(missing, MODEL, 7, &tensors()).unwrap_err().to_string();
        assert!(error.contains("/no/such/directory/file") && error.contains("--checkpoint"), "{error}");
    }
}
