//! What an attacker between two ends sees, and the result of changed bytes.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use tensorwire_fabric::{FabricError, Immediate, LossCause};

use super::{CERTIFICATE_AT, End, HOST, connect, member, middle};
use crate::contract::{
    Flavour, bounded,
    pair::{immediate, pattern, step},
};

/// Position of the token in connection data.
const TOKEN: std::ops::Range<usize> = 29..45;

const BYTES: usize = 300_000;

/// Whether `part` occurs in `whole`.
fn occurs(part: &[u8], whole: &[u8]) -> bool {
    whole.windows(part.len()).any(|window| window == part)
}

#[test]
fn e_a_recorder_sees_neither_payload_nor_token() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let (a, b) = (End::new(&runtime, member("/a")), End::new(&runtime, member("/b")));
        let (dialer, acceptor) = (a.prepare(), b.prepare());
        let (led, seen) = middle::through(&acceptor.connection_data(), None);
        let data = [dialer.connection_data(), acceptor.connection_data()];
        let (to_b, to_a) = connect(&runtime, (dialer, led), (acceptor, data[0].clone())).await;
        let (to_b, to_a) = (to_b.unwrap(), to_a.unwrap());
        assert!(to_b.capabilities().encrypted && to_a.capabilities().encrypted);
        let grant = b.receive.grant(BYTES);
        to_b.add_remote_region(grant.region);
        let write = to_b.write_imm(a.source.filled(BYTES, 5), grant.range, Immediate(9));
        step(&runtime, "a write", write).await.unwrap();
        let arrival = step(&runtime, "its arrival", to_a.next_arrival()).await.unwrap();
        assert_eq!(immediate(arrival), (9, BYTES as u64));
        let expected = pattern(BYTES, 5);
        assert_eq!(grant.take()[..], expected[..]);
        let (there, back) = (seen.from_dialer.lock().unwrap(), seen.from_acceptor.lock().unwrap());
        assert!(there.len() > BYTES, "the write did not go through the middle");
        for secret in [&expected[..16], &expected[BYTES - 16..], &data[0].0[TOKEN], &data[1].0[TOKEN]] {
            assert!(!occurs(secret, &there) && !occurs(secret, &back), "seen on the way");
        }
        // Both show certificates, and TLS 1.3 hides these too.
        assert!(!occurs(b"tensorwire test member", &there) && !occurs(b"tensorwire test member", &back));
    });
}

#[test]
fn e_a_bit_flipped_on_the_way_ends_the_connection_and_delivers_nothing_wrong() {
    // In the middle of the content, in its last record, and in a record's header.
    for flip in [100_000, BYTES, 20_000, 20_001, 20_002] {
        bounded(Flavour::CurrentThread, move |runtime| async move {
            let (a, b) = (End::new(&runtime, member("/a")), End::new(&runtime, member("/b")));
            let (dialer, acceptor) = (a.prepare(), b.prepare());
            let (led, _) = middle::through(&acceptor.connection_data(), Some(flip));
            let data = dialer.connection_data();
            let (to_b, to_a) = connect(&runtime, (dialer, led), (acceptor, data)).await;
            let (to_b, to_a) = (to_b.unwrap(), to_a.unwrap());
            let grant = b.receive.grant(BYTES);
            to_b.add_remote_region(grant.region);
            let write = to_b.write_imm(a.source.filled(BYTES, 5), grant.range, Immediate(9));
            let (_written, arrival) = futures::future::join(
                step(&runtime, "a write", write),
                step(&runtime, "the end", to_a.next_arrival()),
            )
            .await;
            let error = arrival.unwrap_err();
            let tampered = FabricError::PeerLost {
                kind: to_a.kind(),
                cause: LossCause::Tampered,
                detail: String::new(),
            };
            assert_eq!(std::mem::discriminant(&error), std::mem::discriminant(&tampered), "{error}");
            assert!(matches!(error, FabricError::PeerLost { cause: LossCause::Tampered, .. }), "{error}");
            // Delivered bytes are right, and all other memory is unchanged.
            let (landed, expected) = (grant.bytes(), pattern(BYTES, 5));
            let right = landed.iter().zip(&expected).take_while(|(found, right)| found == right).count();
            assert!(
                right < BYTES && landed[right..].iter().all(|byte| *byte == 0),
                "{right} bytes are right"
            );
            let end = step(&runtime, "the sender's end", to_b.next_arrival()).await.unwrap_err();
            assert!(matches!(end, FabricError::PeerLost { .. }), "{end}");
        });
    }
}

#[test]
fn e_a_replayed_handshake_is_of_no_use() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let (a, b) = (End::new(&runtime, member("/a")), End::new(&runtime, member("/b")));
        let (dialer, acceptor) = (a.prepare(), b.prepare());
        let (led, seen) = middle::through(&acceptor.connection_data(), None);
        let (at, data) = (middle::port(&acceptor.connection_data()), dialer.connection_data());
        let (to_b, to_a) = connect(&runtime, (dialer, led), (acceptor, data)).await;
        let (_to_b, _to_a) = (to_b.unwrap(), to_a.unwrap());
        let recorded = seen.from_dialer.lock().unwrap().clone();
        let before = b.fabric.listener_stats();
        // The listener stays while a side that uses it does.
        let _other = b.prepare();
        let replayed = std::thread::spawn(move || {
            let mut stream = TcpStream::connect((HOST, at)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = stream.write_all(&recorded);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
        });
        step(&runtime, "the listener", async {
            while b.fabric.listener_stats().not_trusted == before.not_trusted {
                crate::contract::pair::yield_once().await;
            }
        })
        .await;
        replayed.join().unwrap();
        assert_eq!(b.fabric.listener_stats().handed_over, before.handed_over);
    });
}

#[test]
fn e_a_stolen_token_is_of_no_use_without_the_key_of_its_certificate() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let (honest, b) = (member("/a"), End::new(&runtime, member("/b")));
        let thief = End::new(&runtime, member("/thief"));
        // The thief has everything that the honest side received and sent, and a certificate of the same CA.
        let (dialer, acceptor) = (thief.prepare(), b.prepare());
        let mut stolen = dialer.connection_data();
        stolen.0[CERTIFICATE_AT..].copy_from_slice(&honest.digest());
        let to = acceptor.connection_data();
        let (dialled, accepted) = connect(&runtime, (dialer, to), (acceptor, stolen)).await;
        let error = accepted.unwrap_err().to_string();
        assert!(error.contains("another certificate than that of the worker"), "{error}");
        assert!(dialled.is_err());

        // In the other direction, the thief answers instead of the intended peer.
        let a = End::new(&runtime, honest);
        let (dialer, acceptor) = (a.prepare(), thief.prepare());
        let mut stolen = acceptor.connection_data();
        stolen.0[CERTIFICATE_AT..].copy_from_slice(&member("/b").digest());
        let from = dialer.connection_data();
        let (dialled, accepted) = connect(&runtime, (dialer, stolen), (acceptor, from)).await;
        let error = dialled.unwrap_err().to_string();
        assert!(error.contains("another certificate than that of the worker"), "{error}");
        assert!(accepted.is_err());
    });
}
