//! The store in a folder.

use std::{fs, path::Path, process::Command, time::Duration};

use tensorwire_collective::store::{FileStore, Store, StoreError};
use tensorwire_verbs_reactor::timeout;

use super::{LONG, SHORT, keys, runtime, value};

/// The variable with the folder that a process of these tests shares.
const FOLDER: &str = "TENSORWIRE_TEST_STORE_FOLDER";

const ADDED_EACH: usize = 100;

fn open(folder: &Path) -> FileStore {
    FileStore::open(folder, LONG, runtime()).unwrap()
}

/// The files in `folder` that are not of keys.
fn hidden(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

fn detail(error: &StoreError) -> &str {
    let StoreError::Unreachable { detail, .. } = error else { panic!("{error}") };
    detail
}

/// The work of each of two processes.
async fn count_and_race(store: &FileStore) {
    for _ in 0..ADDED_EACH {
        store.add("count", 1).await.unwrap();
    }
    for race in 0..20 {
        let own = std::process::id().to_string();
        let there = store.compare_set(&format!("race/{race}"), None, own.as_bytes()).await.unwrap().unwrap();
        if there == own.as_bytes() {
            store.add("won", 1).await.unwrap();
        }
    }
}

#[tokio::test]
#[ignore = "another test runs it in a process of its own"]
async fn in_another_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let store = open(Path::new(&folder));
    store.set("ready", b"").await.unwrap();
    store.wait(&keys(["go"]), LONG).await.unwrap();
    count_and_race(&store).await;
    store.set("done", b"").await.unwrap();
}

#[tokio::test]
async fn two_processes_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::file::in_another_process", "--ignored"])
        .env(FOLDER, folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    store.wait(&keys(["ready"]), LONG).await.unwrap();
    store.set("go", b"").await.unwrap();
    count_and_race(&store).await;
    store.wait(&keys(["done"]), LONG).await.unwrap();
    assert!(other.wait().unwrap().success());
    assert_eq!(value(&store, "count").await.unwrap(), (2 * ADDED_EACH).to_string().as_bytes());
    assert_eq!(value(&store, "won").await.unwrap(), b"20", "each race has one winner");
    assert_eq!(hidden(folder.path()), [""; 0], "nothing is left behind");
}

#[tokio::test]
async fn a_lock_that_stays_is_named_with_its_owner_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::open(folder.path(), SHORT, runtime()).unwrap();
    let lock = folder.path().canonicalize().unwrap().join(".lock-a%2fb");
    fs::write(&lock, "process 7 on node3, writer 1, lock 0").unwrap();
    for error in [store.set("a/b", b"").await.unwrap_err(), store.add("a/b", 1).await.unwrap_err()] {
        let text = detail(&error);
        for part in ["`a/b`", lock.to_str().unwrap(), "process 7 on node3", "since", "remove the file"] {
            assert!(text.contains(part), "{part}: {error}");
        }
    }
    // Other keys are free, and reads need no lock.
    store.set("b", b"1").await.unwrap();
    assert_eq!(value(&store, "a/b").await, None);
    fs::remove_file(&lock).unwrap();
    store.set("a/b", b"").await.unwrap();
    assert_eq!(hidden(folder.path()), [""; 0]);
}

#[tokio::test]
async fn a_write_goes_on_when_the_lock_is_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let lock = folder.path().join(".lock-a");
    fs::write(&lock, "another").unwrap();
    let mut write = store.set("a", b"1");
    assert!(timeout(&*runtime(), SHORT, &mut write).await.is_err());
    fs::remove_file(&lock).unwrap();
    write.await.unwrap();
}

#[tokio::test]
async fn what_is_no_record_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    for content in [&b""[..], b"TWR1\x01\0\0\0\x05\0\0\0a12", b"something else altogether"] {
        fs::write(folder.path().join("a"), content).unwrap();
        let error = store.get(&keys(["a"])).await.unwrap_err();
        assert!(
            error.to_string().contains(folder.path().canonicalize().unwrap().to_str().unwrap()),
            "{error}"
        );
    }
    store.set("a", b"1").await.unwrap();
    assert_eq!(value(&store, "a").await.unwrap(), b"1");
}

#[tokio::test]
async fn a_folder_is_made_and_keeps_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("job/1");
    open(&below).set("a", b"1").await.unwrap();
    assert_eq!(value(&open(&below), "a").await.unwrap(), b"1");
    let error = FileStore::open(&below.join("a"), LONG, runtime()).unwrap_err();
    assert!(detail(&error).contains("give a folder"), "{error}");
}

#[tokio::test]
async fn a_missing_folder_fails_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    drop(folder);
    assert!(detail(&store.get(&keys(["a"])).await.unwrap_err()).contains("check the folder"));
    assert!(detail(&store.set("a", b"").await.unwrap_err()).contains("check the folder"));
    assert!(detail(&store.wait(&keys(["a"]), Duration::MAX).await.unwrap_err()).contains("check the folder"));
}
