//! The TCP fabric: the contract that every fabric keeps, and what is TCP's alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

#[path = "../contract/mod.rs"]
mod contract;
#[path = "../process/mod.rs"]
mod process;
#[path = "../process_pair/mod.rs"]
mod process_pair;

mod between_processes;
mod death;
mod deeds;
mod frames;
mod handshake;
mod hostile;
mod hostile_process;
mod limits;
mod loss;
mod proxy;
mod raw;

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use verbs_reactor::{
    Fabric, Runtime,
    tcp::{TcpConfig, TcpFabric},
};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(TcpFabric::new(runtime, TcpConfig::default()))
}

contract_suite!(crate::contract::Setup { fabric: crate::fabric, peer_host: Some(crate::HOST) });

/// The same rules with writes that are split.
mod small_pieces {
    use crate::contract_suite;

    use super::{Arc, Fabric, HOST, Runtime, TcpConfig, TcpFabric};

    fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
        Arc::new(TcpFabric::new(runtime, TcpConfig { piece_bytes_max: 4 << 20, ..TcpConfig::default() }))
    }

    const SETUP: crate::contract::Setup = crate::contract::Setup { fabric, peer_host: Some(HOST) };

    contract_suite!(crate::small_pieces::SETUP, run: crate::contract::bounded);
}
