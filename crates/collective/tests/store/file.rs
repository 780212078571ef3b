//! The store in a folder.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::Path,
    process::Command,
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat},
    process::geteuid,
};
use tensorwire_collective::store::{FileStore, Store, StoreError};
use tensorwire_fabric::timeout;

use super::{LONG, SHORT, keys, runtime, value};

/// The variable with the folder that a process of these tests shares.
const FOLDER: &str = "TENSORWIRE_TEST_STORE_FOLDER";

const ADDED_EACH: usize = 100;

/// The limit of stores whose locks are not released. Enough for the file system of a busy machine.
const LIMIT: Duration = Duration::from_secs(2);

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
    let store = FileStore::open(folder.path(), LIMIT, runtime()).unwrap();
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

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

fn allow(folder: &Path, mode: u32) {
    fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn s5_a_folder_into_which_others_may_write_is_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    store.set("a", b"1").await.unwrap();
    let path = folder.path().canonicalize().unwrap();
    for shared in [0o770, 0o707, 0o777, 0o1777] {
        allow(&path, shared);
        // Also one that was opened before.
        let errors = [
            FileStore::open(&path, LONG, runtime()).unwrap_err(),
            store.get(&keys(["a"])).await.unwrap_err(),
            store.wait(&keys(["a"]), LONG).await.unwrap_err(),
            store.set("a", b"2").await.unwrap_err(),
            store.delete("a").await.unwrap_err(),
        ];
        let (chmod, job) = (format!("`chmod go-w {}`", path.display()), format!("{}/job", path.display()));
        for error in errors {
            let text = detail(&error);
            for part in ["other users may write", &format!("{shared:o}"), &job] {
                assert!(text.contains(part), "{part}: {error}");
            }
            // Nobody should change `/tmp`.
            assert_eq!(text.contains(&chmod), shared != 0o1777, "{error}");
        }
    }
    allow(&path, 0o755);
    assert_eq!(value(&store, "a").await.unwrap(), b"1");
}

#[tokio::test]
async fn s5_a_folder_of_another_user_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    // Only root can give a folder away.
    let (path, part) = if geteuid().is_root() {
        chown(folder.path(), Some(12_345), None).unwrap();
        (folder.path(), "is of user 12345, and this process is user 0")
    } else {
        (Path::new("/usr"), "cannot open it")
    };
    let error = FileStore::open(path, LONG, runtime()).unwrap_err();
    assert!(detail(&error).contains(part), "{error}");
    assert_eq!(hidden(path), [""; 0], "nothing is left behind");
}

#[tokio::test]
async fn s5_what_the_store_makes_is_for_its_user_alone() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("job/1");
    open(&below).set("a", b"1").await.unwrap();
    assert_eq!([mode(&below), mode(below.parent().unwrap())], [0o700; 2]);
    assert_eq!(mode(&below.join("a")), 0o600);
}

#[tokio::test]
async fn s5_links_under_the_names_of_keys_and_locks_are_not_followed() {
    let (folder, victims) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = FileStore::open(folder.path(), LIMIT, runtime()).unwrap();
    let victim = victims.path().join("victim");
    fs::write(&victim, "secret").unwrap();
    for target in [&*victim, Path::new("/dev/zero"), Path::new("missing")] {
        symlink(target, folder.path().join("a")).unwrap();
        for error in [
            store.get(&keys(["a"])).await.unwrap_err(),
            store.wait(&keys(["a"]), LONG).await.unwrap_err(),
            store.add("a", 1).await.unwrap_err(),
            store.compare_set("a", None, b"1").await.unwrap_err(),
        ] {
            assert!(detail(&error).contains("/a: it is a link: remove it"), "{error}");
        }
        store.set("a", b"1").await.unwrap();
        assert_eq!(value(&store, "a").await.unwrap(), b"1");
        store.delete("a").await.unwrap();

        symlink(target, folder.path().join(".lock-a")).unwrap();
        let error = store.set("a", b"1").await.unwrap_err();
        assert!(detail(&error).contains("it is a link"), "{error}");
        fs::remove_file(folder.path().join(".lock-a")).unwrap();
    }
    assert_eq!(fs::read(&victim).unwrap(), b"secret");
    assert_eq!(fs::read_dir(victims.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn s5_files_that_block_or_do_not_end_are_named_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::open(folder.path(), LONG, runtime()).unwrap();
    let [pipe, sparse, lock] = ["pipe", "sparse", ".lock-b"].map(|name| folder.path().join(name));
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    for (key, part) in [("pipe", "not a regular file"), ("sparse", "longer than any record")] {
        for read in [store.get(&keys([key])).await.map(drop), store.wait(&keys([key]), LONG).await.map(drop)]
        {
            let error = read.unwrap_err();
            assert!(detail(&error).contains(&format!("/{key}: it is {part}: remove it")), "{error}");
        }
        store.set(key, b"1").await.unwrap();
        assert_eq!(value(&store, key).await.unwrap(), b"1");
    }
    mknodat(CWD, &lock, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let store = FileStore::open(folder.path(), LIMIT, runtime()).unwrap();
    let error = store.set("b", b"1").await.unwrap_err();
    assert!(detail(&error).contains(".lock-b") && detail(&error).contains("not a regular file"), "{error}");
}
