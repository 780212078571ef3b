//! Closing, dropping, and peers that die.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use super::{super::within, GrpcPlane, assert_works, bounded, config, connect, connect_past_the_dead, plane};
use crate::control::{ControlError, ControlPlane};

/// Environment variable of the child process: its part.
const PART: &str = "TENSORWIRE_TEST_PART";
/// Environment variable of the child process: the address to dial.
const ADDRESS: &str = "TENSORWIRE_TEST_ADDRESS";

/// A process that runs this test binary in another part. Dropping this kills it.
pub(super) struct Part(pub(super) Child);

impl Part {
    /// Starts it with a limit of open files, and waits until it prints a line.
    pub(super) fn start(part: &str, address: &str, files: u32) -> (Self, String) {
        let mut child = Command::new("sh")
            .args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "control::grpc::tests::life::part", "--ignored", "--nocapture"])
            .env(PART, part)
            .env(ADDRESS, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let word = lines.map(Result::unwrap).find_map(|line| Some(line.split_once("SAYS ")?.1.to_owned()));
        (Self(child), word.expect("the child process ended without a word"))
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.0.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The code of the child processes. Not a test: it runs only as a child.
#[test]
#[ignore = "the child process of other tests"]
fn part() {
    let Ok(part) = std::env::var(PART) else { return };
    let address = std::env::var(ADDRESS).unwrap();
    bounded(move || async move {
        match part.as_str() {
            "dial" => {
                let plane = plane();
                let _session = plane.dial(&address).await.unwrap();
                println!("SAYS dialled");
                wait_for_the_parent();
            }
            "accept" => {
                let plane = plane();
                println!("SAYS {}", plane.local_address());
                let _session = plane.accept().await.unwrap();
                wait_for_the_parent();
            }
            "half-open" => {
                let dials: Vec<_> =
                    (0..1000).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
                println!("SAYS {}", dials.len());
                wait_for_the_parent();
            }
            other => panic!("no part {other}"),
        }
    });
}

fn wait_for_the_parent() {
    let _ = std::io::stdin().lines().next();
}

#[test]
fn d_control_peer_sigkill_is_noticed_at_once_by_the_acceptor() {
    bounded(|| async {
        let plane = plane();
        let (mut child, _) = Part::start("dial", &plane.local_address(), 1024);
        let mut session = plane.accept().await.unwrap();
        child.0.kill().unwrap();
        let noticed = within(Duration::from_secs(3), session.receiver.recv()).await;
        let error = noticed.expect("not noticed in time").unwrap_err();
        assert!(matches!(error, ControlError::Lost { .. }), "{error}");
        let error = session.sender.send(b"anyone?".to_vec()).await.unwrap_err();
        assert!(matches!(error, ControlError::Lost { .. }), "{error}");
    });
}

#[test]
fn d_control_peer_sigkill_is_noticed_at_once_by_the_dialler() {
    bounded(|| async {
        let plane = plane();
        let (mut child, address) = Part::start("accept", "", 1024);
        let mut session = plane.dial(&address).await.unwrap();
        child.0.kill().unwrap();
        let noticed = within(Duration::from_secs(3), session.receiver.recv()).await;
        let error = noticed.expect("not noticed in time").unwrap_err();
        assert!(matches!(error, ControlError::Lost { .. }), "{error}");
        child.0.wait().unwrap();
        let error = plane.dial(&address).await.unwrap_err();
        assert!(error.to_string().contains("is the worker running"), "{error}");
    });
}

#[test]
fn d_control_peer_sigstop_is_noticed_by_keepalive() {
    bounded(|| async {
        let short = config().keepalive(Duration::from_millis(300), Duration::from_millis(700));
        let plane = GrpcPlane::bind(short).unwrap();
        let (dialler, _) = Part::start("dial", &plane.local_address(), 1024);
        let (acceptor, address) = Part::start("accept", "", 1024);
        let mut accepted = plane.accept().await.unwrap();
        let mut dialled = plane.dial(&address).await.unwrap();
        for child in [&dialler, &acceptor] {
            child.signal("-STOP");
        }
        for session in [&mut accepted, &mut dialled] {
            let error = session.receiver.recv().await.unwrap_err();
            assert!(matches!(error, ControlError::Lost { .. }), "{error}");
        }
    });
}

#[test]
fn blocked_user_code_is_not_taken_for_dead() {
    bounded(|| async {
        let short = config().keepalive(Duration::from_millis(200), Duration::from_millis(1500));
        let (a, b) = (GrpcPlane::bind(short.clone()).unwrap(), GrpcPlane::bind(short).unwrap());
        let (mut one, mut other) = connect(&a, &b).await;
        // The user code of both sides blocks its runtime for several keepalive times.
        std::thread::sleep(Duration::from_millis(2500));
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn close_ends_everything_and_says_goodbye() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (mut one, mut other) = connect(&a, &b).await;
        let (mut two, mut second) = connect(&b, &a).await;
        let name = format!("tw-ctl-{}", a.local_address().rsplit(':').next().unwrap());
        assert!(threads().contains(&name));
        one.sender.send(b"last words".to_vec()).await.unwrap();
        second.sender.send(b"last words".to_vec()).await.unwrap();

        let waiting = a.accept();
        let (accepted, ()) = futures::future::join(waiting, a.close()).await;
        assert!(matches!(accepted, Err(ControlError::Closed)));
        a.close().await;
        assert!(!threads().contains(&name), "the plane's thread is still there");

        for session in [&mut other, &mut two] {
            assert_eq!(session.receiver.recv().await.unwrap().as_deref(), Some(&b"last words"[..]));
            assert_eq!(session.receiver.recv().await.unwrap(), None);
        }
        for session in [&mut one, &mut second] {
            assert!(matches!(session.receiver.recv().await, Err(ControlError::Closed)));
            assert!(matches!(session.sender.send(vec![1]).await, Err(ControlError::Closed)));
        }
        assert!(matches!(a.accept().await, Err(ControlError::Closed)));
        assert!(matches!(a.dial(&b.local_address()).await, Err(ControlError::Closed)));
        let refused = b.dial(&a.local_address()).await.unwrap_err();
        assert!(refused.to_string().contains("refused"), "{refused}");
    });
}

#[test]
fn dropping_a_plane_ends_its_thread_and_sessions() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (mut one, mut other) = connect(&a, &b).await;
        let thread = a.thread.lock().unwrap().take().unwrap();
        drop(a);
        thread.join().unwrap();
        assert!(matches!(one.receiver.recv().await, Err(ControlError::Closed)));
        assert_eq!(other.receiver.recv().await.unwrap(), None);
    });
}

#[test]
fn an_abandoned_dial_leaves_nothing_behind() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        // Polled once, so that it is under way.
        let mut dial = a.dial(&b.local_address());
        let _ = futures::poll!(&mut dial);
        drop(dial);
        let (mut one, other) = connect_past_the_dead(&a, &b).await;
        other.sender.send(b"back".to_vec()).await.unwrap();
        assert_eq!(one.receiver.recv().await.unwrap().as_deref(), Some(&b"back"[..]));
        drop((one, other));
        a.close().await;
    });
}

fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}
