//! Whose certificate it must be.

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    ClusterSpec, Worker, WorkerError,
    control::{ControlError, TlsNames},
    tls::{TlsIdentity, test_certificates::Wanted},
};

use crate::tls::{
    CLIENT, KEY, SERVER, assert_served, authority, bounded, builder, identity, plain, refusal, serve, values,
};

/// For these hosts alone.
fn at(name: &str, hosts: &[&str]) -> TlsIdentity {
    let hosts = hosts.iter().map(|&host| host.to_owned()).collect();
    authority().issue(&Wanted { hosts, ..Wanted::worker(name) }).unwrap().identity().unwrap()
}

#[test]
fn e_a_member_does_not_come_under_another_name() {
    bounded(|| async {
        let other = || identity("/job:worker/replica:0/task:1");
        let tcp = |name| plain(name, FabricKind::TCP);
        // Its own builder would not let it; an attacker has another one.
        let pretends = || tcp(CLIENT).tls(other()).tls_names(TlsNames::AnyMember);
        let refused = refusal(builder(SERVER, FabricKind::TCP), pretends()).await;
        assert!(matches!(refused, ControlError::Refused { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains(CLIENT) && text.contains("names /job:worker/replica:0/task:1"), "{text}");
        // Relaxed, explicitly.
        assert_served(builder(SERVER, FabricKind::TCP).tls_names(TlsNames::AnyMember), pretends()).await;
    });
}

#[test]
fn e_a_member_does_not_answer_under_another_name() {
    bounded(|| async {
        let tcp = |name| plain(name, FabricKind::TCP);
        let pretends =
            || tcp(SERVER).tls(identity("/job:ps/replica:0/task:9")).tls_names(TlsNames::AnyMember);
        let refused = refusal(pretends(), builder(CLIENT, FabricKind::TCP)).await;
        assert!(
            matches!(&refused, ControlError::NameNotProven { worker, .. } if worker == SERVER),
            "{refused}"
        );
        assert!(refused.to_string().contains("names /job:ps/replica:0/task:9"), "{refused}");
        assert_served(pretends(), builder(CLIENT, FabricKind::TCP).tls_names(TlsNames::AnyMember)).await;
    });
}

#[test]
fn a_client_without_a_name_takes_that_of_its_certificate() {
    bounded(|| async {
        let client = |uris: &[&str]| {
            let uris = uris.iter().map(|uri| format!("tensorwire:{uri}")).collect();
            let issued = authority().issue(&Wanted { uris, ..Wanted::worker(CLIENT) }).unwrap();
            Worker::client().require(FabricKind::TCP).tls(issued.identity().unwrap())
        };
        for (named, begins) in [
            (CLIENT, CLIENT),
            ("plain", "/job:plain/replica:0/task:0"),
            ("/job:worker/replica:0/task:*", "/job:worker/replica:0/task:"),
        ] {
            let one = client(&[named]).start().await.unwrap();
            assert!(one.name().starts_with(begins), "{}", one.name());
            one.shutdown().await;
            assert_served(builder(SERVER, FabricKind::TCP), client(&[named])).await;
        }
        for (uris, told) in [
            (&[][..], "names no worker"),
            (&[CLIENT, SERVER], "names several workers"),
            (&["/job:worker"], "write it like"),
        ] {
            let error = client(uris).start().await.unwrap_err();
            assert!(matches!(&error, WorkerError::Config { field: "name", .. }), "{error}");
            assert!(error.to_string().contains(told), "{error}");
        }
    });
}

#[test]
fn e_a_certificate_may_be_for_all_tasks_of_a_job() {
    bounded(|| async {
        let any = at("/job:worker/replica:0/task:*", &[]);
        let client = plain("/job:worker/replica:0/task:4711", FabricKind::TCP).tls(any);
        assert_served(builder(SERVER, FabricKind::TCP), client).await;
    });
}

#[test]
fn e_an_address_alone_is_proven_by_its_host() {
    bounded(|| async {
        let elsewhere = || plain(SERVER, FabricKind::TCP).tls(at(SERVER, &["ps0.example", "10.1.2.3"]));
        let refused = refusal(elsewhere(), builder(CLIENT, FabricKind::TCP)).await;
        let text = refused.to_string();
        assert!(matches!(refused, ControlError::Tls { .. }), "{text}");
        assert!(
            text.contains("not for the host that was dialled") && text.contains("subjectAltName"),
            "{text}"
        );
        assert_served(elsewhere(), builder(CLIENT, FabricKind::TCP).tls_names(TlsNames::AnyHost)).await;

        // With a worker's name the certificate must be that worker's; the host that it runs on does not matter.
        let server = serve(elsewhere()).await;
        let cluster = ClusterSpec::new().worker(SERVER, server.address());
        let client = builder(CLIENT, FabricKind::TCP).cluster(cluster).start().await.unwrap();
        let peer = client.peer(SERVER).unwrap();
        assert_eq!(peer.fetch(KEY).await.unwrap().values::<u32>().unwrap(), values());
        client.shutdown().await;
        server.shutdown().await;
    });
}
