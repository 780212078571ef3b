//! The target of a pull that may have several files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{Output, OutputError, Writing};
use crate::layout::LaidOutFile;

/// A file or a stream, or files in a folder. Dropping it before [`finish`](Self::finish) leaves the folder as it was; a stream keeps
/// the bytes written until then.
#[derive(Debug)]
pub(crate) struct Target {
    path: PathBuf,
    writing: Writing,
    place: Place,
}

#[derive(Debug)]
enum Place {
    One(Box<Output>),
    Folder(Folder),
}

/// A folder.
#[derive(Debug, Default)]
struct Folder {
    /// Made for this target, and not in use yet.
    made: Option<PathBuf>,
    /// In the order of the layout; `None` for those that are not written.
    files: Vec<Option<Output>>,
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.files.clear();
        if let Some(made) = self.made.take() {
            // Only an empty folder can be removed.
            let _ = fs::remove_dir(made);
        }
    }
}

impl Target {
    /// Opens what `path` names: a folder, if there is one or the name ends with `/`; otherwise as [`Output::open`].
    pub(crate) fn open(path: &Path, writing: Writing) -> Result<Self, OutputError> {
        let is_folder = match fs::metadata(path) {
            Ok(metadata) => metadata.is_dir(),
            Err(_) => path.as_os_str().as_encoded_bytes().ends_with(b"/"),
        };
        let place = match is_folder {
            true => Place::Folder(Folder::default()),
            false => Place::One(Box::new(Output::open(path, writing)?)),
        };
        Ok(Self { path: path.to_owned(), writing, place })
    }

    /// Whether written bytes cannot be taken back.
    pub(crate) fn is_stream(&self) -> bool {
        matches!(&self.place, Place::One(output) if output.is_stream())
    }

    /// The path that the user gave.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Allocates the bytes of `files` on the disk, so that space cannot run out later, and writes the first of them. Files for whose
    /// index `is_written` does not hold are left as they are.
    pub(crate) fn begin(
        &mut self,
        files: &[LaidOutFile],
        is_written: impl Fn(usize) -> bool,
    ) -> Result<(), OutputError> {
        let path = || self.path.clone();
        match (&mut self.place, files) {
            (Place::One(output), [LaidOutFile { name: None, prefix, bytes }]) => {
                return output.begin(prefix, *bytes);
            }
            (Place::Folder(_), [LaidOutFile { name: None, .. }]) => {
                let (kind, remedy) = ("directory", "name a file in it");
                return Err(OutputError::Kind { path: path(), kind, remedy });
            }
            (Place::One(output), _) if output.is_new() => self.place = Place::Folder(Folder::default()),
            (Place::One(_), _) => return Err(OutputError::NoFolder { path: path() }),
            (Place::Folder(_), _) => {}
        }
        let Place::Folder(folder) = &mut self.place else { return Ok(()) };
        match fs::create_dir(&self.path) {
            Ok(()) => folder.made = Some(self.path.clone()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(OutputError::Io { path: self.path.clone(), source }),
        }
        folder.files.clear();
        for (place, file) in files.iter().enumerate() {
            let name = file.name.as_deref().filter(|_| is_written(place));
            let output = name.map(|name| {
                let mut output = in_folder(&self.path.join(name), self.writing)?;
                output.begin(&file.prefix, file.bytes)?;
                Ok(output)
            });
            folder.files.push(output.transpose()?);
        }
        Ok(())
    }

    /// Writes `bytes` at `place` of a file, unless the file is left as it is. A stream must be written in order.
    pub(crate) fn write_at(&mut self, file: usize, bytes: &[u8], place: u64) -> Result<(), OutputError> {
        let output = match &mut self.place {
            Place::One(output) => Some(&mut **output),
            Place::Folder(folder) => folder.files.get_mut(file).and_then(Option::as_mut),
        };
        output.map_or(Ok(()), |output| output.write_at(bytes, place))
    }

    /// Whether an earlier pull has left bytes in it.
    pub(crate) fn had_content(&self) -> bool {
        match &self.place {
            Place::One(output) => output.had_content(),
            Place::Folder(folder) => folder.files.iter().flatten().any(Output::had_content),
        }
    }

    /// Reads bytes of a file that an earlier pull has left.
    pub(crate) fn read_at(&self, file: usize, bytes: &mut [u8], place: u64) -> io::Result<()> {
        let output = match &self.place {
            Place::One(output) => Some(&**output),
            Place::Folder(folder) => folder.files.get(file).and_then(Option::as_ref),
        };
        output.map_or(Err(io::ErrorKind::NotFound.into()), |output| output.read_at(bytes, place))
    }

    /// Gives the files their names, once the bytes of all are on the disk.
    pub(crate) fn finish(self) -> Result<(), OutputError> {
        match self.place {
            Place::One(output) => output.finish(),
            Place::Folder(mut folder) => {
                let files = std::mem::take(&mut folder.files);
                files.iter().flatten().try_for_each(Output::sync)?;
                files.into_iter().flatten().try_for_each(Output::finish)
            }
        }
    }
}

/// Opens a file of a folder. Nothing else may have its name, because opening a FIFO waits for its reader.
fn in_folder(path: &Path, writing: Writing) -> Result<Output, OutputError> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            let (kind, remedy) = ("name of something that is no file", "remove it, or name another folder");
            Err(OutputError::Kind { path: path.to_owned(), kind, remedy })
        }
        _ => Output::open(path, writing),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Target, Writing};
    use crate::layout::LaidOutFile;

    fn files() -> Vec<LaidOutFile> {
        let file = |name: &str| LaidOutFile { name: Some(name.to_owned()), prefix: b"ab".to_vec(), bytes: 3 };
        ["one", "two"].map(file).to_vec()
    }

    fn names(folder: &std::path::Path) -> usize {
        fs::read_dir(folder).map_or(0, Iterator::count)
    }

    #[test]
    fn all_files_appear_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        for path in [directory.path().join("new"), directory.path().join("other/")] {
            let mut target = Target::open(&path, Writing::default()).unwrap();
            target.begin(&files(), |_| true).unwrap();
            target.write_at(0, b"c", 2).unwrap();
            target.write_at(1, b"d", 2).unwrap();
            assert_eq!(names(&path), 0);
            target.finish().unwrap();
            assert_eq!(fs::read(path.join("one")).unwrap(), b"abc");
            assert_eq!(fs::read(path.join("two")).unwrap(), b"abd");
        }
    }

    #[test]
    fn a_file_that_is_not_written_stays() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("one"), b"before").unwrap();
        let mut target = Target::open(directory.path(), Writing::default()).unwrap();
        target.begin(&files(), |file| file == 1).unwrap();
        target.write_at(0, b"c", 2).unwrap();
        target.write_at(1, b"d", 2).unwrap();
        target.finish().unwrap();
        assert_eq!(fs::read(directory.path().join("one")).unwrap(), b"before");
        assert_eq!(fs::read(directory.path().join("two")).unwrap(), b"abd");
    }

    #[test]
    fn a_folder_that_was_made_goes_when_nothing_is_finished() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new");
        let mut target = Target::open(&path, Writing::default()).unwrap();
        target.begin(&files(), |_| true).unwrap();
        drop(target);
        assert_eq!(names(directory.path()), 0);
    }

    #[test]
    fn a_folder_takes_no_place_of_a_file_and_a_file_none_of_a_folder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one");
        fs::write(&path, b"before").unwrap();
        let error = Target::open(&path, Writing::default())
            .unwrap()
            .begin(&files(), |_| true)
            .unwrap_err()
            .to_string();
        assert!(error.contains("name a folder"), "{error}");
        let file = LaidOutFile { name: None, prefix: Vec::new(), bytes: 0 };
        let error = Target::open(directory.path(), Writing::default()).unwrap().begin(&[file], |_| true);
        assert!(error.unwrap_err().to_string().contains("it is a directory: name a file in it"));
        let error = Target::open(directory.path(), Writing { no_clobber: true, resume: false })
            .unwrap()
            .begin(&files(), |_| true);
        assert!(error.unwrap_err().to_string().contains("--no-clobber"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = Target::open(directory.path(), Writing::default()).unwrap().begin(&files(), |_| true);
        assert!(error.unwrap_err().to_string().contains("no file"));
    }
}
