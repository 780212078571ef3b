//! Folders of safetensors files, and checkpoints in several files with an index.

use std::{
    fs,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, tensor::TensorView};

use crate::common::{Server, fail, file_of, fill, names_in, succeed};

/// A folder with two files of tensors, and others that are not served.
fn folder(directory: &Path) -> PathBuf {
    let folder = directory.join("model");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.safetensors"), file_of([("a", &b"one"[..]), ("b", b"")])).unwrap();
    fs::write(folder.join("b.safetensors"), file_of([("c", &fill(300_000, 1)[..])])).unwrap();
    fs::write(folder.join(".hidden.safetensors"), b"no such file").unwrap();
    fs::write(folder.join("config.json"), b"{}").unwrap();
    folder
}

/// Writes an index of that folder, with this map.
fn index(folder: &Path, weight_map: &str) -> PathBuf {
    let path = folder.join("model.safetensors.index.json");
    let text =
        format!("{{\n  \"metadata\": {{\"total_size\": 300003}},\n  \"weight_map\": {weight_map}\n}}\n");
    fs::write(&path, text).unwrap();
    path
}

/// The map of all tensors of that folder.
const WHOLE: &str = r#"{"a": "a.safetensors", "b": "a.safetensors", "c": "b.safetensors"}"#;

fn assert_same(one: &Path, other: &Path, names: &[&str]) {
    assert_eq!(names_in(other), names);
    for name in names {
        assert!(fs::read(one.join(name)).unwrap() == fs::read(other.join(name)).unwrap(), "{name} differs");
    }
}

#[test]
fn a_folder_arrives_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    let server = Server::start(&folder, &[]);
    for fabric in ["shm", "tcp"] {
        let output = directory.path().join(fabric);
        let to = output.to_str().unwrap();
        let pull = ["pull", &server.address, "-o", to, "--verify", "--fabric", fabric];
        let text = succeed(&pull);
        assert!(text.contains("pulled 3 tensors") && text.contains(&format!("wrote {to}")), "{text}");
        assert_same(&folder, &output, &["a.safetensors", "b.safetensors"]);
        let text = fail(&[&pull[..], &["--no-clobber"]].concat());
        assert!(text.contains("a.safetensors") && text.contains("--no-clobber"), "{text}");
        // What else is in the folder stays.
        fs::write(output.join("a.safetensors"), b"before").unwrap();
        fs::write(output.join("other"), b"other").unwrap();
        succeed(&pull);
        fs::remove_file(output.join("other")).unwrap();
        assert_same(&folder, &output, &["a.safetensors", "b.safetensors"]);
    }
}

#[test]
fn a_mapped_folder_arrives_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    let server = Server::start(&folder, &["--mmap"]);
    for fabric in ["shm", "tcp"] {
        let output = directory.path().join(fabric);
        succeed(&["pull", &server.address, "-o", output.to_str().unwrap(), "--fabric", fabric]);
        assert_same(&folder, &output, &["a.safetensors", "b.safetensors"]);
    }
}

#[test]
fn the_files_of_an_index_arrive_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    fs::write(folder.join("unnamed.safetensors"), file_of([("a", &b"another"[..])])).unwrap();
    let server = Server::start(&index(&folder, WHOLE), &[]);
    for fabric in ["shm", "tcp"] {
        let output = directory.path().join(fabric);
        let to = format!("{}/", output.display());
        succeed(&["pull", &server.address, "-o", &to, "--verify", "--fabric", fabric]);
        assert_same(&folder, &output, &["a.safetensors", "b.safetensors", "model.safetensors.index.json"]);
    }
}

#[test]
fn chosen_tensors_of_a_folder_make_one_file() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    let server = Server::start(&folder, &[]);
    let output = directory.path().join("chosen");
    succeed(&["pull", &server.address, "-o", output.to_str().unwrap(), "--tensor", "c", "--tensor", "a"]);
    let bytes = fs::read(&output).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!((tensors.len(), tensors.tensor("a").unwrap().data()), (2, &b"one"[..]));
    let missing = fail(&["pull", &server.address, "--tensor", "d"]);
    assert!(missing.contains("no tensor `d`; it has `a`, `b`, `c`"), "{missing}");
}

#[test]
fn a_folder_is_not_written_in_place_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&folder(directory.path()), &[]);
    let output = directory.path().join("file");
    fs::write(&output, b"before").unwrap();
    let text = fail(&["pull", &server.address, "-o", output.to_str().unwrap()]);
    assert!(text.contains("serves a folder: name a folder"), "{text}");
    let text = fail(&["pull", &server.address, "-o", "-"]);
    assert!(text.contains("serves a folder: name a folder"), "{text}");
    assert_eq!(fs::read(&output).unwrap(), b"before");
}

#[test]
fn a_tensor_in_two_files_is_refused_with_both() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    fs::write(folder.join("twice.safetensors"), file_of([("c", &b"two"[..])])).unwrap();
    for path in [folder.clone(), index(&folder, &WHOLE.replace("\"a.saf", "\"twice.saf"))] {
        let text = fail(&["serve", path.to_str().unwrap()]);
        assert!(
            text.contains("`c` is in")
                && text.contains("/b.safetensors")
                && text.contains("/twice.safetensors"),
            "{text}"
        );
    }
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused_with_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    for (weight_map, words) in [
        (WHOLE.replace("\"c\": \"b", "\"c\": \"a"), &["it has `c` in a.safetensors", "no such tensor"][..]),
        (WHOLE.replace("\"c\"", "\"d\""), &["it has `d` in b.safetensors"]),
        (WHOLE.replace("\"b\": \"a.safetensors\", ", ""), &["does not list `b`, which a.safetensors has"]),
        (WHOLE.replace("\"b\":", "\"a\":"), &["`a` occurs twice, in a.safetensors and in a.safetensors"]),
        (WHOLE.replace("b.safetensors", "gone.safetensors"), &["/gone.safetensors", "No such file"]),
        (WHOLE.replace("b.safetensors", "../b.safetensors"), &["names the file `../b.safetensors`"]),
        ("{}".to_owned(), &["names no file"]),
        ("[]".to_owned(), &["no index of safetensors files"]),
    ] {
        let path = index(&folder, &weight_map);
        let text = fail(&["serve", path.to_str().unwrap()]);
        let is_named = text.contains("index.json") || text.contains("gone.safetensors");
        assert!(is_named && words.iter().all(|word| text.contains(word)), "{weight_map}: {text}");
    }
}

#[test]
fn a_folder_without_files_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let text = fail(&["serve", directory.path().to_str().unwrap()]);
    assert!(text.contains("the folder has no .safetensors file"), "{text}");
}

/// All element types of the format.
pub(crate) const TYPES: [Dtype; 22] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// A file with a tensor of each type, whose bytes depend on `seed`.
pub(crate) fn of_all_types(seed: u64) -> Vec<u8> {
    let mut data = Vec::new();
    for (place, dtype) in TYPES.into_iter().enumerate() {
        let mut bytes = fill(dtype.bitsize() * 8 * 500 / 8, seed + place as u64);
        if dtype == Dtype::BOOL {
            bytes.iter_mut().for_each(|byte| *byte &= 1);
        }
        data.push((dtype, bytes));
    }
    let views = data
        .iter()
        .map(|(dtype, bytes)| (format!("of.{dtype}"), TensorView::new(*dtype, vec![8, 500], bytes).unwrap()));
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}

#[test]
fn every_type_arrives_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("types.safetensors");
    fs::write(&file, of_all_types(1)).unwrap();
    let server = Server::start(&file, &[]);
    for fabric in ["shm", "tcp"] {
        let output = directory.path().join(fabric);
        succeed(&["pull", &server.address, "-o", output.to_str().unwrap(), "--verify", "--fabric", fabric]);
        assert!(fs::read(&file).unwrap() == fs::read(&output).unwrap(), "the files differ");
    }
}
