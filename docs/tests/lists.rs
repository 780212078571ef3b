//! The lists in the book are complete.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

const ERRORS: &str = include_str!("../src/errors.md");
const WORKER_ERROR: &str = include_str!("../../crates/rendezvous/src/error.rs");

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

/// The functions that a page names, each with the file that its link leads to.
fn functions(page: &str) -> Vec<(&str, &str)> {
    let links = page.split("[`").filter_map(|rest| rest.split_once("`](../../"));
    links.filter_map(|(name, rest)| Some((name, rest.split_once(')')?.0))).collect()
}

#[test]
fn each_function_in_the_life_of_a_pull_is_in_its_file() {
    const PULL: &str = include_str!("../src/life-of-a-pull.md");
    each_is_in_its_file("life-of-a-pull.md", &functions(PULL), 25);
}

#[test]
fn each_function_of_the_reactor_is_in_its_file() {
    const REACTOR: &str = include_str!("../src/reactor.md");
    each_is_in_its_file("reactor.md", &functions(REACTOR), 20);
}

fn each_is_in_its_file(page: &str, functions: &[(&str, &str)], least: usize) {
    assert!(functions.len() > least, "{functions:?}");
    for (function, file) in functions {
        let path = format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"));
        let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let (_, name) = function.rsplit_once("::").expect("a type and a function");
        let is_there =
            [format!("fn {name}("), format!("fn {name}<")].iter().any(|head| source.contains(head));
        assert!(is_there, "docs/src/{page}: {file} has no `{function}`");
    }
}
