//! Tests of the targets of a pull: files, links, streams, and names that cannot be written.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use super::{Output, OutputError, Writing};

const NO_CLOBBER: Writing = Writing { no_clobber: true, resume: false };

fn open(path: &Path) -> Result<Output, OutputError> {
    Output::open(path, Writing::default())
}

fn names(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

#[test]
fn dropped_output_leaves_nothing_and_keeps_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("file");
    fs::write(&target, b"before").unwrap();
    open(&target).unwrap().begin(b"abc", 3).unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"before");
    assert_eq!(names(directory.path()), 1);
}

#[test]
fn finished_output_replaces_what_was_there_and_leaves_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    // A name of the maximum length.
    let target = directory.path().join("f".repeat(255));
    fs::write(&target, b"before").unwrap();
    let mut output = open(&target).unwrap();
    output.begin(b"ab", 6).unwrap();
    output.write_at(b"def", 3).unwrap();
    output.write_at(b"c", 2).unwrap();
    output.finish().unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"abcdef");
    assert_eq!(names(directory.path()), 1);
}

#[test]
fn directory_that_is_missing_or_target_that_is_one_is_an_error_at_once() {
    let directory = tempfile::tempdir().unwrap();
    assert!(open(&directory.path().join("no/file")).is_err());
    let error = open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("is a directory: name a file in it"), "{error}");
}

#[test]
fn a_path_that_names_no_file_is_an_error_at_once() {
    let directory = tempfile::tempdir().unwrap();
    symlink("missing/", directory.path().join("link")).unwrap();
    let missing = ["missing/", "missing/.", "missing/..", "link"];
    for path in missing.map(|name| directory.path().join(name)).iter().chain([&"".into()]) {
        let error = open(path).unwrap_err();
        assert!(matches!(error, OutputError::NoName { .. }), "{path:?}: {error}");
    }
    let error = open(&directory.path().join("missing/")).unwrap_err().to_string();
    assert!(error.contains("missing/`: it names no file"), "{error}");
    assert_eq!(names(directory.path()), 1);
}

#[test]
fn a_link_stays_and_what_it_leads_to_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (link, further) = (directory.path().join("link"), directory.path().join("further"));
    fs::create_dir(directory.path().join("elsewhere")).unwrap();
    symlink("further", &link).unwrap();
    symlink("elsewhere/file", &further).unwrap();
    // First a new file, then one that replaces it.
    for bytes in [b"abc", b"def"] {
        let mut output = open(&link).unwrap();
        output.begin(bytes, 3).unwrap();
        output.finish().unwrap();
        assert_eq!(fs::read(directory.path().join("elsewhere/file")).unwrap(), bytes);
        assert!(link.is_symlink() && further.is_symlink());
    }
    symlink("circle", directory.path().join("circle")).unwrap();
    assert!(open(&directory.path().join("circle")).is_err());
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("file");
    for mode in [0o600, 0o640, 0o666, 0o444] {
        fs::write(&target, b"before").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(mode)).unwrap();
        let mut output = open(&target).unwrap();
        output.begin(b"abc", 3).unwrap();
        output.finish().unwrap();
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o7777, mode);
        fs::remove_file(&target).unwrap();
    }
}

#[test]
fn nothing_is_replaced_that_must_stay() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("file");
    let mut output = Output::open(&target, NO_CLOBBER).unwrap();
    output.begin(b"abc", 3).unwrap();
    fs::write(&target, b"came meanwhile").unwrap();
    assert!(matches!(output.finish(), Err(OutputError::Exists { .. })));
    assert!(matches!(Output::open(&target, NO_CLOBBER), Err(OutputError::Exists { .. })));
    assert_eq!(fs::read(&target).unwrap(), b"came meanwhile");
    assert_eq!(names(directory.path()), 1);
}

#[test]
fn too_small_a_disk_is_told_with_what_is_needed_and_free() {
    let directory = tempfile::tempdir().unwrap();
    let needed = 1 << 62;
    let error = open(&directory.path().join("file")).unwrap().begin(b"abc", needed).unwrap_err();
    let OutputError::Space { free, .. } = error else { panic!("{error}") };
    assert!(free > 0 && error.to_string().contains(&needed.to_string()), "{error}");
    assert!(error.to_string().contains(&free.to_string()), "{error}");
    assert_eq!(names(directory.path()), 0);
}

#[test]
fn room_on_the_disk_is_taken_before_the_bytes_come() {
    use std::os::unix::fs::MetadataExt;

    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("file");
    let mut output = open(&target).unwrap();
    output.begin(b"abc", 1 << 20).unwrap();
    output.finish().unwrap();
    let blocks = fs::metadata(&target).unwrap().blocks();
    assert!(blocks * 512 >= 1 << 20, "{blocks} blocks");
}
