//! Fashion-MNIST: 70,000 images of clothes with 28 × 28 pixels, as Debian's package `dataset-fashion-mnist` installs them.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use flate2::read::GzDecoder;

use crate::samples::{CLASSES, Images};

/// Where the package has its files.
pub const FOLDER: &str = "/usr/share/datasets/fashion-mnist";
/// Pixels of one image, row by row.
pub const PIXELS: usize = 784;

/// Longest content of a file, in bytes: that of the images for training, with room to spare.
const BYTES_MAX: u64 = 64 << 20;

/// Whether the images are in this folder.
pub fn is_installed(folder: &Path) -> bool {
    folder.join("train-images-idx3-ubyte.gz").exists()
}

/// The images for training, and those for measuring.
///
/// # Errors
/// A file cannot be read, or is no such file.
pub fn load(folder: &Path) -> io::Result<(Images, Images)> {
    Ok((part(folder, "train")?, part(folder, "t10k")?))
}

fn part(folder: &Path, name: &str) -> io::Result<Images> {
    let (shape, bytes) = idx(&folder.join(format!("{name}-images-idx3-ubyte.gz")))?;
    let (labelled, labels) = idx(&folder.join(format!("{name}-labels-idx1-ubyte.gz")))?;
    let is_right = shape == [labels.len(), 28, 28] && labelled == [labels.len()];
    if !is_right || labels.iter().any(|&label| usize::from(label) >= CLASSES) {
        let problem = format!("{}: its {name} files are not of images with labels", folder.display());
        return Err(io::Error::other(problem));
    }
    Ok(Images { pixels: PIXELS, grey_max: u8::MAX, bytes, labels })
}

/// Shape and bytes of a compressed IDX file: two zeros, 8 for bytes, the number of dimensions, each as 32 bits from the
/// most significant byte on, and the bytes.
fn idx(path: &Path) -> io::Result<(Vec<usize>, Vec<u8>)> {
    let named = |error: io::Error| {
        let remedy =
            "install dataset-fashion-mnist, name its folder by --data-dir, or train with --data digits";
        io::Error::new(error.kind(), format!("{}: {error}; {remedy}", path.display()))
    };
    let (mut file, mut bytes) =
        (GzDecoder::new(File::open(path).map_err(named)?).take(BYTES_MAX), Vec::new());
    file.read_to_end(&mut bytes).map_err(named)?;
    let parsed = parsed(&bytes).ok_or_else(|| named(io::Error::other("it is no IDX file of bytes")))?;
    Ok((parsed.0, parsed.1.to_vec()))
}

fn parsed(bytes: &[u8]) -> Option<(Vec<usize>, &[u8])> {
    let (&[0, 0, 8, dimensions], rest) = bytes.split_first_chunk()? else { return None };
    let (sizes, content) = rest.split_at_checked(usize::from(dimensions) * 4)?;
    let shape: Vec<usize> = sizes
        .chunks_exact(4)
        .map(|size| size.iter().fold(0, |sum, &byte| (sum << 8) | usize::from(byte)))
        .collect();
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    (content.len() == elements).then_some((shape, content))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write as _};

    use flate2::{Compression, write::GzEncoder};

    use super::{PIXELS, load, parsed};

    #[test]
    fn files_of_the_package_become_images() {
        let folder = tempfile::tempdir().unwrap();
        for (name, count) in [("train", 3u8), ("t10k", 2)] {
            let images = [
                &[0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28][..],
                &vec![count; usize::from(count) * PIXELS],
            ];
            let labels = [&[0, 0, 8, 1, 0, 0, 0, count][..], &vec![9; count.into()]];
            for (kind, parts) in [("images-idx3", images.concat()), ("labels-idx1", labels.concat())] {
                let file = File::create(folder.path().join(format!("{name}-{kind}-ubyte.gz"))).unwrap();
                GzEncoder::new(file, Compression::fast()).write_all(&parts).unwrap();
            }
        }
        let (training, held_out) = load(folder.path()).unwrap();
        assert_eq!((training.len(), held_out.len()), (3, 2));
        assert_eq!(training.image(2), (&[3; PIXELS][..], 9));
        let missing = load(&folder.path().join("elsewhere")).unwrap_err().to_string();
        assert!(
            missing.contains("train-images-idx3-ubyte.gz") && missing.contains("--data digits"),
            "{missing}"
        );
    }

    #[test]
    fn files_that_are_cut_short_or_of_another_kind_are_refused() {
        let whole = [0, 0, 8, 1, 0, 0, 0, 2, 7, 7];
        assert_eq!(parsed(&whole), Some((vec![2], &[7, 7][..])));
        (0..whole.len()).for_each(|length| assert_eq!(parsed(&whole[..length]), None));
        assert_eq!(parsed(&[0, 0, 13, 1, 0, 0, 0, 1, 7]), None);
        let huge = [[0, 0, 8, 3].as_slice(), &[255; 12]].concat();
        assert_eq!(parsed(&huge), None);
    }
}
