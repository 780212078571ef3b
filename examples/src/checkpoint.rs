//! Checkpoints: the parameters of a training at the beginning of a step, as a safetensors file.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::mlp::TensorSpec;

/// The entry of the file's metadata that has the step.
const STEP: &str = "step";

/// The file for the parameters at the beginning of `step`.
///
/// # Errors
/// The parameters do not have the shapes of `tensors`.
pub fn encoded(step: u64, tensors: &[TensorSpec], parameters: &[impl AsRef<[f32]>]) -> io::Result<Vec<u8>> {
    let bytes: Vec<Vec<u8>> = parameters
        .iter()
        .map(|values| values.as_ref().iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|(spec, bytes)| {
        Ok((spec.name.as_str(), TensorView::new(Dtype::F32, spec.shape.clone(), bytes)?))
    });
    let metadata = HashMap::from([(STEP.to_owned(), step.to_string())]);
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    views.and_then(|views| safetensors::serialize(views, Some(metadata))).map_err(io::Error::other)
}

/// Writes the file: whole, or not at all. Until it is complete, the file of before is there.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, file: &[u8]) -> io::Result<()> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("--checkpoint {}: {error}", path.display()));
    let mut partial = OsString::from(path);
    partial.push(".partial");
    let (partial, folder) =
        (PathBuf::from(partial), path.parent().filter(|folder| !folder.as_os_str().is_empty()));
    let written = File::create(&partial).and_then(|mut new| {
        new.write_all(file)?;
        new.sync_all()?;
        fs::rename(&partial, path)?;
        // The new name, too, is on the disk when this returns.
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    });
    written.map_err(named)
}

/// The step and the parameters of a file.
///
/// # Errors
/// The file cannot be read, is no checkpoint, or is one of another model.
pub fn read(path: &Path, tensors: &[TensorSpec]) -> io::Result<(u64, Vec<Vec<f32>>)> {
    let named = |problem: String| io::Error::other(format!("the checkpoint {} {problem}", path.display()));
    let bytes = fs::read(path).map_err(|error| named(format!("cannot be read: {error}")))?;
    let malformed = |error| named(format!("is no safetensors file: {error}"));
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(malformed)?;
    let step = header.metadata().as_ref().and_then(|metadata| metadata.get(STEP)?.parse().ok());
    let step = step.ok_or_else(|| named("has no step".to_owned()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(malformed)?;
    let values = |spec: &TensorSpec| {
        let view = file.tensor(&spec.name).ok();
        let view = view.filter(|view| view.dtype() == Dtype::F32 && view.shape() == spec.shape);
        let view = view.ok_or_else(|| {
            let TensorSpec { name, shape } = spec;
            named(format!(
                "has no `{name}` of shape {shape:?}: name the --model and --data that it was written with"
            ))
        })?;
        let floats = view.data().chunks_exact(size_of::<f32>());
        Ok(floats.map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
    };
    Ok((step, tensors.iter().map(values).collect::<io::Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{encoded, read, write};
    use crate::mlp::TensorSpec;

    fn tensors() -> Vec<TensorSpec> {
        [("w1", vec![2, 2]), ("b1", vec![2])]
            .map(|(name, shape)| TensorSpec { name: name.to_owned(), shape })
            .to_vec()
    }

    #[test]
    fn a_checkpoint_is_restored_bit_for_bit_and_replaces_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let parameters = [vec![f32::MIN_POSITIVE, -0.0, 1.0 / 3.0, f32::from_bits(1)], vec![f32::NAN, 7.5]];
        for step in [8, 9] {
            write(&path, &encoded(step, &tensors(), &parameters).unwrap()).unwrap();
        }
        let (step, restored) = read(&path, &tensors()).unwrap();
        let bits = |parameters: &[Vec<f32>]| {
            parameters.concat().iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!((step, bits(&restored)), (9, bits(&parameters)));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");
    }

    #[test]
    fn files_that_are_no_checkpoints_of_the_model_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let refused = |tensors: &[TensorSpec]| read(&path, tensors).unwrap_err().to_string();
        assert!(refused(&tensors()).contains("cannot be read"));
        let file = encoded(1, &tensors(), &[vec![0.0; 4], vec![0.0; 2]]).unwrap();
        for length in [0, 4, file.len() / 2, file.len() - 1] {
            write(&path, &file[..length]).unwrap();
            assert!(refused(&tensors()).contains("is no safetensors file"), "{length}");
        }
        write(&path, &file).unwrap();
        let mut others = tensors();
        others[0].shape = vec![4, 1];
        assert!(refused(&others).contains("has no `w1` of shape [4, 1]"), "{}", refused(&others));
    }
}
