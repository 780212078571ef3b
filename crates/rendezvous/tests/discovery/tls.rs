//! Whose certificate it must be: one for the host of the name.

use std::time::Duration;

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Worker, WorkerError,
    control::{ControlError, GrpcConfig, TlsNames},
    discovery::Discovered,
    tls::{
        TlsIdentity,
        test_certificates::{Authority, Wanted},
    },
};

use super::{LIMIT, NAME, OFTEN, changed, failed, found, is, plane::Names, shut_down};
use crate::bounded::bounded;

const CLIENT: &str = "/job:client/replica:0/task:0";

fn issued(authority: &Authority, name: &str, host: &str) -> TlsIdentity {
    let wanted = Wanted { hosts: vec![host.to_owned()], ..Wanted::worker(name) };
    authority.issue(&wanted).unwrap().identity().unwrap()
}

async fn serve(identity: TlsIdentity, name: &str) -> Worker {
    Worker::builder(name).tls(identity).require(FabricKind::TCP).start().await.unwrap()
}

async fn searcher(authority: &Authority, names: &Names, tls_names: TlsNames) -> Worker {
    let identity = || issued(authority, CLIENT, "client.test");
    let plane = names.plane(GrpcConfig::new("127.0.0.1:0").tls(identity(), tls_names));
    let builder = Worker::builder(CLIENT).dangerous_control_plane(plane);
    builder.tls(identity()).require(FabricKind::TCP).start().await.unwrap()
}

#[test]
fn e_under_tls_the_certificate_must_be_for_the_host_of_the_name() {
    bounded(LIMIT, async {
        let authority = Authority::new().unwrap();
        let service = "/job:a/replica:0/task:0";
        let stranger = "/job:b/replica:0/task:0";
        let good = serve(issued(&authority, service, "trainers.test"), service).await;
        // A member of the cluster, which somebody has listed under the name.
        let bad = serve(issued(&authority, stranger, "127.0.0.1"), stranger).await;
        let names = Names::of([good.address()]);
        let client = searcher(&authority, &names, TlsNames::Proven).await;
        let mut discovery = client.discover(NAME).every(OFTEN);
        let peer = found(&mut discovery).await;
        assert!(is(&peer, &good));
        peer.connect().await.unwrap();
        assert_eq!(client.peers()[0].encrypted, Some(true));
        names.set([good.address(), bad.address()]);
        let (address, error) = failed(&mut discovery).await;
        assert_eq!(address, bad.address());
        assert!(matches!(&error, WorkerError::Control(ControlError::Tls { .. })), "{error}");
        assert!(error.to_string().contains("trainers.test"), "{error}");
        shut_down([&client]).await;

        let client = searcher(&authority, &names, TlsNames::AnyHost).await;
        let mut discovery = client.discover(NAME).every(Duration::from_secs(5));
        for _ in 0..2 {
            assert!(matches!(changed(&mut discovery).await, Discovered::Found(_)));
        }
        shut_down([&client, &good, &bad]).await;
    });
}
