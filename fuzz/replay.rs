//! Runs a fuzz target's body with every input of its committed corpus, without a fuzzer.

use std::{fs, path::Path};

/// Maximum number of files and of bytes of a corpus.
const FILES_MAX: usize = 300;
const BYTES_MAX: usize = 500 << 10;

/// Calls `body` with every file of `fuzz/corpus/TARGET`. A failing test prints the file's name last. Without any input
/// the test fails.
pub(crate) fn replay(target: &str, body: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!((1..=FILES_MAX).contains(&files.len()), "{} files: minimise the corpus", files.len());
    let mut bytes = 0;
    for file in files {
        let data = fs::read(&file).unwrap();
        bytes += data.len();
        println!("{}", file.display());
        body(&data);
    }
    assert!((1..=BYTES_MAX).contains(&bytes), "{bytes} bytes: minimise the corpus");
}
