//! Which peers get a connection, and what happens to the others.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use futures::future::{join, try_join};
use tensorwire_fabric::{
    ConnectParams, ConnectionData, Domain, Fabric, FabricError, Immediate, PeerViolation, Prepared,
    QueuePair, Role, Runtime,
};
use tensorwire_fabric_tcp::{ListenerStats, TcpConfig, TcpFabric};

use super::{
    CONTROL, HOST,
    raw::{Local, NONCE, RawPeer, WELCOME, accept, address, aside, connection_data, hello},
};
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, STEP_LIMIT, immediate, step, yield_once},
};

/// Waits until `enough` accepts the listeners' counters.
async fn stats(local: &Local, enough: impl Fn(&ListenerStats) -> bool) -> ListenerStats {
    local
        .step("the listener", async {
            while !enough(&local.fabric.listener_stats()) {
                yield_once().await;
            }
        })
        .await;
    local.fabric.listener_stats()
}

fn params(peer: ConnectionData, role: Role, limit: Duration) -> ConnectParams {
    ConnectParams { peer, role, peer_address: Some(CONTROL), limit }
}

async fn connect(runtime: &Arc<dyn Runtime>, dialer: &Local, acceptor: &Local) -> (QueuePair, QueuePair) {
    let (dialing, accepting) = (dialer.prepare(), acceptor.prepare());
    let dial = params(accepting.connection_data(), Role::Dialer, STEP_LIMIT);
    let accept = params(dialing.connection_data(), Role::Acceptor, STEP_LIMIT);
    let both = join(dialing.connect(dial), accepting.connect(accept));
    let (dialed, accepted) = step(runtime, "connecting", both).await;
    (dialed.unwrap().spawn(&**runtime), accepted.unwrap().spawn(&**runtime))
}

async fn assert_connected(local: &Local, from: &QueuePair, to: &QueuePair) {
    local.step("a notification", from.notify(Immediate(3))).await.unwrap();
    let arrival = local.step("an arrival", to.next_arrival()).await.unwrap();
    assert_eq!(immediate(arrival), (3, 0));
}

#[test]
fn a_wrong_token_is_closed_and_counted_and_spoils_nothing() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        for bit in [0, 64, 127] {
            let mut raw = RawPeer::dial(&data);
            let mut wrong = hello(&data, NONCE);
            wrong[18 + bit / 8] ^= 1 << (bit % 8);
            raw.say(&wrong);
            assert!(aside(&local.runtime, move || raw.hear_end()).await.is_empty());
        }
        let mut unknown = RawPeer::dial(&data);
        let mut wrong = hello(&data, NONCE);
        wrong[10] ^= 0x80;
        unknown.say(&wrong);
        assert_eq!(stats(&local, |stats| stats.bad_tokens == 4).await.handed_over, 0);
        let mut right = RawPeer::dial(&data);
        right.say(&hello(&data, NONCE));
        local.step("accepting", accept(prepared)).await.unwrap();
    });
}

#[test]
fn a_token_works_once() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        let mut raw = RawPeer::dial(&data);
        raw.say(&hello(&data, NONCE));
        // Also before the first user was welcomed.
        stats(&local, |stats| stats.handed_over == 1).await;
        let mut replay = RawPeer::dial(&data);
        replay.say(&hello(&data, NONCE));
        assert!(aside(&local.runtime, move || replay.hear_end()).await.is_empty());
        let _queue_pair = local.step("accepting", accept(prepared)).await.unwrap();
        let mut replay = RawPeer::dial(&data);
        replay.say(&hello(&data, NONCE));
        assert!(aside(&local.runtime, move || replay.hear_end()).await.is_empty());
        let stats = stats(&local, |stats| stats.bad_tokens == 2).await;
        assert_eq!((stats.accepted, stats.handed_over), (3, 1));
    });
}

#[test]
fn a_token_ends_with_the_end_that_issued_it() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let _other = local.prepare();
        let prepared = local.prepare();
        let data = prepared.connection_data();
        drop(prepared);
        let mut late = RawPeer::dial(&data);
        late.say(&hello(&data, NONCE));
        assert_eq!(stats(&local, |stats| stats.bad_tokens == 1).await.handed_over, 0);
    });
}

#[test]
fn a_stranger_with_the_token_but_not_the_nonce_is_refused() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        let mut raw = RawPeer::dial(&data);
        raw.say(&hello(&data, [0; 16]));
        let error = local.step("accepting", accept(prepared)).await.unwrap_err();
        assert!(
            matches!(error, FabricError::PeerMisbehaved { violation: PeerViolation::BadToken, .. }),
            "unexpected: {error}"
        );
        assert!(aside(&local.runtime, move || raw.hear_end()).await.is_empty());
    });
}

#[test]
fn e_a_peer_that_encrypts_is_not_met_in_the_clear() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let local = Local::new(runtime);
        for role in [Role::Dialer, Role::Acceptor] {
            let (other, prepared) = (local.prepare(), local.prepare());
            let mut encrypted = other.connection_data();
            encrypted.0.extend([7; 32]);
            let connecting = prepared.connect(params(encrypted, role, STEP_LIMIT));
            let error = local.step("connecting", connecting).await.unwrap_err();
            assert!(matches!(error, FabricError::Connect { step: "agreeing on encryption", .. }), "{error}");
            assert!(error.to_string().contains("TLS identity"), "{error}");
        }
        assert_eq!(local.fabric.listener_stats().accepted, 0);
    });
}

#[test]
fn silent_streams_are_bounded_in_number_and_time() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let limit = Duration::from_millis(300);
        let config = TcpConfig { handshake_limit: limit, pending_handshakes_max: 4, ..TcpConfig::default() };
        let local = Local::with_config(runtime.clone(), config);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        let greeting = hello(&data, [9; 16]);
        // Some send nothing, some send all but the last byte.
        let mut silent: Vec<_> = (0..20).map(|_| RawPeer::dial(&data)).collect();
        for (index, raw) in silent.iter_mut().enumerate() {
            if index % 2 == 0 {
                // The oldest may be closed by now.
                let _ = std::io::Write::write_all(&mut raw.stream, &greeting[..greeting.len() - 1]);
            }
        }
        assert!(stats(&local, |stats| stats.accepted == 20).await.evicted >= 16);
        // A peer that sends its hello at once gets a connection despite them.
        let other = Local::new(runtime.clone());
        let (dialed, accepted) = connect(&runtime, &other, &local).await;
        assert_connected(&local, &dialed, &accepted).await;
        for mut raw in silent {
            assert!(aside(&local.runtime, move || raw.hear_end()).await.is_empty());
        }
        let stats = stats(&local, |stats| stats.evicted + stats.timed_out == 20).await;
        assert_eq!((stats.accepted, stats.handed_over, stats.bad_tokens), (21, 1, 0));
    });
}

/// A connection comes up, or its limit ends it. The shortest do not end the listener, nor the longest the one that waits.
#[test]
fn the_limits_of_a_handshake_are_usable_at_their_ends() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let usual = Local::new(runtime.clone());
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            let config = TcpConfig { handshake_limit: time, ..TcpConfig::default() };
            let listening = Local::with_config(runtime.clone(), config);
            for (acceptor, limit) in [(&listening, STEP_LIMIT), (&usual, time), (&listening, STEP_LIMIT)] {
                let (dialing, accepting) = (usual.prepare(), acceptor.prepare());
                let dial = params(accepting.connection_data(), Role::Dialer, limit);
                let accept = params(dialing.connection_data(), Role::Acceptor, limit);
                let both = try_join(dialing.connect(dial), accepting.connect(accept));
                match step(&runtime, "connecting", both).await {
                    Ok((dialed, accepted)) => {
                        let (dialed, accepted) = (dialed.spawn(&*runtime), accepted.spawn(&*runtime));
                        assert_connected(&usual, &dialed, &accepted).await;
                    }
                    Err(error) => assert!(time < Duration::MAX, "{time:?}: {error}"),
                }
            }
        }
    });
}

#[test]
fn first_bytes_that_are_no_hello_are_closed_and_counted() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        let mut raw = RawPeer::dial(&data);
        raw.say(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something else\r\n\r\n");
        assert!(aside(&local.runtime, move || raw.hear_end()).await.is_empty());
        // Ends in the middle.
        let mut raw = RawPeer::dial(&data);
        raw.say(&hello(&data, NONCE)[..20]);
        drop(raw);
        stats(&local, |stats| stats.malformed == 2).await;
    });
}

#[test]
fn e_streams_that_are_refused_are_let_in_at_a_pace() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime.clone());
        let data = local.prepare().connection_data();
        let began = runtime.now();
        // One after another, 40 more than may come at once; beyond these 200 a second are let in.
        let refused = move || {
            for _ in 0..104 {
                let mut raw = RawPeer::dial(&data);
                raw.say(&hello(&data, NONCE));
                assert!(raw.hear_end().is_empty());
            }
        };
        aside(&local.runtime, refused).await;
        let took = runtime.now() - began;
        assert!(took >= Duration::from_millis(180), "104 were refused within {took:?}");
        assert_eq!(stats(&local, |stats| stats.bad_tokens == 104).await.handed_over, 0);
        let other = Local::new(runtime.clone());
        let (dialed, accepted) = connect(&runtime, &other, &local).await;
        assert_connected(&local, &dialed, &accepted).await;
    });
}

#[test]
fn a_hello_of_another_version_is_answered_with_ours() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let data = prepared.connection_data();
        let mut raw = RawPeer::dial(&data);
        let mut newer = hello(&data, NONCE);
        newer[8] = 2;
        raw.say(&newer);
        assert_eq!(aside(&local.runtime, move || raw.hear_end()).await, WELCOME);
        assert_eq!(stats(&local, |stats| stats.malformed == 1).await.handed_over, 0);
    });
}

/// Dials a listener that is not ours.
async fn dial_stranger(local: &Local, listener: &TcpListener, limit: Duration) -> FabricError {
    let port = listener.local_addr().unwrap().port();
    let params = params(connection_data(port, [7; 16]), Role::Dialer, limit);
    local.step("dialing", local.prepare().connect(params)).await.unwrap_err()
}

#[test]
fn connecting_ends_within_its_limit_if_the_other_end_is_silent() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let limit = Duration::from_millis(100);
        let silent = TcpListener::bind((HOST, 0)).unwrap();
        let error = dial_stranger(&local, &silent, limit).await;
        assert!(matches!(error, FabricError::ConnectTimeout { limit_ms: 100, .. }), "unexpected: {error}");
        let waiting = params(connection_data(1, NONCE), Role::Acceptor, limit);
        let error = local.step("accepting", local.prepare().connect(waiting)).await.unwrap_err();
        assert!(matches!(error, FabricError::ConnectTimeout { limit_ms: 100, .. }), "unexpected: {error}");
    });
}

#[test]
fn a_dialer_tells_a_closed_door_from_a_stranger() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        // Closes at once, as for a used token.
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let closing = listener.try_clone().unwrap();
        let closer = std::thread::spawn(move || drop(closing.accept().unwrap()));
        let error = dial_stranger(&local, &listener, STEP_LIMIT).await;
        assert!(matches!(error, FabricError::Connect { step: "the handshake", .. }), "unexpected: {error}");
        closer.join().unwrap();
        // Answers something else.
        let answering = listener.try_clone().unwrap();
        let stranger = std::thread::spawn(move || {
            let (mut stream, _) = answering.accept().unwrap();
            std::io::Write::write_all(&mut stream, b"220 mail.example ESMTP ready\r\n").unwrap();
            RawPeer { stream }.hear_end();
        });
        let error = dial_stranger(&local, &listener, STEP_LIMIT).await;
        assert!(
            matches!(error, FabricError::PeerMisbehaved { violation: PeerViolation::Malformed, .. }),
            "unexpected: {error}"
        );
        stranger.join().unwrap();
        // No process listens.
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let params = params(connection_data(port, [7; 16]), Role::Dialer, STEP_LIMIT);
        let error = local.step("dialing", local.prepare().connect(params)).await.unwrap_err();
        assert!(matches!(error, FabricError::Connect { step: "connecting", .. }), "unexpected: {error}");
    });
}

#[test]
fn connection_data_that_is_none_is_refused_before_anything_is_dialed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        for data in [vec![], vec![1], vec![1, 0, 9], vec![0xFF; 300]] {
            for role in [Role::Dialer, Role::Acceptor] {
                let params = params(ConnectionData(data.clone()), role, STEP_LIMIT);
                let error = local.step("connecting", local.prepare().connect(params)).await.unwrap_err();
                let refused =
                    matches!(error, FabricError::PeerMisbehaved { .. } | FabricError::Connect { .. });
                assert!(refused, "unexpected: {error}");
            }
        }
    });
}

#[test]
fn a_dialer_that_vanishes_after_its_hello_is_noticed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let prepared = local.prepare();
        let mut raw = RawPeer::dial(&prepared.connection_data());
        raw.say(&hello(&prepared.connection_data(), NONCE));
        drop(raw);
        stats(&local, |stats| stats.handed_over == 1).await;
        match local.step("accepting", accept(prepared)).await {
            Err(FabricError::Connect { .. }) => {}
            Err(other) => panic!("unexpected: {other}"),
            Ok(queue_pair) => {
                let error = local.step("the end", queue_pair.next_arrival()).await.unwrap_err();
                assert!(matches!(error, FabricError::PeerLost { .. }), "unexpected: {error}");
            }
        }
    });
}

#[test]
fn the_listener_ends_with_its_domain() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime.clone());
        let prepared = local.prepare();
        let to = SocketAddr::new(HOST, address(&prepared.connection_data()).port);
        let pending = TcpStream::connect(to).unwrap();
        stats(&local, |stats| stats.accepted == 1).await;
        drop(prepared);
        drop(local);
        // Streams whose hello had not arrived yet end, too.
        assert!(aside(&runtime, move || RawPeer { stream: pending }.hear_end()).await.is_empty());
        nobody_listens(&runtime, to).await;
    });
}

#[test]
fn domains_of_one_fabric_share_a_listener_that_ends_with_the_last_of_them() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let fabric = TcpFabric::new(runtime.clone(), TcpConfig::default());
        let [first, second] = [fabric.open_domain().unwrap(), fabric.open_domain().unwrap()];
        let port = |domain: &dyn Domain| address(&domain.prepare(DEPTHS).unwrap().connection_data()).port;
        let to = SocketAddr::new(HOST, port(&*first));
        assert_eq!(port(&*second), to.port());
        drop(first);
        drop(TcpStream::connect(to).expect("the other domain listens"));
        drop(second);
        nobody_listens(&runtime, to).await;
    });
}

async fn nobody_listens(runtime: &Arc<dyn Runtime>, to: SocketAddr) {
    let gone = async {
        while TcpStream::connect(to).is_ok() {
            yield_once().await;
        }
    };
    step(runtime, "the listener's end", gone).await;
}

/// Listens on `bind`, and connects. If `bind` is every address, the dialler takes the host from the control connection.
async fn connects_when_bound_to(runtime: Arc<dyn Runtime>, bind: IpAddr, host: IpAddr) {
    let config = TcpConfig { bind: (bind, 0).into(), ..TcpConfig::default() };
    let (dialer, acceptor) =
        (Local::with_config(runtime.clone(), config.clone()), Local::with_config(runtime.clone(), config));
    let (dialing, accepting): (Box<dyn Prepared>, _) = (dialer.prepare(), acceptor.prepare());
    let dial = params(accepting.connection_data(), Role::Dialer, STEP_LIMIT);
    let dial = ConnectParams { peer_address: Some((host, 1).into()), ..dial };
    let accept = params(dialing.connection_data(), Role::Acceptor, STEP_LIMIT);
    let both = join(dialing.connect(dial), accepting.connect(accept));
    let (dialed, accepted) = step(&runtime, "connecting", both).await;
    let (dialed, accepted) = (dialed.unwrap().spawn(&*runtime), accepted.unwrap().spawn(&*runtime));
    assert_connected(&acceptor, &dialed, &accepted).await;
    assert_connected(&acceptor, &accepted, &dialed).await;
}

#[test]
fn a_listener_on_every_address_is_dialed_at_the_peers_host() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let every: IpAddr = [0, 0, 0, 0].into();
        connects_when_bound_to(runtime.clone(), every, HOST).await;
        // Without a host, the dialler has no address.
        let local = Local::new(runtime);
        let nowhere = ConnectParams {
            peer_address: None,
            ..params(connection_data(1, NONCE), Role::Dialer, STEP_LIMIT)
        };
        let error = local.step("dialing", local.prepare().connect(nowhere)).await.unwrap_err();
        assert!(error.to_string().contains("peer_address"), "unexpected: {error}");
    });
}

#[test]
fn ipv6_works_where_there_is_ipv6() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
        if TcpListener::bind((loopback, 0)).is_err() {
            eprintln!("skipped: this host has no IPv6 loopback");
            return;
        }
        connects_when_bound_to(runtime, loopback, HOST).await;
    });
}
