//! `tensorwire pull --resume`: a pull that continues what an earlier one has left.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Stdio,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Process, Server, fail_with, file_of, fill, names_in, succeed, tensorwire};

const MIB: usize = 1 << 20;

/// The tensors of the file that is pulled.
const TENSORS: usize = 48;

/// A file of tensors of 2 MiB. Each has other bytes.
fn large_file(path: &Path) -> Vec<u8> {
    let tensors: Vec<_> = (1..=TENSORS).map(|at| (format!("{at:03}"), vec![at as u8; 2 * MIB])).collect();
    let bytes = file_of(tensors.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])));
    fs::write(path, &bytes).unwrap();
    bytes
}

/// The hidden file of an unfinished pull into `target`.
fn draft_of(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap().as_encoded_bytes();
    target.with_file_name(format!(".pull.{:016x}.part", twox_hash::XxHash3_64::oneshot(name)))
}

fn pull<'a>(address: &'a str, copy: &'a Path) -> [&'a str; 7] {
    ["pull", address, "-o", copy.to_str().unwrap(), "--resume", "--fabric", "tcp"]
}

/// Whether the file has other bytes than 0 in the third tensor.
fn has_begun(draft: &Path) -> bool {
    let mut bytes = [0; 64];
    fs::File::open(draft).is_ok_and(|file| file.read_exact_at(&mut bytes, 5 * MIB as u64).is_ok())
        && bytes != [0; 64]
}

/// Kills a pull after some of its tensors, and before it has all.
fn pull_until_killed(address: &str, copy: &Path) {
    for _ in 0..50 {
        let mut command = tensorwire(&[&pull(address, copy)[..], &["--memory", "1M"]].concat());
        let mut process = Process(command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap());
        while process.0.try_wait().unwrap().is_none() && !has_begun(&draft_of(copy)) {
            std::thread::yield_now();
        }
        let _ = kill_process(Pid::from_child(&process.0), Signal::KILL);
        process.0.wait().unwrap();
        if !copy.exists() {
            return;
        }
        // It was faster than this process.
        fs::remove_file(copy).unwrap();
    }
    panic!("no pull was killed before its end");
}

/// Pulls, and returns how many tensors were fetched, and how many were there.
fn continued(address: &str, copy: &Path) -> (usize, usize) {
    let json = succeed(&[&pull(address, copy)[..], &["--json", "-q"]].concat());
    let round = &serde_json::from_str::<Value>(&json).unwrap()["rounds"][0];
    let [fetched, resumed] = ["tensors", "resumed"].map(|field| round[field].as_u64().unwrap() as usize);
    (fetched, resumed)
}

#[test]
fn a_killed_pull_is_continued_with_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["file", "copy"].map(|name| directory.path().join(name));
    let bytes = large_file(&file);
    let server = Server::start(&file, &[]);
    pull_until_killed(&server.address, &copy);
    assert_eq!(names_in(directory.path()).len(), 2);
    let (fetched, resumed) = continued(&server.address, &copy);
    assert!(resumed >= 2 && fetched > 0 && fetched + resumed == TENSORS, "{fetched} {resumed}");
    assert!(fs::read(&copy).unwrap() == bytes, "the files differ");
    assert_eq!(names_in(directory.path()), ["copy", "file"]);
}

#[test]
fn s2_a_continued_file_has_no_bytes_of_an_older_version() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["file", "copy"].map(|name| directory.path().join(name));
    let mut bytes = large_file(&file);
    let server = Server::start(&file, &[]);
    pull_until_killed(&server.address, &copy);
    drop(server);
    // In the second tensor, which the killed pull has written.
    bytes[3 * MIB] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let server = Server::start(&file, &[]);
    let (fetched, resumed) = continued(&server.address, &copy);
    assert!(resumed >= 1 && fetched > 0, "{fetched} {resumed}");
    assert!(fs::read(&copy).unwrap() == bytes, "the files differ");
}

/// A folder with two files of two tensors each.
fn folder(directory: &Path) -> PathBuf {
    let folder = directory.join("model");
    fs::create_dir(&folder).unwrap();
    for (name, tensors) in [("a.safetensors", ["a", "b"]), ("b.safetensors", ["c", "d"])] {
        let bytes = tensors.map(|tensor| (tensor, fill(100_000, tensor.as_bytes()[0].into())));
        fs::write(folder.join(name), file_of(bytes.iter().map(|(name, bytes)| (*name, &bytes[..])))).unwrap();
    }
    folder
}

#[test]
fn each_file_of_a_folder_is_continued() {
    let directory = tempfile::tempdir().unwrap();
    let folder = folder(directory.path());
    let server = Server::start(&folder, &[]);
    let copy = directory.path().join("copy");
    fs::create_dir(&copy).unwrap();
    // One is complete and longer than it should be, of the other the last tensor is damaged.
    let mut first = fs::read(folder.join("a.safetensors")).unwrap();
    first.push(0);
    fs::write(draft_of(&copy.join("a.safetensors")), &first).unwrap();
    let mut second = fs::read(folder.join("b.safetensors")).unwrap();
    *second.last_mut().unwrap() ^= 1;
    fs::write(draft_of(&copy.join("b.safetensors")), &second).unwrap();
    assert_eq!(continued(&server.address, &copy), (1, 3));
    assert_eq!(names_in(&copy), ["a.safetensors", "b.safetensors"]);
    for name in names_in(&copy) {
        assert!(fs::read(copy.join(&name)).unwrap() == fs::read(folder.join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode_and_stays_until_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["file", "copy"].map(|name| directory.path().join(name));
    fs::write(&file, file_of([("a", &b"one"[..]), ("b", b"two")])).unwrap();
    fs::write(&copy, b"before").unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o640)).unwrap();
    let server = Server::start(&file, &[]);
    assert!(fail_with(3, &[&pull(&server.address, &copy)[..], &["--tensor", "c"]].concat()).contains("`c`"));
    assert_eq!(fs::read(&copy).unwrap(), b"before");
    fs::write(draft_of(&copy), b"much less than a file").unwrap();
    assert_eq!(continued(&server.address, &copy), (2, 0));
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&file).unwrap());
    assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o7777, 0o640);
    assert_eq!(names_in(directory.path()), ["copy", "file"]);
}

#[test]
fn what_has_no_bytes_yet_is_not_left() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    fail_with(4, &pull("127.0.0.1:1", &copy));
    assert_eq!(names_in(directory.path()), [""; 0]);
    // A stream cannot be continued.
    fail_with(4, &pull("127.0.0.1:1", Path::new("/dev/null")));
    fail_with(2, &[&pull("127.0.0.1:1", &copy)[..], &["--repeat", "2"]].concat());
}
