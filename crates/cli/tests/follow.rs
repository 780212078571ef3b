//! `tensorwire serve --watch` and `tensorwire pull --follow` as processes.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    common::{Lines, Process, fail, file_of, fill, names_in, replace, succeed, tensorwire},
    files::of_all_types,
};

/// A process and the lines that it prints.
struct Running {
    process: Process,
    lines: Lines,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut command = tensorwire(arguments);
        // Not read, so it must not fill a pipe.
        command.stderr(std::process::Stdio::inherit());
        let mut process = Process(command.spawn().unwrap());
        let lines = process.lines();
        Self { process, lines }
    }

    /// The next version that it prints: its number, and the rest of the line.
    fn version(&self) -> (u64, String) {
        let line = self.lines.after("version ");
        let (number, rest) = line.split_once(": ").unwrap();
        (number.parse().unwrap(), rest.to_owned())
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
    }
}

/// A server that watches `path`, and its address.
fn watch(path: &Path, more: &[&str]) -> (Running, String) {
    let server = Running::start(&[&["serve", path.to_str().unwrap(), "--watch"][..], more].concat());
    let address = server.lines.after("address ");
    (server, address)
}

fn follow(address: &str, output: &Path, more: &[&str]) -> Running {
    let follow = ["pull", address, "-o", output.to_str().unwrap(), "--follow"];
    Running::start(&[&follow[..], more].concat())
}

/// A folder that is served, a copy that follows it, and the processes.
struct Pair {
    served: PathBuf,
    copy: PathBuf,
    address: String,
    server: Running,
    follower: Running,
    _directory: tempfile::TempDir,
}

impl Pair {
    /// Three tensors in two files.
    fn of(fabric: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [served, copy] = ["served", "copy"].map(|name| directory.path().join(name));
        fs::create_dir(&served).unwrap();
        fs::write(served.join("a.safetensors"), file_of([("a", &b"one"[..]), ("big", &fill(500_000, 1))]))
            .unwrap();
        fs::write(served.join("b.safetensors"), file_of([("b", &b"two"[..])])).unwrap();
        let (server, address) = watch(&served, &[]);
        let follower = follow(&address, &copy, &["--fabric", fabric]);
        let (_, rest) = follower.version();
        assert!(rest.starts_with("3 of 3 tensors changed") && rest.contains("2 files written"), "{rest}");
        let pair = Self { served, copy, address, server, follower, _directory: directory };
        pair.assert_same();
        pair
    }

    fn assert_same(&self) {
        assert_eq!(names_in(&self.served), names_in(&self.copy));
        for name in names_in(&self.served) {
            let [one, other] = [&self.served, &self.copy].map(|folder| fs::read(folder.join(&name)).unwrap());
            assert!(one == other, "{name} differs");
        }
    }

    /// Waits for the next version on both sides, and compares the files. Returns the lines.
    fn next(&self) -> (String, String) {
        let (committed, line) = self.server.version();
        let (followed, copied) = self.follower.version();
        assert_eq!(committed, followed, "{line}; {copied}");
        self.assert_same();
        (line, copied)
    }
}

fn both(test: impl Fn(&str)) {
    ["shm", "tcp"].into_iter().for_each(test);
}

#[test]
fn a_file_that_is_replaced_is_a_version_and_the_others_are_not_written() {
    both(|fabric| {
        let pair = Pair::of(fabric);
        let inode = |name| fs::metadata(pair.copy.join(name)).unwrap().ino();
        let before = inode("b.safetensors");
        let mut big = fill(500_000, 1);
        big[7] ^= 1;
        replace(&pair.served.join("a.safetensors"), &file_of([("a", &b"one"[..]), ("big", &big)]));
        let (line, copied) = pair.next();
        assert!(line.starts_with("1 of 3 tensors changed, 488.28 KiB in "), "{line}");
        assert!(
            copied.starts_with("1 of 3 tensors changed") && copied.contains("1 files written"),
            "{copied}"
        );
        assert_eq!(inode("b.safetensors"), before);
    });
}

#[test]
fn a_file_that_is_half_overwritten_waits_and_the_version_before_stays() {
    both(|fabric| {
        let pair = Pair::of(fabric);
        let path = pair.served.join("b.safetensors");
        let before = fs::read(pair.copy.join("b.safetensors")).unwrap();
        let bytes = file_of([("b", &fill(1000, 2)[..])]);
        let mut file = File::options().write(true).truncate(true).open(&path).unwrap();
        file.write_all(&bytes[..500]).unwrap();
        let line = pair.server.lines.after("not served yet, version ");
        assert!(line.contains("b.safetensors") && line.contains("truncated"), "{line}");
        let served = pair.copy.with_extension("served");
        succeed(&["pull", &pair.address, "-o", served.to_str().unwrap(), "--fabric", fabric, "--verify"]);
        assert_eq!(fs::read(served.join("b.safetensors")).unwrap(), before, "what is served");
        assert_eq!(fs::read(pair.copy.join("b.safetensors")).unwrap(), before, "what was copied");
        file.write_all(&bytes[500..]).unwrap();
        drop(file);
        let (committed, line) = pair.server.version();
        assert!(line.starts_with("1 of 3 tensors changed"), "{line}");
        assert_eq!(pair.follower.version().0, committed);
        pair.assert_same();
    });
}

#[test]
fn files_come_and_go() {
    both(|fabric| {
        let pair = Pair::of(fabric);
        replace(&pair.served.join("c.safetensors"), &file_of([("c", &b"three"[..])]));
        let (line, copied) = pair.next();
        assert!(line.starts_with("1 of 4 tensors changed"), "{line}");
        assert!(copied.contains("1 files written"), "{copied}");
        fs::remove_file(pair.served.join("a.safetensors")).unwrap();
        let (line, copied) = pair.next();
        assert!(line.starts_with("0 of 2 tensors changed, 2 removed"), "{line}");
        assert!(copied.contains("0 files written, 1 removed"), "{copied}");
    });
}

#[test]
fn an_index_is_followed_with_its_text() {
    both(|fabric| {
        let directory = tempfile::tempdir().unwrap();
        let [served, copy] = ["served", "copy"].map(|name| directory.path().join(name));
        fs::create_dir(&served).unwrap();
        let index = served.join("model.index.json");
        fs::write(served.join("a.safetensors"), file_of([("a", &b"one"[..])])).unwrap();
        fs::write(&index, r#"{"weight_map": {"a": "a.safetensors"}}"#).unwrap();
        let (server, address) = watch(&index, &[]);
        let follower = follow(&address, &copy, &["--fabric", fabric]);
        follower.version();
        // The index names a file that is not there yet.
        replace(&index, br#"{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}"#);
        let line = server.lines.after("not served yet, version ");
        assert!(line.contains("b.safetensors"), "{line}");
        replace(&served.join("b.safetensors"), &file_of([("b", &b"two"[..])]));
        follower.version();
        assert_eq!(names_in(&copy), ["a.safetensors", "b.safetensors", "model.index.json"]);
        for name in names_in(&copy) {
            assert_eq!(fs::read(served.join(&name)).unwrap(), fs::read(copy.join(&name)).unwrap(), "{name}");
        }
    });
}

#[test]
fn every_type_is_followed_bit_for_bit() {
    both(|fabric| {
        let directory = tempfile::tempdir().unwrap();
        let [file, copy] = ["types.safetensors", "copy"].map(|name| directory.path().join(name));
        fs::write(&file, of_all_types(1)).unwrap();
        let (_server, address) = watch(&file, &[]);
        let follower = follow(&address, &copy, &["--fabric", fabric]);
        for seed in 2..4 {
            follower.version();
            assert!(fs::read(&copy).unwrap() == fs::read(&file).unwrap(), "the files differ");
            replace(&file, &of_all_types(seed * 100));
        }
    });
}

#[test]
fn a_file_that_is_written_again_as_it_was_is_a_version_that_moves_nothing() {
    both(|fabric| {
        let directory = tempfile::tempdir().unwrap();
        let [file, copy] = ["a.safetensors", "copy"].map(|name| directory.path().join(name));
        let bytes = file_of([("big", &fill(500_000, 1)[..])]);
        fs::write(&file, &bytes).unwrap();
        let (server, address) = watch(&file, &[]);
        let follower = follow(&address, &copy, &["--fabric", fabric]);
        follower.version();
        let inode = || fs::metadata(&copy).unwrap().ino();
        let before = inode();
        replace(&file, &bytes);
        let (committed, line) = server.version();
        let (followed, copied) = follower.version();
        assert_eq!(committed, followed);
        assert!(line.starts_with("0 of 1 tensors changed, 0 B in "), "{line}");
        assert!(
            copied.starts_with("0 of 1 tensors changed") && copied.contains("0 files written"),
            "{copied}"
        );
        assert!(inode() == before && fs::read(&copy).unwrap() == bytes, "it was written");
    });
}

/// Replaces `path` by a file that was changed `seconds` after 1970.
fn replace_at(path: &Path, content: &[u8], seconds: u64) {
    let beside = path.with_extension("new");
    fs::write(&beside, file_of([("a", content)])).unwrap();
    let file = File::options().write(true).open(&beside).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    fs::rename(&beside, path).unwrap();
}

#[test]
fn a_server_that_comes_back_is_followed_and_one_that_goes_back_only_if_it_is_accepted() {
    both(|fabric| {
        let directory = tempfile::tempdir().unwrap();
        let [file, copy, other] = ["a.safetensors", "copy", "other"].map(|name| directory.path().join(name));
        replace_at(&file, b"two", 2_000_000);
        let (mut server, address) = watch(&file, &[]);
        let strict = follow(&address, &copy, &["--fabric", fabric]);
        let lenient = follow(&address, &other, &["--fabric", fabric, "--accept-restart"]);
        assert_eq!((strict.version().0, lenient.version().0), (2_000_000_000, 2_000_000_000));
        server.kill();
        let first = fs::read(&copy).unwrap();
        replace_at(&file, b"one", 1_000_000);
        let (mut server, _) = watch(&file, &["--bind", &address]);
        let line = strict.lines.after("the server was restarted with version ");
        assert!(
            line.starts_with("1000000000: version 2000000000 stays") && line.contains("--accept-restart"),
            "{line}"
        );
        assert_eq!(lenient.version().0, 1_000_000_000);
        assert_eq!((fs::read(&copy).unwrap(), fs::read(&other).unwrap()), (first, fs::read(&file).unwrap()));
        server.kill();
        replace_at(&file, b"three", 3_000_000);
        let (_server, _) = watch(&file, &["--bind", &address]);
        assert_eq!((strict.version().0, lenient.version().0), (3_000_000_000, 3_000_000_000));
        for path in [&copy, &other] {
            assert_eq!(fs::read(path).unwrap(), fs::read(&file).unwrap());
        }
    });
}

#[test]
fn a_follower_ends_in_order_when_it_gets_a_signal() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut pair = Pair::of("shm");
        let pid = Pid::from_child(&pair.follower.process.0);
        kill_process(pid, signal).unwrap();
        assert_eq!(pair.follower.process.0.wait().unwrap().code(), Some(0), "{signal:?}");
        pair.assert_same();
    }
}

#[test]
fn what_cannot_be_watched_or_followed_is_refused_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, file_of([("a", &b"one"[..])])).unwrap();
    let text = fail(&["serve", file.to_str().unwrap(), "--watch", "--mmap"]);
    assert!(text.contains("'--watch' cannot be used with '--mmap'"), "{text}");
    for path in ["-", "/dev/null"] {
        let text = fail(&["pull", "127.0.0.1:1", "-o", path, "--follow"]);
        assert!(text.contains(&format!("--output = `{path}`")) && text.contains("--follow needs"), "{text}");
    }
}

#[test]
fn a_version_that_does_not_fit_into_the_memory_is_an_error_with_the_option() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["a.safetensors", "copy"].map(|name| directory.path().join(name));
    let tensors: Vec<Vec<u8>> = (0..4_u8).map(|seed| fill(100_000, seed.into())).collect();
    fs::write(&file, file_of(["a", "b", "c", "d"].into_iter().zip(tensors.iter().map(|bytes| &bytes[..]))))
        .unwrap();
    let (_server, address) = watch(&file, &[]);
    let follow = ["pull", &address, "-o", copy.to_str().unwrap(), "--follow", "--fabric", "tcp"];
    let text = fail(&[&follow[..], &["--memory", "300K"]].concat());
    assert!(text.contains("--memory = `307200`: version "), "{text}");
    assert!(text.contains("needs 400000 bytes") && text.contains("raise the option's value"), "{text}");
}
