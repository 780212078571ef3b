//! The encoding of a report.

use std::time::Duration;

use crate::{
    Waiting,
    limits::{
        ADDRESS_BYTES_MAX, NAME_BYTES_MAX, REPORT_PEERS_MAX, REPORT_POOLS_MAX, REPORT_SETS_MAX,
        REPORT_TEXT_BYTES_MAX, WORKER_NAME_BYTES_MAX,
    },
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
    wire::{
        WireError,
        codec::{Reader, Writer},
    },
};

/// Bytes of a peer with an empty name and no optional field.
const PEER_BYTES_MIN: usize = 2 + 1 + 1 + 8 * Traffic::NUMBERS + 2 * 9 + 1;
const SET_BYTES_MIN: usize = 2 + 3 * 8;
const POOL_BYTES_MIN: usize = 2 + 5 * 8;

/// The numbers of [`Traffic`], in their order.
const TRAFFIC: [&str; Traffic::NUMBERS] = [
    "values received",
    "bytes received",
    "values sent",
    "bytes sent",
    "errors",
    "connects",
    "reconnects",
    "losses",
];

pub(super) fn write_report(writer: &mut Writer<'_>, report: &WorkerReport) {
    writer.text(&report.name);
    writer.text(&report.address);
    writer.u64(report.incarnation);
    writer.text(&report.version);
    write_duration(writer, report.clock);
    writer.option(report.total.as_ref(), write_traffic);
    writer.option(report.sessions, Writer::u64);
    writer.count(report.peers.len());
    report.peers.iter().for_each(|peer| write_peer(writer, peer));
    writer.u64(report.peers_left_out);
    writer.count(report.sets.len());
    for SetReport { name, version, tensors, bytes } in &report.sets {
        writer.text(name);
        [*version, *tensors, *bytes].into_iter().for_each(|number| writer.u64(number));
    }
    writer.u64(report.sets_left_out);
    writer.count(report.pools.len());
    for PoolReport { name, block_bytes, used_bytes, leaked_bytes, retired_bytes, waiting } in &report.pools {
        writer.text(name);
        let numbers = [block_bytes, used_bytes, leaked_bytes, retired_bytes, waiting];
        numbers.into_iter().for_each(|number| writer.u64(*number));
    }
}

pub(super) fn read_report(reader: &mut Reader<'_>) -> Result<WorkerReport, WireError> {
    Ok(WorkerReport {
        name: read_text(reader, "worker", WORKER_NAME_BYTES_MAX)?,
        address: read_text(reader, "address", ADDRESS_BYTES_MAX)?,
        incarnation: reader.u64("incarnation")?,
        version: read_text(reader, "version", REPORT_TEXT_BYTES_MAX)?,
        clock: read_duration(reader, "clock")?,
        total: reader.option("total", read_traffic)?,
        sessions: reader.option("sessions", |reader| reader.u64("sessions"))?,
        peers: read_all(reader, ("peers", REPORT_PEERS_MAX, PEER_BYTES_MIN), read_peer)?,
        peers_left_out: reader.u64("peers left out")?,
        sets: read_all(reader, ("sets", REPORT_SETS_MAX, SET_BYTES_MIN), read_set)?,
        sets_left_out: reader.u64("sets left out")?,
        pools: read_all(reader, ("pools", REPORT_POOLS_MAX, POOL_BYTES_MIN), read_pool)?,
    })
}

fn read_all<T>(
    reader: &mut Reader<'_>,
    (field, limit, bytes_min): (&'static str, usize, usize),
    read: impl Fn(&mut Reader<'_>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    let count = reader.count(field, limit, bytes_min)?;
    (0..count).map(|_| read(reader)).collect()
}

fn read_text(reader: &mut Reader<'_>, field: &'static str, limit: usize) -> Result<String, WireError> {
    reader.name(field, limit).map(str::to_owned)
}

fn write_peer(writer: &mut Writer<'_>, peer: &PeerReport) {
    writer.text(&peer.name);
    writer.option(peer.address.as_deref(), Writer::text);
    writer.option(peer.transport.as_deref(), Writer::text);
    write_traffic(writer, &peer.traffic);
    write_waiting(writer, peer.waiting_at_peer);
    write_waiting(writer, peer.waiting_here);
    writer.option(peer.stalled, write_duration);
}

fn read_peer(reader: &mut Reader<'_>) -> Result<PeerReport, WireError> {
    Ok(PeerReport {
        name: read_text(reader, "peer", WORKER_NAME_BYTES_MAX)?,
        address: reader.option("address", |reader| read_text(reader, "address", ADDRESS_BYTES_MAX))?,
        transport: reader
            .option("transport", |reader| read_text(reader, "transport", REPORT_TEXT_BYTES_MAX))?,
        traffic: read_traffic(reader)?,
        waiting_at_peer: read_waiting(reader)?,
        waiting_here: read_waiting(reader)?,
        stalled: reader.option("stalled", |reader| read_duration(reader, "stalled"))?,
    })
}

fn read_set(reader: &mut Reader<'_>) -> Result<SetReport, WireError> {
    Ok(SetReport {
        name: read_text(reader, "set", NAME_BYTES_MAX)?,
        version: reader.u64("set version")?,
        tensors: reader.u64("tensors")?,
        bytes: reader.u64("bytes")?,
    })
}

fn read_pool(reader: &mut Reader<'_>) -> Result<PoolReport, WireError> {
    Ok(PoolReport {
        name: read_text(reader, "pool", REPORT_TEXT_BYTES_MAX)?,
        block_bytes: reader.u64("block bytes")?,
        used_bytes: reader.u64("used bytes")?,
        leaked_bytes: reader.u64("leaked bytes")?,
        retired_bytes: reader.u64("retired bytes")?,
        waiting: reader.u64("waiting")?,
    })
}

fn write_traffic(writer: &mut Writer<'_>, traffic: &Traffic) {
    traffic.numbers().into_iter().for_each(|number| writer.u64(number));
}

fn read_traffic(reader: &mut Reader<'_>) -> Result<Traffic, WireError> {
    let mut numbers = [0; Traffic::NUMBERS];
    for (number, field) in numbers.iter_mut().zip(TRAFFIC) {
        *number = reader.u64(field)?;
    }
    Ok(Traffic::of_numbers(numbers))
}

fn write_waiting(writer: &mut Writer<'_>, waiting: Waiting) {
    writer.u64(waiting.requests);
    writer.option(waiting.oldest, Writer::u64);
}

fn read_waiting(reader: &mut Reader<'_>) -> Result<Waiting, WireError> {
    let requests = reader.u64("waiting requests")?;
    let oldest = reader.option("oldest request", |reader| reader.u64("oldest request"))?;
    Ok(Waiting { requests, oldest })
}

/// In nanoseconds. A longer time than 584 years is written as that.
fn write_duration(writer: &mut Writer<'_>, duration: Duration) {
    writer.u64(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
}

fn read_duration(reader: &mut Reader<'_>, field: &'static str) -> Result<Duration, WireError> {
    reader.u64(field).map(Duration::from_nanos)
}
