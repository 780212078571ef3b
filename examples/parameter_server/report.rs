//! The lines that processes print about what happens: `key=value` pairs, one event a line. A launcher reads them.

use std::{collections::BTreeMap, fmt, str::FromStr};

/// One line of a child.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Report {
    pairs: BTreeMap<String, String>,
}

impl Report {
    /// A report of one pair.
    pub(crate) fn of(key: &str, value: impl fmt::Display) -> Self {
        Self::default().with(key, value)
    }

    /// The report with one more pair.
    #[must_use]
    pub(crate) fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.pairs.insert(key.to_owned(), value.to_string());
        self
    }

    /// Whether it says nothing: it was a line for people.
    pub(crate) fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The value of `key`, if it is there and parses.
    pub(crate) fn value<T: FromStr>(&self, key: &str) -> Option<T> {
        self.pairs.get(key)?.parse().ok()
    }

    /// Prints the report for the launcher.
    pub(crate) fn print(&self) {
        println!("{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line: Vec<String> = self.pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&line.join(" "))
    }
}

impl From<&str> for Report {
    fn from(line: &str) -> Self {
        let pairs = line.split_whitespace().filter_map(|pair| pair.split_once('='));
        Self { pairs: pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect() }
    }
}
