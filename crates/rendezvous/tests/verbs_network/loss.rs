//! Packets that are lost, late, out of order or damaged.

use std::time::Duration;

use crate::harness::{bounded, role};
use crate::verbs_network::{
    network::Netem,
    traffic::{Exchange, Traffic, child, name_of},
};

const LIMIT: Duration = Duration::from_secs(60);

/// A network that adapters mend: in each of three exchanges `count` values of `bytes` bytes each way are right, over one connection.
fn only_slower(test: &'static str, how: &'static str, (count, bytes): (u64, usize), loses: bool) {
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(test, runtime).await;
        let netem = Netem::on(how);
        for step in 1..=3 {
            traffic.is_right(Exchange { step, bytes, count }).await;
        }
        let (passed, dropped) = netem.packets();
        assert!(passed > 100 && (dropped > 0) == loses, "{how}: {passed} packets passed, {dropped} did not");
        drop(netem);
        traffic.end().await;
    });
}

/// A network with which an adapter may give up. Then both sides get an error within their deadlines, and go on with
/// another connection; never wrong bytes.
fn right_or_an_error(test: &'static str, how: &'static str, (count, bytes): (u64, usize)) {
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(test, runtime).await;
        let netem = Netem::on(how);
        let typed = ["PeerLost", "DeadlineExceeded", "NoFabric", "Remote"];
        for step in 1..=4 {
            let (here, there) = traffic.exchange(Exchange { step, bytes, count }).await;
            if let Err(error) = here {
                assert!(typed.contains(&name_of(&error)), "{error}");
            }
            let there_is_typed = typed.iter().any(|name| there.starts_with(name));
            assert!(there == "right" || there_is_typed, "{there}");
        }
        assert!(netem.packets().1 > 0);
        drop(netem);
        traffic.is_right(Exchange { step: 10, bytes, count }).await;
        traffic.end().await;
    });
}

macro_rules! over_a_network {
    ($($test:ident: $check:ident($how:literal, $values:expr $(, $loses:literal)?);)*) => {
        $(
            #[test]
            #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
            fn $test() {
                $check(concat!("verbs_network::loss::", stringify!($test)), $how, $values $(, $loses)?);
            }
        )*
    };
}

// A packet of Soft-RoCE has 4 KiB. It takes each loss off the retries that are left, six here, and only an
// acknowledgement gives them back, which a write's last packet asks for. So a write of 32 packets at a loss of 5 % has a
// chance of 0.3 % that seven are lost before, and a test of 24 such writes one of 7 % (5 of 56 runs when measured). With 4
// packets it is 1 in 5 million a write.
over_a_network! {
    d_loss_1_percent_of_packets_lost_only_slows_verbs: only_slower("loss 1%", (8, 128 << 10), true);
    d_loss_5_percent_of_packets_lost_only_slows_verbs: only_slower("loss 5%", (16, 16 << 10), true);
    d_loss_5_percent_within_long_writes_is_right_or_an_error_over_verbs:
        right_or_an_error("loss 5%", (4, 128 << 10));
    d_loss_20_percent_of_packets_lost_is_right_or_an_error_over_verbs:
        right_or_an_error("loss 20%", (2, 32 << 10));
    d_loss_packets_late_by_10_ms_only_slow_verbs: only_slower("delay 10ms", (4, 256 << 10), false);
    d_loss_packets_out_of_order_only_slow_verbs: only_slower("delay 2ms reorder 25% 50%", (4, 64 << 10), false);
    d_loss_damaged_packets_only_slow_verbs: only_slower("corrupt 1%", (4, 128 << 10), false);
}
