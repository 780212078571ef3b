//! Each target has a corpus, and a test replays each corpus.

use std::{
    collections::BTreeSet,
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
};

use tensorwire_protocol::{
    WireError,
    wire::{self, control::ControlFrame},
};

use crate::{input::framed, replay::replay};

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

/// What no input shows, a fuzzer must guess: the number of the kind, and the right length for it.
#[test]
fn d_fuzz_every_kind_of_frame_and_message_is_in_its_corpus() {
    assert_kinds("control_frame", |bytes| ControlFrame::decode(bytes).map(drop));
    assert_kinds("message", |bytes| wire::decode(bytes).map(drop));
}

/// The kind is the first byte after the length.
fn assert_kinds(target: &str, decode: impl Fn(&[u8]) -> Result<(), WireError>) {
    let inputs = fs::read_dir(root().join("fuzz/corpus").join(target)).unwrap();
    let inputs = inputs.map(|input| fs::read(input.unwrap().path()).unwrap());
    let decoded = inputs.flat_map(|input| [framed(&input), input]).filter(|bytes| decode(bytes).is_ok());
    let found: BTreeSet<u8> = decoded.map(|bytes| bytes[4]).collect();
    let is_unknown = |error: WireError| matches!(error, WireError::Unknown { field: "kind", .. });
    let exists = |kind: &u8| !decode(&framed(&[*kind])).is_err_and(is_unknown);
    assert_eq!(found, (0..=u8::MAX).filter(exists).collect(), "kinds in the corpus of {target}");
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
