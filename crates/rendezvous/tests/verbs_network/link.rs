//! A link that goes down in mid transfer, and a peer that dies in one.

use std::{
    future::Future,
    io::{self, Write},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::join;
use rustix::process::Signal;
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::{PeerLoss, WorkerError};

use crate::verbs_network::{
    network::LinkDown,
    traffic::{CHILD, Exchange, Fabrics, Traffic, child},
};
use crate::{
    harness::{bounded, role, step},
    rdma::patient,
};

const LIMIT: Duration = Duration::from_secs(60);

/// How soon after its port is up again a device is used, with some milliseconds to spare.
const PROBE_INTERVAL: Duration = Duration::from_millis(1100);

/// How soon after its port is up again connections that went over to tcp use a device.
const BACK_WITHIN: Duration = Duration::from_secs(5);

/// An exchange that is never over by itself.
const LONG: Exchange = Exchange { step: 7, bytes: 1 << 20, count: 1 << 40 };

impl Traffic {
    /// Waits until `LONG` is in its middle: some values have come, and more are on their way.
    async fn is_moving(&self) {
        let before = self.info().fabric.bytes_received;
        while self.info().fabric.bytes_received < before + 4 * LONG.bytes as u64 {
            self.runtime.sleep(Duration::from_millis(1)).await;
        }
    }

    /// Begins `LONG` in both processes, does `what` in its middle, and gives how it ended here.
    async fn in_mid_transfer<T>(&mut self, what: impl Future<Output = T>) -> (Result<(), WorkerError>, T) {
        self.child.tell(&format!("{} {} {}", LONG.step, LONG.bytes, LONG.count));
        let traffic = &*self;
        let happening = async {
            traffic.is_moving().await;
            what.await
        };
        step("a transfer that is cut short", join(LONG.run(&traffic.worker, false), happening)).await
    }
}

/// The error of a transfer that was cut short names the peer, the key and the step.
fn is_cut_short(here: Result<(), WorkerError>) -> String {
    let error = here.expect_err("the transfer was over before it was cut short");
    let WorkerError::PeerLost { transfer, transport, loss, .. } = &error else { panic!("{error}") };
    assert_eq!((transfer.peer.as_str(), transfer.step), (CHILD, Some(LONG.step)), "{error}");
    assert!(transfer.key.contains("value"), "{error}");
    // A receive that begins in a step that is broken finds no way to the peer, or another one.
    match loss {
        PeerLoss::StepBroken => assert!(["verbs", "tcp", "no fabric"].contains(transport), "{error}"),
        PeerLoss::Gone | PeerLoss::Unresponsive => assert_eq!(*transport, "verbs", "{error}"),
        _ => panic!("{error}"),
    }
    error.to_string()
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn d_link_down_in_mid_transfer_ends_it_at_both_ends_and_the_next_goes_on_when_it_is_up() {
    const TEST: &str = "verbs_network::link::d_link_down_in_mid_transfer_ends_it_at_both_ends_and_the_next_goes_on_when_it_is_up";
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(TEST, runtime).await;
        let (here, down) = traffic.in_mid_transfer(LinkDown::begin()).await;
        is_cut_short(here);
        let there = traffic.child.hear().await;
        assert!(there.starts_with("PeerLost") && there.contains("of step 7"), "{there}");
        traffic.worker.cleanup(LONG.step);
        drop(down);
        // A worker looks for a device that it lost once a second at most, when somebody connects.
        traffic.runtime.sleep(PROBE_INTERVAL).await;
        // The same workers, over the same devices.
        traffic.is_right(Exchange { step: 8, bytes: 100_000, count: 4 }).await;
        traffic.end().await;
    });
}

/// Descriptors of RDMA devices that this process has open.
fn open_devices() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().map_while(Result::ok);
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("/infiniband/")).count()
}

/// What this process logs, as text.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Gathers from here on.
    fn begin() -> Self {
        let log = Self::default();
        let writer = log.clone();
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
        log
    }

    /// Lines that have all of `parts`.
    fn count(&self, parts: &[&str]) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The port that goes down ends what is under way; the device is closed, so that it can be removed, and what comes next
/// goes over tcp.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn d_port_down_under_load_goes_on_over_tcp_until_it_is_up() {
    const TEST: &str = "verbs_network::link::d_port_down_under_load_goes_on_over_tcp_until_it_is_up";
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    let log = Log::begin();
    bounded(LIMIT, |runtime| async move {
        let others = open_devices();
        let mut traffic = Traffic::start_on(Fabrics::VerbsThenTcp, TEST, runtime.clone()).await;
        assert!(open_devices() > others);
        let (here, down) = traffic.in_mid_transfer(LinkDown::begin()).await;
        is_cut_short(here);
        let there = traffic.child.hear().await;
        assert!(there.starts_with("PeerLost") && there.contains("of step 7"), "{there}");
        traffic.worker.cleanup(LONG.step);
        let closed = async {
            while open_devices() > others {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(&*runtime, patient(Duration::from_secs(2)), closed).await.expect("the device is still open");
        for step in 8..11 {
            traffic.is_right_over(FabricKind::TCP, Exchange { step, bytes: 100_000, count: 4 }).await;
        }
        assert_eq!(log.count(&["an RDMA device is lost"]), 1);
        assert_eq!(log.count(&["connected", "transport=tcp"]), 1);
        drop(down);
        // The port is back, so the workers go back to verbs between two exchanges.
        let moved = async {
            while traffic.info().transport != Some(FabricKind::VERBS) {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(&*runtime, patient(BACK_WITHIN), moved).await.expect("still over tcp");
        for step in 11..14 {
            traffic.is_right_over(FabricKind::VERBS, Exchange { step, bytes: 100_000, count: 4 }).await;
        }
        assert_eq!(log.count(&["moved to a better fabric", "from=tcp", "to=verbs"]), 1);
        traffic.end().await;
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn d_peer_sigkill_in_mid_transfer_over_verbs_names_peer_key_and_step() {
    const TEST: &str =
        "verbs_network::link::d_peer_sigkill_in_mid_transfer_over_verbs_names_peer_key_and_step";
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(TEST, runtime).await;
        let kill = {
            let pid = traffic.child.pid();
            async move { rustix::process::kill_process(pid, Signal::KILL).unwrap() }
        };
        let (here, ()) = traffic.in_mid_transfer(kill).await;
        is_cut_short(here);
        traffic.worker.cleanup(LONG.step);
        traffic.end().await;
    });
}
