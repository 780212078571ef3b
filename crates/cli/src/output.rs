//! A file that appears whole or not at all.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::NamedTempFile;

/// A file in the making, in the directory of its target. Dropped before [`finish`](Self::finish) it is gone; ended by
/// SIGKILL too, where the file system has files without a name.
#[derive(Debug)]
pub(crate) struct Output {
    target: PathBuf,
    draft: Draft,
}

#[derive(Debug)]
enum Draft {
    /// Has no name until it is finished.
    Unnamed(File),
    /// Hidden beside the target, removed on drop.
    Named(NamedTempFile),
}

impl Output {
    /// Begins a file of `bytes` bytes that will replace `target`.
    pub(crate) fn create(target: &Path, bytes: u64) -> io::Result<Self> {
        if target.is_dir() {
            return Err(io::Error::from(io::ErrorKind::IsADirectory));
        }
        let output = Self { target: target.to_owned(), draft: Self::draft(target)? };
        output.file().set_len(bytes)?;
        Ok(output)
    }

    fn draft(target: &Path) -> io::Result<Draft> {
        let directory = directory_of(target);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(directory, flags, Mode::from_raw_mode(0o666)) {
            Ok(descriptor) => Ok(Draft::Unnamed(File::from(descriptor))),
            // The file system or the kernel does not know files without a name.
            Err(_) => {
                let prefix = hidden_name(target, ".");
                tempfile::Builder::new()
                    .prefix(&prefix)
                    .suffix(".part")
                    .tempfile_in(directory)
                    .map(Draft::Named)
            }
        }
    }

    fn file(&self) -> &File {
        match &self.draft {
            Draft::Unnamed(file) => file,
            Draft::Named(file) => file.as_file(),
        }
    }

    /// Writes `bytes` at `place`.
    pub(crate) fn write_at(&self, bytes: &[u8], place: u64) -> io::Result<()> {
        self.file().write_all_at(bytes, place)
    }

    /// Gives the file its name, once its bytes are on the disk.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.file().sync_all()?;
        match self.draft {
            Draft::Named(file) => {
                file.persist(&self.target).map_err(|error| error.error)?;
            }
            Draft::Unnamed(file) => name(&file, &self.target)?,
        }
        File::open(directory_of(&self.target))?.sync_all()
    }
}

/// Links an unnamed file beside `target` and renames it, since a link does not replace a file that is there.
fn name(file: &File, target: &Path) -> io::Result<()> {
    let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    let beside = target.with_file_name(hidden_name(target, &format!(".{}.part", std::process::id())));
    rustix::fs::linkat(CWD, descriptor, CWD, &beside, AtFlags::SYMLINK_FOLLOW)?;
    std::fs::rename(&beside, target).inspect_err(|_| {
        // The rename's error is the one to tell; a file that can't be removed either stays.
        let _ = std::fs::remove_file(&beside);
    })
}

fn directory_of(target: &Path) -> &Path {
    match target.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}

fn hidden_name(target: &Path, suffix: &str) -> OsString {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(suffix);
    name
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::Output;

    #[test]
    fn dropped_output_leaves_nothing_and_keeps_what_was_there() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("file");
        fs::write(&target, b"before").unwrap();
        Output::create(&target, 3).unwrap().write_at(b"abc", 0).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"before");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn finished_output_replaces_what_was_there_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("file");
        fs::write(&target, b"before").unwrap();
        let output = Output::create(&target, 6).unwrap();
        output.write_at(b"def", 3).unwrap();
        output.write_at(b"abc", 0).unwrap();
        output.finish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"abcdef");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn directory_that_is_missing_or_target_that_is_one_is_an_error_at_once() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Output::create(&directory.path().join("no/file"), 1).is_err());
        assert!(Output::create(directory.path(), 1).is_err());
    }
}
