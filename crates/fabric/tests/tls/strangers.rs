//! Peers that are refused, and the errors that they get.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::{FabricError, Runtime};
use tensorwire_fabric_tcp::tls::test_certificates::rustls::{
    self, ClientConfig, ClientConnection, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use tensorwire_fabric_tcp::tls::{
    TlsIdentity,
    test_certificates::{Authority, Usage, Validity, Wanted},
};

use super::{End, HOST, authority, connect, member, middle};
use crate::contract::{
    Flavour, bounded,
    pair::{step, yield_once},
};

/// Waits until the listener of `end` has turned away `count` streams.
async fn turned_away(runtime: &Arc<dyn Runtime>, end: &End, count: u64) {
    step(runtime, "the listener", async {
        while end.fabric.listener_stats().not_trusted < count {
            yield_once().await;
        }
    })
    .await;
    assert_eq!(end.fabric.listener_stats().handed_over, 0);
}

fn unchecked(authority: &Authority, change: impl FnOnce(&mut Wanted)) -> TlsIdentity {
    let mut wanted = Wanted::worker("/stranger");
    change(&mut wanted);
    authority.issue(&wanted).unwrap().unchecked().unwrap()
}

/// A dialer that the acceptor must refuse, with an error that contains `expected`.
fn is_not_let_in(stranger: TlsIdentity, expected: &'static str) {
    bounded(Flavour::CurrentThread, move |runtime| async move {
        let (stranger, b) = (End::new(&runtime, stranger), End::new(&runtime, member("/b")));
        let (dialer, acceptor) = (stranger.prepare(), b.prepare());
        let data = [dialer.connection_data(), acceptor.connection_data()];
        let [from, to] = data;
        let (dialled, accepted) = connect(&runtime, (dialer, to), (acceptor, from)).await;
        let error = dialled.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(accepted.is_err());
        turned_away(&runtime, &b, 1).await;
    });
}

#[test]
fn e_a_member_of_another_ca_is_not_let_in() {
    let other = Authority::new().unwrap();
    // It detects that the acceptor is a stranger before it shows its own certificate.
    let both = unchecked(&other, |_| ());
    is_not_let_in(both, "signed by no CA that is trusted here");
}

#[test]
fn e_a_dialer_of_another_ca_that_trusts_ours_is_not_let_in() {
    let mut issued = Authority::new().unwrap().issue(&Wanted::worker("/stranger")).unwrap();
    issued.authorities = authority().pem().to_owned();
    is_not_let_in(issued.unchecked().unwrap(), "does not trust the CA");
}

#[test]
fn e_an_expired_certificate_is_not_let_in() {
    is_not_let_in(
        unchecked(authority(), |it| it.validity = Validity::Past),
        "has expired or is not valid yet",
    );
}

#[test]
fn e_a_certificate_of_the_future_is_not_let_in() {
    is_not_let_in(
        unchecked(authority(), |it| it.validity = Validity::Future),
        "has expired or is not valid yet",
    );
}

#[test]
fn e_a_certificate_for_servers_alone_does_not_dial() {
    is_not_let_in(unchecked(authority(), |it| it.usage = Usage::Server), "clientAuth");
}

#[test]
fn e_a_certificate_for_clients_alone_is_not_dialled() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let a = End::new(&runtime, member("/a"));
        let b = End::new(&runtime, unchecked(authority(), |it| it.usage = Usage::Client));
        let (dialer, acceptor) = (a.prepare(), b.prepare());
        let (from, to) = (dialer.connection_data(), acceptor.connection_data());
        let (dialled, accepted) = connect(&runtime, (dialer, to), (acceptor, from)).await;
        let error = dialled.unwrap_err().to_string();
        assert!(error.contains("serverAuth"), "{error}");
        assert!(accepted.is_err());
    });
}

#[test]
fn e_neither_end_falls_back_to_plain_tcp() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let (encrypted, plain) = (End::new(&runtime, member("/a")), End::plain(&runtime));
        for (one, other) in [(&encrypted, &plain), (&plain, &encrypted)] {
            let (dialer, acceptor) = (one.prepare(), other.prepare());
            let (from, to) = (dialer.connection_data(), acceptor.connection_data());
            let (dialled, accepted) = connect(&runtime, (dialer, to), (acceptor, from)).await;
            for error in [dialled.unwrap_err(), accepted.unwrap_err()] {
                assert!(matches!(error, FabricError::Connect { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("agreeing on encryption") && text.contains("TLS identity"), "{text}");
            }
        }
    });
}

#[test]
fn e_what_is_not_tls_1_3_with_a_certificate_is_turned_away() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let b = End::new(&runtime, member("/b"));
        let prepared = b.prepare();
        let port = middle::port(&prepared.connection_data());
        let say = |bytes: Vec<u8>| {
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect((HOST, port)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                stream.write_all(&bytes).unwrap();
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer);
                answer
            })
        };
        // The hello of a peer that does not encrypt.
        let answer = say([&b"twtcp-h\n\x01\x00"[..], &[7; 40]].concat());
        turned_away(&runtime, &b, 1).await;
        assert!(!answer.join().unwrap().starts_with(b"twtcp-w"));
        let answer = say(client_hello_of_tls_1_2());
        turned_away(&runtime, &b, 2).await;
        // A fatal alert, protocol_version.
        assert_eq!(answer.join().unwrap(), [21, 3, 3, 0, 2, 2, 70]);
        let nobody = std::thread::spawn(move || without_a_certificate(port));
        turned_away(&runtime, &b, 3).await;
        let error = nobody.join().unwrap();
        assert!(error.contains("CertificateRequired"), "{error}");
    });
}

/// The error of a client that trusts the CA, and has no certificate.
fn without_a_certificate(port: u16) -> String {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority().pem().as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"tensorwire-data/1".to_vec()];
    let mut connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let mut stream = TcpStream::connect((HOST, port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut tls = rustls::Stream::new(&mut connection, &mut stream);
    let result = tls.write_all(b"twtcp-h\n").and_then(|()| tls.read_to_end(&mut Vec::new()));
    result.unwrap_err().to_string()
}

/// The hello of a client that offers nothing newer than TLS 1.2.
fn client_hello_of_tls_1_2() -> Vec<u8> {
    let extensions = [
        // supported_groups: secp256r1, x25519.
        &[0, 10, 0, 6, 0, 4, 0, 23, 0, 29][..],
        // ec_point_formats: uncompressed.
        &[0, 11, 0, 2, 1, 0],
        // signature_algorithms: ecdsa_secp256r1_sha256, rsa_pss_rsae_sha256.
        &[0, 13, 0, 6, 0, 4, 4, 3, 8, 4],
    ]
    .concat();
    let mut body = vec![3, 3];
    body.extend([0x5A; 32]);
    // No session; ECDHE_ECDSA and ECDHE_RSA with AES 128 GCM; no compression.
    body.extend([0, 0, 4, 0xC0, 0x2B, 0xC0, 0x2F, 1, 0]);
    body.extend((extensions.len() as u16).to_be_bytes());
    body.extend(extensions);
    let mut handshake = vec![1, 0];
    handshake.extend((body.len() as u16).to_be_bytes());
    handshake.extend(body);
    let mut record = vec![22, 3, 1];
    record.extend((handshake.len() as u16).to_be_bytes());
    record.extend(handshake);
    record
}
