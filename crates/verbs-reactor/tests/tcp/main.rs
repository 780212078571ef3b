//! The TCP fabric: the contract that every fabric keeps, and what is TCP's alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

#[path = "../contract/mod.rs"]
mod contract;

mod death;
mod frames;
mod handshake;
mod loss;
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
