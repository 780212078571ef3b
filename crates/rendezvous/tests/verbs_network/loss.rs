//! Packets that are lost, late, out of order or damaged.

use std::time::Duration;

use crate::{
    harness::{bounded, role},
    network::Netem,
    traffic::{Exchange, Traffic, child, name_of},
};

const LIMIT: Duration = Duration::from_secs(60);

/// A network that adapters mend: all of `exchanges` of `bytes` each way are right, over one connection.
fn only_slower(test: &'static str, how: &'static str, bytes: usize, loses: bool) {
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(test, runtime).await;
        let netem = Netem::on(how);
        for step in 1..=3 {
            traffic.is_right(Exchange { step, bytes, count: 4 }).await;
        }
        let (passed, dropped) = netem.packets();
        assert!(passed > 100 && (dropped > 0) == loses, "{how}: {passed} packets passed, {dropped} did not");
        drop(netem);
        traffic.end().await;
    });
}

macro_rules! only_slower {
    ($($test:ident: $how:literal, $bytes:expr, $loses:literal;)*) => {
        $(
            #[test]
            #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
            fn $test() {
                only_slower(concat!("loss::", stringify!($test)), $how, $bytes, $loses);
            }
        )*
    };
}

only_slower! {
    d_loss_1_percent_of_packets_lost_only_slows_verbs: "loss 1%", 256 << 10, true;
    d_loss_5_percent_of_packets_lost_only_slows_verbs: "loss 5%", 128 << 10, true;
    d_loss_packets_late_by_10_ms_only_slow_verbs: "delay 10ms", 256 << 10, false;
    d_loss_packets_out_of_order_only_slow_verbs: "delay 2ms reorder 25% 50%", 64 << 10, false;
    d_loss_damaged_packets_only_slow_verbs: "corrupt 1%", 128 << 10, false;
}

/// Where a fifth of the packets is lost an adapter may give up. Then both ends get an error within their deadlines, and
/// go on with another connection; never wrong bytes.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_loss_20_percent_of_packets_lost_is_right_or_an_error_over_verbs() {
    const TEST: &str = "loss::d_loss_20_percent_of_packets_lost_is_right_or_an_error_over_verbs";
    if let Some(words) = role() {
        return bounded(LIMIT, |_| child(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut traffic = Traffic::start(TEST, runtime).await;
        let netem = Netem::on("loss 20%");
        let typed = ["PeerLost", "DeadlineExceeded", "NoFabric", "Remote"];
        for step in 1..=4 {
            let (here, there) = traffic.exchange(Exchange { step, bytes: 32 << 10, count: 2 }).await;
            if let Err(error) = here {
                assert!(typed.contains(&name_of(&error)), "{error}");
            }
            let there_is_typed = typed.iter().any(|name| there.starts_with(name));
            assert!(there == "right" || there_is_typed, "{there}");
        }
        assert!(netem.packets().1 > 0);
        drop(netem);
        traffic.is_right(Exchange { step: 10, bytes: 32 << 10, count: 2 }).await;
        traffic.end().await;
    });
}
