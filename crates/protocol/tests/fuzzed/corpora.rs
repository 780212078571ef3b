//! Each target has a corpus, and a test replays each corpus.

use std::{
    collections::BTreeSet,
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
};

use crate::replay::replay;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The targets that `fuzz/Cargo.toml` lists.
fn targets() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
    let binaries = manifest.split("[[bin]]").skip(1);
    binaries.map(|binary| binary.split('"').nth(1).unwrap().to_owned()).collect()
}

/// Every Rust source below `folder`, as one text.
fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.fold(String::new(), |text, path| match path.extension() {
        _ if path.is_dir() && !path.ends_with("target") => text + &sources(&path),
        Some(extension) if extension == "rs" => text + &fs::read_to_string(path).unwrap(),
        _ => text,
    })
}

#[test]
fn d_fuzz_every_target_has_a_corpus_that_a_test_replays_and_no_corpus_is_without_target() {
    let folders = fs::read_dir(root().join("fuzz/corpus")).unwrap();
    let corpora: BTreeSet<_> =
        folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(corpora, targets());
    let tests = sources(&root().join("crates"));
    for target in targets() {
        assert!(tests.contains(&format!("replay(\"{target}\", ")), "no test replays the corpus of {target}");
    }
}

#[test]
fn d_fuzz_a_corpus_that_is_missing_empty_or_without_a_byte_fails_its_test() {
    let scratch = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("corpora-{}", std::process::id()));
    let replayed = |folder: &Path| catch_unwind(|| replay(folder.to_str().unwrap(), |_| ())).is_ok();
    assert!(!replayed(&scratch), "missing");
    fs::create_dir_all(&scratch).unwrap();
    let is_empty_replayed = replayed(&scratch);
    fs::write(scratch.join("input"), []).unwrap();
    let is_nothing_replayed = replayed(&scratch);
    fs::write(scratch.join("input"), [1]).unwrap();
    let is_input_replayed = replayed(&scratch);
    fs::remove_dir_all(&scratch).unwrap();
    assert_eq!([is_empty_replayed, is_nothing_replayed, is_input_replayed], [false, false, true]);
}
