//! Whose certificate it must be.

use rendezvous::{
    ClusterSpec,
    control::{ControlError, TlsNames},
    tls::{TlsIdentity, test_certificates::Wanted},
};
use verbs_reactor::FabricKind;

use crate::{
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
        let tcp = |name| plain(name, FabricKind::Tcp);
        // Its own builder would not let it; an attacker has another one.
        let pretends = || tcp(CLIENT).tls(other()).tls_names(TlsNames::AnyMember);
        let refused = refusal(builder(SERVER, FabricKind::Tcp), pretends()).await;
        assert!(matches!(refused, ControlError::Refused { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains(CLIENT) && text.contains("names /job:worker/replica:0/task:1"), "{text}");
        // Relaxed, explicitly.
        assert_served(builder(SERVER, FabricKind::Tcp).tls_names(TlsNames::AnyMember), pretends()).await;
    });
}

#[test]
fn e_a_member_does_not_answer_under_another_name() {
    bounded(|| async {
        let tcp = |name| plain(name, FabricKind::Tcp);
        let pretends =
            || tcp(SERVER).tls(identity("/job:ps/replica:0/task:9")).tls_names(TlsNames::AnyMember);
        let refused = refusal(pretends(), builder(CLIENT, FabricKind::Tcp)).await;
        assert!(
            matches!(&refused, ControlError::NameNotProven { worker, .. } if worker == SERVER),
            "{refused}"
        );
        assert!(refused.to_string().contains("names /job:ps/replica:0/task:9"), "{refused}");
        assert_served(pretends(), builder(CLIENT, FabricKind::Tcp).tls_names(TlsNames::AnyMember)).await;
    });
}

#[test]
fn e_a_certificate_may_be_for_all_tasks_of_a_job() {
    bounded(|| async {
        let any = at("/job:worker/replica:0/task:*", &[]);
        let client = plain("/job:worker/replica:0/task:4711", FabricKind::Tcp).tls(any);
        assert_served(builder(SERVER, FabricKind::Tcp), client).await;
    });
}

#[test]
fn e_an_address_alone_is_proven_by_its_host() {
    bounded(|| async {
        let elsewhere = || plain(SERVER, FabricKind::Tcp).tls(at(SERVER, &["ps0.example", "10.1.2.3"]));
        let refused = refusal(elsewhere(), builder(CLIENT, FabricKind::Tcp)).await;
        let text = refused.to_string();
        assert!(matches!(refused, ControlError::Tls { .. }), "{text}");
        assert!(
            text.contains("not for the host that was dialled") && text.contains("subjectAltName"),
            "{text}"
        );
        assert_served(elsewhere(), builder(CLIENT, FabricKind::Tcp).tls_names(TlsNames::AnyHost)).await;

        // Who names the worker is told the worker; where it runs does not matter.
        let server = serve(elsewhere()).await;
        let cluster = ClusterSpec::new().worker(SERVER, server.address());
        let client = builder(CLIENT, FabricKind::Tcp).cluster(cluster).start().await.unwrap();
        let peer = client.peer(SERVER).unwrap();
        assert_eq!(client.fetch(&peer, KEY).await.unwrap().values::<u32>().unwrap(), values());
        client.shutdown().await;
        server.shutdown().await;
    });
}
