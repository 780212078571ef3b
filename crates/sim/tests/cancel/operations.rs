//! The list of operations is complete: it equals the operations in the sources.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::{calls, groups, local, pages, queue_pairs, subscriptions, workers};

/// Packages whose public operations users call.
const PACKAGES: [&str; 8] = [
    "collective",
    "fabric",
    "fabric-shm",
    "fabric-tcp",
    "memory",
    "rendezvous",
    "tensorwire",
    "verbs-reactor",
];

/// Types that are awaited.
const AWAITED: [&str; 17] = [
    "Operation",
    "NextArrival",
    "Discovery",
    "Alloc",
    "Calling<",
    "BoxFuture",
    "impl Future",
    "Receive",
    "Fetch<",
    "FetchMany<",
    "List<",
    "Recv<",
    "RecvMany<",
    "Collective<",
    "Reducing<",
    "ReducingTensors",
    // Not `TransferError`.
    " Transfer ",
];

fn files(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "tests" {
            files(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path.to_str().unwrap().to_owned());
        }
    }
}

/// The public functions of `text` that return something to await.
fn operations(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let mut found = Vec::new();
    for (start, _) in code.match_indices("pub ") {
        let rest = &code[start + 4..];
        let (signature, is_async) = match rest.strip_prefix("async fn ") {
            Some(signature) => (signature, true),
            None => match rest.strip_prefix("fn ") {
                Some(signature) => (signature, false),
                None => continue,
            },
        };
        let end = signature.find(['{', ';']).unwrap_or(signature.len());
        let answer = signature[..end].rsplit_once("->").map_or("", |(_, answer)| answer);
        if is_async || AWAITED.iter().any(|awaited| answer.contains(awaited)) {
            let name = signature.find(['(', '<']).map_or("", |end| &signature[..end]);
            found.push(name.to_owned());
        }
    }
    found
}

/// A file's module, the same when a file becomes a folder.
fn module(file: &str) -> String {
    let module = file.trim_start_matches('/').trim_end_matches(".rs").trim_end_matches("/mod");
    module.replacen("/src/", "/", 1)
}

fn in_sources() -> BTreeSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut paths = Vec::new();
    PACKAGES.iter().for_each(|package| files(&crates.join(package).join("src"), &mut paths));
    let named = paths.iter().flat_map(|path| {
        let module = module(path.strip_prefix(crates.to_str().unwrap()).unwrap());
        let found = operations(&fs::read_to_string(path).unwrap());
        found.into_iter().map(move |name| format!("{module}::{name}"))
    });
    named.collect()
}

/// The committed list: operation and case, `-` for none.
fn listed() -> BTreeMap<String, String> {
    let lines = include_str!("operations.txt").lines().filter(|line| !line.starts_with('#'));
    let parts = lines.map(|line| {
        let mut words = line.split(' ');
        let (operation, case) = (words.next().unwrap(), words.next().unwrap_or_default());
        assert_eq!(case == "-", words.next().is_some(), "{line}: a case, or - and a reason");
        (operation.to_owned(), case.to_owned())
    });
    parts.collect()
}

#[test]
fn every_public_operation_is_cancelled_somewhere() {
    let (sources, listed) = (in_sources(), listed());
    let names: BTreeSet<String> = listed.keys().cloned().collect();
    let missing: Vec<_> = sources.difference(&names).collect();
    assert!(
        missing.is_empty(),
        "add to tests/cancel/operations.txt, with a case that cancels it: {missing:?}"
    );
    let gone: Vec<_> = names.difference(&sources).collect();
    assert!(gone.is_empty(), "in tests/cancel/operations.txt, but not in the sources: {gone:?}");
    let cases: BTreeSet<&str> = workers::CASES
        .into_iter()
        .chain(queue_pairs::CASES)
        .chain(local::CASES)
        .chain(calls::CASES)
        .chain(pages::CASES)
        .chain(subscriptions::CASES)
        .chain(groups::cases())
        .collect();
    let unknown: Vec<_> =
        listed.values().filter(|case| *case != "-" && !cases.contains(case.as_str())).collect();
    assert!(unknown.is_empty(), "cases that do not exist: {unknown:?}");
}

#[test]
fn operations_are_found_in_sources() {
    let text = "pub async fn one() {}\n pub fn two(\n&self) -> NextArrival<'_> {}\npub fn three() -> u8 {}\n\
                pub(crate) async fn four() {}\npub async fn five<F: Future>(f: F) -> F::Output {}\n\
                #[cfg(test)]\nmod tests {pub async fn six() {}}";
    assert_eq!(operations(text), ["one", "two", "five"]);
}
