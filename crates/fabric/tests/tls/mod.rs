//! Encrypted TCP: the contract of all fabrics, refused peers, and attackers between the two ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

mod identity;
mod middle;
mod strangers;
mod way;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, OnceLock},
};

use futures::future::join;
use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, FabricError, Prepared, QueuePair, Role, Runtime,
};
use tensorwire_fabric_tcp::{
    TcpConfig, TcpFabric,
    tls::{
        TlsIdentity,
        test_certificates::{Authority, Wanted},
    },
};

use crate::contract::pair::{DEPTHS, RegisteredPool, STEP_LIMIT, step};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The address of a control connection.
const CONTROL: SocketAddr = SocketAddr::new(HOST, 1);

/// Where the certificate's digest begins in connection data.
const CERTIFICATE_AT: usize = 45;

/// The CA that all honest ends trust.
fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| Authority::new().unwrap())
}

fn member(name: &str) -> TlsIdentity {
    authority().issue(&Wanted::worker(name)).unwrap().identity().unwrap()
}

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    static MEMBER: OnceLock<TlsIdentity> = OnceLock::new();
    let identity = MEMBER.get_or_init(|| member("/job:a/replica:0/task:0")).clone();
    Arc::new(TcpFabric::new(runtime, TcpConfig::default()).with_tls(identity))
}

contract_suite!(crate::contract::Setup {
    fabric: crate::tls::fabric,
    peer_address: Some(crate::tls::CONTROL)
});

/// The fabric of one process.
struct End {
    fabric: TcpFabric,
    domain: Arc<dyn Domain>,
    source: RegisteredPool,
    receive: RegisteredPool,
}

impl End {
    fn new(runtime: &Arc<dyn Runtime>, identity: TlsIdentity) -> Self {
        Self::of(TcpFabric::new(runtime.clone(), TcpConfig::default()).with_tls(identity))
    }

    fn plain(runtime: &Arc<dyn Runtime>) -> Self {
        Self::of(TcpFabric::new(runtime.clone(), TcpConfig::default()))
    }

    fn of(fabric: TcpFabric) -> Self {
        let domain = fabric.open_domain().unwrap();
        let source = RegisteredPool::new(&domain, "source", Access::LOCAL, 64 << 20);
        let receive = RegisteredPool::new(&domain, "receive", Access::RECEIVE, 64 << 20);
        Self { fabric, domain, source, receive }
    }

    fn prepare(&self) -> Box<dyn Prepared> {
        self.domain.prepare(DEPTHS).unwrap()
    }
}

type Connected = Result<QueuePair, FabricError>;

/// Connects both, each with the given connection data. Returns the dialer's side first. A side whose peer fails is
/// dropped.
async fn connect(
    runtime: &Arc<dyn Runtime>,
    (dialer, dialer_has): (Box<dyn Prepared>, ConnectionData),
    (acceptor, acceptor_has): (Box<dyn Prepared>, ConnectionData),
) -> (Connected, Connected) {
    let params = |peer, role, limit| ConnectParams { peer, role, peer_address: Some(CONTROL), limit };
    let dial = params(dialer_has, Role::Dialer, STEP_LIMIT / 2);
    let accept = params(acceptor_has, Role::Acceptor, STEP_LIMIT / 20);
    let both = join(dialer.connect(dial), acceptor.connect(accept));
    let (dialled, accepted) = step(runtime, "connecting", both).await;
    (dialled.map(|end| end.spawn(&**runtime)), accepted.map(|end| end.spawn(&**runtime)))
}
