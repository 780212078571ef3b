//! Peers that are refused, and the errors that they get.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use tensorwire_fabric::{FabricKind, TokioRuntime, timeout};
use tensorwire_fabric_tcp::tls::TlsPurpose;
use tensorwire_rendezvous::{
    control::{ControlError, TlsNames},
    tls::{
        TlsIdentity,
        test_certificates::{Authority, Usage, Validity, Wanted},
    },
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::tls::{
    CLIENT, SERVER, authority, bounded, builder, fetch, identity, plain, refusal, serve, values,
};

/// An identity that its own CA may not let in.
fn unchecked(authority: &Authority, name: &str, change: impl FnOnce(&mut Wanted)) -> TlsIdentity {
    let mut wanted = Wanted::worker(name);
    change(&mut wanted);
    authority.issue(&wanted).unwrap().unchecked().unwrap()
}

/// Of a CA that nobody here trusts, while it trusts ours.
fn foreign(name: &str) -> TlsIdentity {
    let mut issued = Authority::new().unwrap().issue(&Wanted::worker(name)).unwrap();
    issued.authorities = authority().pem().to_owned();
    issued.unchecked().unwrap()
}

#[test]
fn e_a_client_with_a_wrong_certificate_is_told_why() {
    for (stranger, told) in [
        (foreign(CLIENT), "does not trust the CA"),
        (
            unchecked(authority(), CLIENT, |it| it.validity = Validity::Past),
            "has expired or is not valid yet",
        ),
        (
            unchecked(authority(), CLIENT, |it| it.validity = Validity::Future),
            "has expired or is not valid yet",
        ),
        (unchecked(authority(), CLIENT, |it| it.usage = Usage::Server), "clientAuth"),
    ] {
        bounded(move || async move {
            // Who relaxes names lets in no strangers.
            for names in [TlsNames::Proven, TlsNames::AnyMember] {
                let server = builder(SERVER, FabricKind::TCP).tls_names(names);
                let client = plain(CLIENT, FabricKind::TCP).tls(stranger.clone());
                let refused = refusal(server, client).await;
                assert!(matches!(refused, ControlError::Tls { .. }), "{refused}");
                assert!(refused.to_string().contains(told), "{refused}");
            }
        });
    }
}

#[test]
fn e_a_server_with_a_wrong_certificate_is_not_talked_to() {
    for (stranger, why) in [
        (foreign(SERVER), "signed by no CA that is trusted here"),
        (unchecked(authority(), SERVER, |it| it.validity = Validity::Past), "has expired"),
        (unchecked(authority(), SERVER, |it| it.validity = Validity::Future), "is not valid yet"),
        (unchecked(authority(), SERVER, |it| it.usage = Usage::Client), "serverAuth"),
    ] {
        bounded(move || async move {
            let server = plain(SERVER, FabricKind::TCP).tls(stranger);
            let refused = refusal(server, builder(CLIENT, FabricKind::TCP)).await;
            assert!(matches!(refused, ControlError::Tls { .. }), "{refused}");
            assert!(refused.to_string().contains(why), "{refused}");
        });
    }
}

#[test]
fn e_a_plain_worker_is_told_that_the_other_end_speaks_tls() {
    bounded(|| async {
        let refused = refusal(builder(SERVER, FabricKind::TCP), plain(CLIENT, FabricKind::TCP)).await;
        assert!(matches!(refused, ControlError::Tls { .. }), "{refused}");
        assert!(refused.to_string().contains("speaks TLS, and this worker does not"), "{refused}");
    });
}

#[test]
fn e_a_tls_worker_does_not_fall_back_to_a_plain_one() {
    bounded(|| async {
        let refused = refusal(plain(SERVER, FabricKind::TCP), builder(CLIENT, FabricKind::TCP)).await;
        assert!(matches!(refused, ControlError::Tls { .. }), "{refused}");
        assert!(refused.to_string().contains("does not speak TLS"), "{refused}");
    });
}

#[test]
fn s4_a_flood_under_tls_is_cut_at_once() {
    bounded(|| async {
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        let stream = tokio::net::TcpStream::connect(server.address()).await.unwrap();
        let mut stranger = identity(CLIENT).connect(TlsPurpose::Control, stream).await.unwrap();
        // HTTP/2's preface and settings, and answers to PINGs that nobody sent.
        let answers = b"\0\0\x08\x06\x01\0\0\0\0flooding".repeat(1000);
        let flood = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"[..], &answers].concat();
        let cut = async {
            let _may_be_cut = stranger.write_all(&flood).await;
            let _ended = stranger.read_to_end(&mut Vec::new()).await;
        };
        // Before its time to arrive is over.
        let runtime = TokioRuntime::current().unwrap();
        let in_time = timeout(&runtime, Duration::from_secs(5), cut).await;
        assert!(in_time.is_ok(), "the connection was kept");
        let client = builder(CLIENT, FabricKind::TCP).start().await.unwrap();
        assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
    });
}

#[test]
fn e_what_is_not_tls_1_3_is_turned_away_and_spoils_nothing() {
    bounded(|| async {
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        // The plane answers on a thread of its own.
        let say = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            stream.write_all(bytes).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        };
        let fatal = |answer: Vec<u8>| (answer.get(..6).map(<[u8]>::to_vec), answer.get(6).copied());
        let alert = Some(vec![21, 3, 3, 0, 2, 2]);
        // HTTP/2 in the clear: an alert, and nothing else.
        let answer = fatal(say(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
        assert_eq!(answer.0, alert);
        // A client that offers nothing newer than TLS 1.2: protocol_version.
        assert_eq!(fatal(say(&client_hello_of_tls_1_2())), (alert, Some(70)));
        let client = builder(CLIENT, FabricKind::TCP).start().await.unwrap();
        assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
        assert_eq!(server.peers().len(), 1);
        client.shutdown().await;
        server.shutdown().await;
    });
}

fn client_hello_of_tls_1_2() -> Vec<u8> {
    // supported_groups, ec_point_formats, signature_algorithms.
    let extensions =
        [&[0, 10, 0, 6, 0, 4, 0, 23, 0, 29][..], &[0, 11, 0, 2, 1, 0], &[0, 13, 0, 6, 0, 4, 4, 3, 8, 4]]
            .concat();
    let mut body = vec![3, 3];
    body.extend([0x5A; 32]);
    // No session; ECDHE with AES 128 GCM; no compression.
    body.extend([0, 0, 4, 0xC0, 0x2B, 0xC0, 0x2F, 1, 0]);
    body.extend((extensions.len() as u16).to_be_bytes());
    body.extend(extensions);
    let handshake = [&[1, 0][..], &(body.len() as u16).to_be_bytes(), &body].concat();
    [&[22, 3, 1][..], &(handshake.len() as u16).to_be_bytes(), &handshake].concat()
}
