//! Points in the source that report to tests or let them interfere (`tensorwire_testpoints`), listed by reading the source.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use std::{
    fs,
    path::{Path, PathBuf},
};

/// One point.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) name: String,
    /// Relative to the directory of crates.
    pub(crate) file: PathBuf,
}

impl Point {
    /// Whether only groups can reach it.
    pub(crate) fn is_of_groups(&self) -> bool {
        self.file.starts_with("collective")
    }

    /// Whether only operations between two ranks can reach it.
    pub(crate) fn is_of_pairs(&self) -> bool {
        self.file.starts_with("collective/src/pair")
    }

    /// Whether only subscriptions can reach it.
    pub(crate) fn is_of_subscriptions(&self) -> bool {
        ["protocol/src/requests/subscription.rs", "protocol/src/responses/subscription.rs"]
            .iter()
            .any(|file| self.file.ends_with(file))
            || self.file.ends_with("rendezvous/src/values/takers.rs")
    }

    /// Whether only transfers of pages can reach it.
    pub(crate) fn is_of_pages(&self) -> bool {
        self.file.starts_with("rendezvous/src/pages")
    }

    /// Whether only calls can reach it.
    pub(crate) fn is_of_calls(&self) -> bool {
        self.file.ends_with("rendezvous/src/values/calls.rs")
    }

    /// Whether only sets can reach it.
    pub(crate) fn is_of_sets(&self) -> bool {
        self.file.starts_with("rendezvous/src/sets")
    }
}

/// All uses of the macro `kind` in the source of the crates under test, by name.
pub(crate) fn in_source(kind: &str) -> Vec<Point> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut points = Vec::new();
    for package in entries(crates).into_iter().filter(|path| !path.ends_with("testpoints")) {
        for file in rust_files(&package.join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let file = file.strip_prefix(crates).unwrap();
            points.extend(names(&text, kind).map(|name| Point { name, file: file.to_owned() }));
        }
    }
    points.sort();
    for pair in points.windows(2) {
        assert_ne!(pair[0].name, pair[1].name, "two points have one name: {pair:?}");
    }
    points
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let (directories, files): (Vec<_>, Vec<_>) =
        entries(directory).into_iter().partition(|path| path.is_dir());
    let deeper = directories.iter().flat_map(|directory| rust_files(directory));
    files.into_iter().filter(|path| path.extension().is_some_and(|kind| kind == "rs")).chain(deeper).collect()
}

/// The names in all `kind!("name")` outside comments.
fn names(text: &str, kind: &str) -> impl Iterator<Item = String> {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let start = format!("{kind}!(");
    let uses: Vec<String> = code.split(&start).skip(1).map(str::to_owned).collect();
    uses.into_iter()
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned))
}

#[test]
fn points_are_found_in_code_and_not_in_comments() {
    let text = "a(tensorwire_testpoints::chance!(\n    \"one\"\n)); // chance!(\"two\")\nchance!(\"three\")";
    assert_eq!(names(text, "chance").collect::<Vec<_>>(), ["one", "three"]);
    assert!(in_source("chance").len() >= 10 && in_source("mark").len() >= 5);
}
