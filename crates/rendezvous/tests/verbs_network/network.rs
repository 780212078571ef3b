//! The veth pair that `scripts/rxe-vm/net` makes: what it loses and delays, and whether it is up.

use std::{fs, process::Command, thread, time::Duration};

use tokio::sync::oneshot;

use crate::{own_network::need_own_network, rdma::patient};

/// Its two ends.
const ENDS: [&str; 2] = ["ve1", "ve2"];

/// The states of the ports at these ends.
const PORTS: [&str; 2] =
    ["/sys/class/infiniband/rxe1/ports/1/state", "/sys/class/infiniband/rxe2/ports/1/state"];

/// A port's state follows that of its link up to a second later.
fn becomes_active(port: &str) {
    let (limit, pause) = (patient(Duration::from_secs(10)), Duration::from_millis(10));
    let is_active = || fs::read_to_string(port).unwrap().contains("ACTIVE");
    let mut waited = Duration::ZERO;
    while !is_active() {
        assert!(waited < limit, "{port} is not active {waited:?} after its link came up");
        thread::sleep(pause);
        waited += pause;
    }
}

/// Runs a command that must succeed; gives what it printed.
fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{line}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Both directions of the pair treat packets badly, until this is dropped.
#[derive(Debug)]
pub(crate) struct Netem;

impl Netem {
    /// `how` as `tc qdisc … netem` has it.
    pub(crate) fn on(how: &str) -> Self {
        need_own_network();
        for end in ENDS {
            run(&format!("tc qdisc replace dev {end} root netem {how}"));
        }
        Self
    }

    /// Packets that passed and that were thrown away, in both directions.
    pub(crate) fn packets(&self) -> (u64, u64) {
        let mut sum = (0, 0);
        for end in ENDS {
            let text = run(&format!("tc -s qdisc show dev {end}"));
            let words: Vec<&str> = text.split([' ', ',', '(']).filter(|word| !word.is_empty()).collect();
            let before = |what: &str| words.iter().position(|word| *word == what).map(|at| words[at - 1]);
            let after = |what: &str| words.iter().position(|word| *word == what).map(|at| words[at + 1]);
            sum.0 += before("pkt").and_then(|number| number.parse::<u64>().ok()).unwrap();
            sum.1 += after("dropped").and_then(|number| number.parse::<u64>().ok()).unwrap();
        }
        sum
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        for end in ENDS {
            let _ = Command::new("tc").args(["qdisc", "del", "dev", end, "root"]).output();
        }
    }
}

/// The left end of the pair is down, and with it the link; up again when this is dropped.
#[derive(Debug)]
pub(crate) struct LinkDown;

impl LinkDown {
    /// Takes it down, while other tasks go on.
    pub(crate) async fn begin() -> Self {
        need_own_network();
        let (done, is_down) = oneshot::channel();
        thread::spawn(move || {
            run("ip link set ve1 down");
            let _ = done.send(());
        });
        is_down.await.expect("the link is still up");
        Self
    }
}

impl Drop for LinkDown {
    /// An interface that goes down forgets its neighbours, and the routes through it.
    fn drop(&mut self) {
        run("ip link set ve1 up");
        for (own, peer) in [(1, 2), (2, 1)] {
            let address = fs::read_to_string(format!("/sys/class/net/ve{peer}/address")).unwrap();
            let address = address.trim();
            run(&format!("ip neighbour replace 10.9.0.{peer} lladdr {address} dev ve{own} nud permanent"));
            run(&format!("ip route replace 10.9.0.{peer} dev ve{own} src 10.9.0.{own} table 10{own}"));
        }
        PORTS.iter().for_each(|port| becomes_active(port));
    }
}
