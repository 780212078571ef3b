//! A view as a line of JSON.

use std::time::Duration;

use serde::Serialize;
use tensorwire::report::{PeerReport, PoolReport, SetReport, Traffic};

use super::view::{Figures, Place, Rates, View};
use crate::{failure::Failure, watch::seconds};

/// Version of the lines: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

#[derive(Debug, Serialize)]
#[serde(tag = "event", rename = "report")]
struct Line<'a> {
    version: u32,
    worker: WorkerJson<'a>,
    #[serde(serialize_with = "seconds")]
    clock_seconds: Duration,
    interval_seconds: Option<f64>,
    sessions: Option<u64>,
    total: Option<TrafficJson>,
    peers: Vec<PeerJson<'a>>,
    peers_left_out: u64,
    sets: Vec<SetJson<'a>>,
    sets_left_out: u64,
    pools: Vec<PoolJson<'a>>,
    slowest: Option<SlowestJson<'a>>,
}

#[derive(Debug, Serialize)]
struct WorkerJson<'a> {
    name: &'a str,
    address: &'a str,
    /// Text, because JSON's numbers are not exact above 2^53 in many programs.
    incarnation: String,
    version: &'a str,
}

/// The numbers of [`Traffic`].
#[derive(Debug, Serialize)]
#[serde(remote = "Traffic")]
struct TrafficNumbers {
    values_received: u64,
    bytes_received: u64,
    values_sent: u64,
    bytes_sent: u64,
    errors: u64,
    connects: u64,
    reconnects: u64,
    losses: u64,
}

#[derive(Debug, Serialize)]
struct TrafficJson {
    #[serde(flatten, with = "TrafficNumbers")]
    traffic: Traffic,
    rates: Option<Rates>,
}

#[derive(Debug, Serialize)]
struct PeerJson<'a> {
    name: &'a str,
    address: Option<&'a str>,
    transport: Option<&'a str>,
    #[serde(flatten)]
    traffic: TrafficJson,
    waiting_at_peer: u64,
    waiting_at_peer_seconds: Option<f64>,
    waiting_here: u64,
    waiting_here_seconds: Option<f64>,
    stalled_seconds: Option<f64>,
}

impl<'a> PeerJson<'a> {
    fn of(peer: &'a PeerReport, figures: &Figures) -> Self {
        let seconds = |duration: Option<Duration>| duration.as_ref().map(Duration::as_secs_f64);
        Self {
            name: &peer.name,
            address: peer.address.as_deref(),
            transport: peer.transport.as_deref(),
            traffic: TrafficJson { traffic: peer.traffic, rates: figures.rates },
            waiting_at_peer: peer.waiting_at_peer.requests,
            waiting_at_peer_seconds: seconds(figures.at_peer),
            waiting_here: peer.waiting_here.requests,
            waiting_here_seconds: seconds(figures.here),
            stalled_seconds: seconds(peer.stalled),
        }
    }
}

#[derive(Debug, Serialize)]
struct SetJson<'a> {
    name: &'a str,
    version: u64,
    tensors: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct PoolJson<'a> {
    name: &'a str,
    block_bytes: u64,
    used_bytes: u64,
    leaked_bytes: u64,
    retired_bytes: u64,
    waiting: u64,
}

#[derive(Debug, Serialize)]
struct SlowestJson<'a> {
    peer: &'a str,
    place: Place,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
}

/// The view as one line.
pub(super) fn line(view: &View) -> Result<String, Failure> {
    let View { report, interval, total, peers, slowest } = view;
    let line = Line {
        version: VERSION,
        worker: WorkerJson {
            name: &report.name,
            address: &report.address,
            incarnation: format!("{:016x}", report.incarnation),
            version: &report.version,
        },
        clock_seconds: report.clock,
        interval_seconds: interval.as_ref().map(Duration::as_secs_f64),
        sessions: report.sessions,
        total: report.total.map(|traffic| TrafficJson { traffic, rates: *total }),
        peers: report.peers.iter().zip(peers).map(|(peer, figures)| PeerJson::of(peer, figures)).collect(),
        peers_left_out: report.peers_left_out,
        sets: report.sets.iter().map(set).collect(),
        sets_left_out: report.sets_left_out,
        pools: report.pools.iter().map(pool).collect(),
        slowest: slowest.as_ref().map(|slowest| SlowestJson {
            peer: &slowest.peer,
            place: slowest.place,
            seconds: slowest.waited,
        }),
    };
    Ok(serde_json::to_string(&line).map_err(Failure::Json)? + "\n")
}

fn set(set: &SetReport) -> SetJson<'_> {
    let SetReport { name, version, tensors, bytes, .. } = set;
    SetJson { name, version: *version, tensors: *tensors, bytes: *bytes }
}

fn pool(pool: &PoolReport) -> PoolJson<'_> {
    PoolJson {
        name: &pool.name,
        block_bytes: pool.block_bytes,
        used_bytes: pool.used_bytes,
        leaked_bytes: pool.leaked_bytes,
        retired_bytes: pool.retired_bytes,
        waiting: pool.waiting,
    }
}
