//! The lists in the book are complete.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

const ERRORS: &str = include_str!("../../../docs/src/errors.md");
const WORKER_ERROR: &str = include_str!("../../rendezvous/src/error.rs");

/// The names of the variants of `pub enum WorkerError`, by their position in the formatted source.
fn variants() -> Vec<&'static str> {
    let (_, body) = WORKER_ERROR.split_once("pub enum WorkerError {").expect("the enum");
    let (body, _) = body.split_once("\n}\n").expect("its end");
    let at_first_level = body.lines().filter_map(|line| line.strip_prefix("    "));
    let named = at_first_level.filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()));
    named.map(|line| line.split(|next: char| !next.is_alphanumeric()).next().unwrap_or_default()).collect()
}

#[test]
fn the_page_of_errors_has_every_kind() {
    let variants = variants();
    assert!(variants.len() > 15, "{variants:?}");
    let missing: Vec<_> =
        variants.into_iter().filter(|kind| !ERRORS.contains(&format!("| `{kind}` |"))).collect();
    assert!(missing.is_empty(), "docs/src/errors.md does not list {missing:?}");
}
