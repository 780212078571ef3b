//! The plan: files that get mutants, and the tests that run for them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::{Error, at};

/// Files, and the test targets that run for them.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) files: Vec<String>,
    /// As `PACKAGE/lib` or `PACKAGE/TEST`, in the order in which they are run.
    pub(crate) targets: Vec<String>,
}

/// The groups of `plan.txt`, restricted to `files` if there are any.
///
/// # Errors
/// The plan cannot be read, or one of `files` is not in it.
pub(crate) fn read(root: &Path, files: &[String]) -> Result<Vec<Group>, Error> {
    let path = root.join("contrib/mutants/plan.txt");
    let text = fs::read_to_string(&path).map_err(at(&path))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut groups =
        lines.map(|(index, line)| group(root, index + 1, line)).collect::<Result<Vec<_>, _>>()?;
    if let Some(unplanned) = files.iter().find(|file| !groups.iter().any(|group| group.files.contains(file)))
    {
        return Err(Error::Unplanned(unplanned.clone()));
    }
    if !files.is_empty() {
        groups.iter_mut().for_each(|group| group.files.retain(|file| files.contains(file)));
        groups.retain(|group| !group.files.is_empty());
    }
    Ok(groups)
}

fn group(root: &Path, number: usize, line: &str) -> Result<Group, Error> {
    let (paths, targets) = line.split_once(": ").ok_or(Error::Plan(number))?;
    let mut files = Vec::new();
    for path in paths.split_whitespace() {
        if path.ends_with('/') {
            files.extend(sources(root, path)?);
        } else {
            files.push(path.to_owned());
        }
    }
    let targets: Vec<_> = targets.split_whitespace().map(str::to_owned).collect();
    if files.is_empty() || targets.is_empty() || targets.iter().any(|target| !target.contains('/')) {
        return Err(Error::Plan(number));
    }
    Ok(Group { files, targets })
}

/// The sources of a directory, without those of tests.
fn sources(root: &Path, directory: &str) -> Result<Vec<String>, Error> {
    let path = root.join(directory);
    let entries = fs::read_dir(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at(&path))?;
    let names = entries.iter().map(|entry| PathBuf::from(entry.file_name()));
    let is_source =
        |name: &PathBuf| name.extension().is_some_and(|end| end == "rs") && name.as_os_str() != "tests.rs";
    let mut files: Vec<_> =
        names.filter(is_source).map(|name| format!("{directory}{}", name.display())).collect();
    files.sort();
    Ok(files)
}
