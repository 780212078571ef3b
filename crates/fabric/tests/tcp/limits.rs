//! Limits of the process, reached while connecting. In a process of its own, whose limit is low.

use std::{fs::File, process::Command};

use tensorwire_fabric::{ConnectParams, FabricError, Role};

use super::raw::Local;
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, STEP_LIMIT},
};

/// Checks that the error names the limit and how to raise it.
fn assert_names_the_limit(error: &FabricError) {
    let text = error.to_string();
    assert!(text.contains("RLIMIT_NOFILE") && text.contains("ulimit -n"), "unhelpful: {text}");
}

#[test]
fn the_limit_on_descriptors_is_named_with_its_remedy() {
    let child = Command::new("sh")
        .args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["tcp::limits::child_that_has_no_descriptors_left", "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{output}\n{}", String::from_utf8_lossy(&child.stderr));
    assert!(output.contains("1 passed"), "{output}");
}

#[test]
#[ignore = "the other process of the_limit_on_descriptors_is_named_with_its_remedy"]
fn child_that_has_no_descriptors_left() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let (left, right) = (Local::new(runtime.clone()), Local::new(runtime.clone()));
        let unprepared = Local::new(runtime);
        let (dialer, acceptor) = (left.prepare(), right.prepare());
        let to = acceptor.connection_data();
        let files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        assert!((1..64).contains(&files.len()), "{} files were opened", files.len());
        assert_names_the_limit(&unprepared.domain.prepare(DEPTHS).unwrap_err());
        let params = |peer| ConnectParams { peer, role: Role::Dialer, peer_address: None, limit: STEP_LIMIT };
        let dialed = left.step("the dial", dialer.connect(params(to.clone()))).await;
        assert_names_the_limit(&dialed.unwrap_err());
        // With free descriptors again, the same process connects.
        drop(files);
        let (dialer, acceptor) = (left.prepare(), right.prepare());
        let accept = ConnectParams { role: Role::Acceptor, ..params(dialer.connection_data()) };
        let dial = params(acceptor.connection_data());
        let both = futures::future::join(dialer.connect(dial), acceptor.connect(accept));
        let (dialed, accepted) = left.step("connecting", both).await;
        dialed.unwrap();
        accepted.unwrap();
    });
}
