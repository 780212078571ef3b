//! Connections that never become anything: half-open ones, and such that take for ever over each byte.

use std::{future::Future, sync::Arc, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Worker,
    control::{GrpcConfig, GrpcPlane, Secret},
};

use crate::{
    attacker,
    harness::{Other, bounded, role, step},
    stage::{
        HONEST, SECRET, SERVER, builder, fetch, held, one_honest_visit, other_ports, publish,
        raise_descriptor_limit, size, until,
    },
};

/// How much a worker's process may grow under attack, and what stays of it.
const GROWTH_MAX: u64 = 32 << 20;

/// Connections of strangers that may be open: 64, and those that are being accepted.
const STRANGERS_MAX: usize = 64 + 24;

/// A worker that is attacked, with an honest peer that is connected and goes on fetching.
async fn under_attack<F: Future<Output = ()>>(
    server: Worker,
    attack: impl FnOnce(u16) -> (Other, usize),
    outcome: impl FnOnce(Other) -> F,
) {
    raise_descriptor_limit();
    publish(&server, 1);
    let address = server.address().to_owned();
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    // Before another worker of this process listens.
    one_honest_visit(&address, FabricKind::TCP).await;
    until("one port for all that comes in", || other_ports(&address).is_empty()).await;
    let honest = builder(HONEST, FabricKind::TCP).start().await.unwrap();
    step("the first fetch", fetch(&honest, &address, 1)).await.unwrap();
    let before = held();
    let (mut attackers, visits) = attack(port);
    assert_eq!(attackers.hear().await, "flooding");
    for _ in 0..visits {
        step("a fetch under attack", fetch(&honest, &address, 1)).await.unwrap();
        one_honest_visit(&address, FabricKind::TCP).await;
        before.assert_at_most(GROWTH_MAX, STRANGERS_MAX, "under attack");
    }
    outcome(attackers).await;
    before.until_closed("the strangers' end").await;
    before.assert_at_most(GROWTH_MAX, 0, "after the attack");
    step("a fetch after the attack", fetch(&honest, &address, 1)).await.unwrap();
    honest.shutdown().await;
    server.shutdown().await;
}

fn half_open(test: &'static str, what_is_said: &'static str) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(200), |runtime| async move {
            attacker::half_open(&words, runtime).await;
        });
    }
    let _turn = crate::stage::alone();
    let count = size("TENSORWIRE_DIALS", 500);
    bounded(Duration::from_secs(200), |_| async move {
        let server = builder(SERVER, FabricKind::TCP).start().await.unwrap();
        let attack = |port| (Other::start(test, &format!("half-open {port} {count} {what_is_said}")), 3);
        let outcome = |mut attackers: Other| async move {
            println!("half-open: {}", attackers.hear().await);
            attackers.kill();
        };
        under_attack(server, attack, outcome).await;
    });
}

#[test]
fn e_half_open_dials_that_say_nothing_keep_nobody_out() {
    half_open("dials::e_half_open_dials_that_say_nothing_keep_nobody_out", "nothing");
}

#[test]
fn e_half_open_dials_for_data_keep_nobody_out() {
    half_open("dials::e_half_open_dials_for_data_keep_nobody_out", "data");
}

/// A worker whose strangers have one second, so that the test can wait until it is over. Peers have two, and as long as so many
/// strangers wait for their refusal, of which there are 200 a second: an honest one waits behind them.
pub(crate) async fn impatient(strangers: usize) -> Worker {
    let second = Duration::from_secs(1);
    let limit = Duration::from_secs(2) + Duration::from_millis(5) * strangers as u32;
    let config = GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET)).arrival_limit(second);
    let plane = Arc::new(GrpcPlane::bind(config).unwrap());
    let builder = builder(SERVER, FabricKind::TCP).dangerous_control_plane(plane);
    builder.timeout(limit).start().await.unwrap()
}

fn slow_loris(test: &'static str, stage: &'static str) {
    if let Some(words) = role() {
        return bounded(
            Duration::from_secs(100),
            |runtime| async move { attacker::loris(&words, runtime).await },
        );
    }
    let _turn = crate::stage::alone();
    // More than the limit of strangers.
    let count = size("TENSORWIRE_DIALS", 100).min(1000);
    bounded(Duration::from_secs(100), |_| async move {
        let server = impatient(count).await;
        let attack = |port| (Other::start(test, &format!("loris {port} {stage} {count}")), 2);
        // None of them could send all of its bytes.
        let outcome = |mut attackers: Other| async move {
            assert_eq!(attackers.hear().await, format!("cut {count}"));
            attackers.kill();
        };
        under_attack(server, attack, outcome).await;
    });
}

#[test]
fn e_slow_loris_in_the_preface_is_cut() {
    slow_loris("dials::e_slow_loris_in_the_preface_is_cut", "preface");
}

#[test]
fn e_slow_loris_in_the_call_is_cut() {
    slow_loris("dials::e_slow_loris_in_the_call_is_cut", "attach");
}

#[test]
fn e_slow_loris_in_the_handshake_is_cut() {
    slow_loris("dials::e_slow_loris_in_the_handshake_is_cut", "hello");
}

#[test]
fn e_slow_loris_in_the_hello_of_a_data_connection_is_cut() {
    slow_loris("dials::e_slow_loris_in_the_hello_of_a_data_connection_is_cut", "data");
}
