//! The TCP fabric: the contract of all fabrics, and the rules of TCP alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

mod between_processes;
mod death;
mod deeds;
mod frames;
mod handshake;
mod hostile;
mod hostile_process;
mod leaks;
mod limits;
mod loss;
mod proxy;
mod raw;
mod shared_port;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use tensorwire_fabric::{Fabric, Runtime};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The address of a control connection.
const CONTROL: SocketAddr = SocketAddr::new(HOST, 1);

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(TcpFabric::new(runtime, TcpConfig::default()))
}

contract_suite!(crate::contract::Setup {
    fabric: crate::tcp::fabric,
    peer_address: Some(crate::tcp::CONTROL)
});

/// The same rules with writes that are split.
mod small_pieces {
    use super::{Arc, CONTROL, Fabric, Runtime, TcpConfig, TcpFabric};

    fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
        Arc::new(TcpFabric::new(runtime, TcpConfig { piece_bytes_max: 4 << 20, ..TcpConfig::default() }))
    }

    const SETUP: crate::contract::Setup = crate::contract::Setup { fabric, peer_address: Some(CONTROL) };

    contract_suite!(crate::tcp::small_pieces::SETUP, run: crate::contract::bounded);
}
