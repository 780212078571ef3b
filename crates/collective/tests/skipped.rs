//! Tests that need what is not there, such as a program: they pass, and report that they tested nothing.

use std::{env, fs::File, io::Write, path::PathBuf, thread};

/// The name of a file that gets a line for each skipped test.
const SKIPPED: &str = "TENSORWIRE_TEST_SKIPPED";

/// The path of `program`. If it is not installed, reports that the test of this thread, in the file `file`, is skipped, and what
/// to install.
pub(crate) fn installed(program: &str, package: &str, file: &str) -> Option<PathBuf> {
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file());
    if found.is_none() {
        skip(file, &format!("{program} is not on the PATH: install {package}"));
    }
    found
}

/// Reports that the test of this thread, in the file `file`, is skipped.
pub(crate) fn skip(file: &str, reason: &str) {
    let thread = thread::current();
    let line = format!("SKIPPED: {file} {} {reason}\n", thread.name().unwrap_or("a test"));
    print!("{line}");
    if let Some(path) = env::var_os(SKIPPED) {
        File::options().create(true).append(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
    }
}
