//! Reads files of the kernel, below a directory that tests can choose.

use std::{fs, io, path::PathBuf};

/// A file system as seen from its root.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The machine that this process runs on.
    pub(crate) fn of_this_machine() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// A tree that represents another machine.
    #[cfg(test)]
    pub(crate) fn below(root: &std::path::Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The real path of `path`, which begins with a slash.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Whether the path exists.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// A file's text without white space around it; nothing if it is empty or can't be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.at(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// The number in a file.
    pub(crate) fn number<N: std::str::FromStr>(&self, path: &str) -> Option<N> {
        self.text(path)?.parse().ok()
    }

    /// The sorted names in a directory; names with numbers are sorted by number.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.len(), name.clone()));
        names
    }

    /// The last part of a link's target.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// Opens a file for reading and writing, and closes it again.
    pub(crate) fn try_open(&self, path: &str) -> io::Result<()> {
        fs::OpenOptions::new().read(true).write(true).open(self.at(path)).map(drop)
    }

    /// Who owns a file and who may use it.
    pub(crate) fn metadata(&self, path: &str) -> io::Result<fs::Metadata> {
        fs::metadata(self.at(path))
    }
}
