//! The fabric contract over TCP.

mod contract;

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use verbs_reactor::{
    Fabric, Runtime,
    tcp::{TcpConfig, TcpFabric},
};

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(TcpFabric::new(runtime, TcpConfig::default()))
}

contract_suite!(crate::contract::Setup { fabric: crate::fabric, peer_host: Some(crate::HOST) });

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
