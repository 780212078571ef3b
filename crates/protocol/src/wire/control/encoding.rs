//! The encoding of control frames: a kind, and the fields in the order of the frame's type.

use super::{
    Connect, ControlFrame, FabricOffer, ListEntry, RegionRecord, RingOffer,
    report::{read_report, write_report},
};
use crate::{
    Validation,
    credit::{Mode, Parameters},
    limits::{
        ADDRESS_BYTES_MAX, CONNECTION_DATA_BYTES_MAX, FABRICS_MAX, LIST_ENTRIES_MAX, NAME_BYTES_MAX,
        REACH_BYTES_MAX, REGIONS_MAX, SLOT_BYTES, WIRE_VERSION, WORKER_NAME_BYTES_MAX,
    },
    wire::{
        WireError,
        codec::{Reader, Writer},
    },
};

const HELLO: u8 = 1;
const PROOF: u8 = 2;
const WELCOME: u8 = 3;
const CONNECT: u8 = 4;
const CONNECTED: u8 = 5;
const REFUSED: u8 = 6;
const REGION_ADD: u8 = 7;
const REGION_ACK: u8 = 8;
const REGION_REMOVE: u8 = 9;
const LIST_REQUEST: u8 = 10;
const LIST_RESPONSE: u8 = 11;
const PING: u8 = 12;
const PONG: u8 = 13;
const GOODBYE: u8 = 14;
const DISCONNECTED: u8 = 15;
const STORE_REQUEST: u8 = 16;
const STORE_RESPONSE: u8 = 17;
const STORE_CANCEL: u8 = 18;
const STANDBY: u8 = 19;
const RETIRED: u8 = 20;
const REPORT_REQUEST: u8 = 21;
const REPORT_RESPONSE: u8 = 22;

const REGION_BYTES: usize = 28;
const LIST_ENTRY_BYTES_MIN: usize = 23;
const FABRIC_BYTES_MIN: usize = 3;

pub(super) fn write_frame(writer: &mut Writer<'_>, frame: &ControlFrame) {
    match frame {
        ControlFrame::Hello { wire_version, worker, incarnation, listen_address, nonce } => {
            writer.u8(HELLO);
            writer.u16(*wire_version);
            writer.text(worker);
            writer.u64(*incarnation);
            writer.option(listen_address.as_deref(), Writer::text);
            writer.raw(nonce);
        }
        ControlFrame::Proof { proof } => {
            writer.u8(PROOF);
            writer.raw(proof);
        }
        ControlFrame::Welcome { fabrics, proof } => {
            writer.u8(WELCOME);
            writer.count(fabrics.len());
            for fabric in fabrics {
                writer.u8(fabric.kind);
                writer.bytes(&fabric.reach);
            }
            writer.raw(proof);
        }
        ControlFrame::Connect(end) => {
            writer.u8(CONNECT);
            write_end(writer, end);
        }
        ControlFrame::Connected(end) => {
            writer.u8(CONNECTED);
            write_end(writer, end);
        }
        ControlFrame::Standby { replaces, offer } => {
            writer.u8(STANDBY);
            writer.u32(*replaces);
            write_end(writer, offer);
        }
        ControlFrame::Refused { connection, status } => {
            writer.u8(REFUSED);
            writer.u32(*connection);
            writer.status(status);
        }
        other => write_later_frame(writer, other),
    }
}

/// The frames of an established connection.
fn write_later_frame(writer: &mut Writer<'_>, frame: &ControlFrame) {
    match frame {
        ControlFrame::RegionAdd { connection, region } => {
            writer.u8(REGION_ADD);
            writer.u32(*connection);
            write_region(writer, region);
        }
        ControlFrame::RegionAck { connection, region } => {
            write_pair(writer, REGION_ACK, *connection, *region);
        }
        ControlFrame::RegionRemove { connection, region } => {
            write_pair(writer, REGION_REMOVE, *connection, *region);
        }
        ControlFrame::ListRequest { request, after, with_checksums } => {
            writer.u8(LIST_REQUEST);
            writer.u32(*request);
            writer.option(after.as_deref(), Writer::text);
            writer.u8((*with_checksums).into());
        }
        ControlFrame::ListResponse { request, entries, more } => {
            writer.u8(LIST_RESPONSE);
            writer.u32(*request);
            writer.count(entries.len());
            entries.iter().for_each(|entry| write_entry(writer, entry));
            writer.u8((*more).into());
        }
        ControlFrame::ReportRequest { request } => write_number(writer, REPORT_REQUEST, *request),
        ControlFrame::ReportResponse { request, report } => {
            writer.u8(REPORT_RESPONSE);
            writer.u32(*request);
            write_report(writer, report);
        }
        ControlFrame::StoreRequest { request, body } => {
            writer.u8(STORE_REQUEST);
            writer.u32(*request);
            writer.raw(body);
        }
        ControlFrame::StoreResponse { request, body } => {
            writer.u8(STORE_RESPONSE);
            writer.u32(*request);
            writer.option(body.as_deref(), Writer::raw);
        }
        ControlFrame::StoreCancel { request } => write_number(writer, STORE_CANCEL, *request),
        ControlFrame::Ping { nonce } => {
            writer.u8(PING);
            writer.u64(*nonce);
        }
        ControlFrame::Pong { nonce } => {
            writer.u8(PONG);
            writer.u64(*nonce);
        }
        ControlFrame::Retired { connection } => write_number(writer, RETIRED, *connection),
        ControlFrame::Disconnected { connection, status } => {
            writer.u8(DISCONNECTED);
            writer.u32(*connection);
            writer.status(status);
        }
        ControlFrame::Goodbye { status } => {
            writer.u8(GOODBYE);
            writer.status(status);
        }
        // Written by `write_frame`.
        _ => {}
    }
}

fn write_end(writer: &mut Writer<'_>, end: &Connect) {
    writer.u32(end.connection);
    writer.u8(end.kind);
    writer.bytes(&end.data);
    writer.u8(end.parameters.mode as u8);
    writer.u32(end.parameters.depth);
    writer.u32(end.parameters.ring_bytes);
    writer.u32(end.parameters.requests_max);
    writer.u32(end.parameters.contents_max);
    writer.u32(end.parameters.names_max);
    writer.u32(end.parameters.eager_bytes_max);
    writer.u32(end.parameters.requests_per_message);
    writer.u32(end.parameters.piece_bytes);
    writer.u8(end.parameters.validation as u8);
    writer.destination(end.ring.destination);
    writer.destination(end.ring.slots);
    writer.count(end.regions.len());
    end.regions.iter().for_each(|region| write_region(writer, region));
}

fn read_end(reader: &mut Reader<'_>) -> Result<Connect, WireError> {
    let connection = reader.u32("connection")?;
    let kind = reader.u8("fabric")?;
    let data = reader.bytes("connection data", CONNECTION_DATA_BYTES_MAX)?.to_vec();
    let parameters = read_parameters(reader)?;
    let ring = RingOffer { destination: reader.destination()?, slots: reader.destination()? };
    let slots_fit = ring.slots.capacity >= 2 * u64::from(SLOT_BYTES);
    if ring.destination.capacity != u64::from(parameters.first_ring_bytes()) || !slots_fit {
        return Err(WireError::Inconsistent { field: "ring" });
    }
    let count = reader.count("regions", REGIONS_MAX, REGION_BYTES)?;
    let regions = (0..count).map(|_| read_region(reader)).collect::<Result<_, _>>()?;
    Ok(Connect { connection, kind, data, parameters, ring, regions })
}

fn read_parameters(reader: &mut Reader<'_>) -> Result<Parameters, WireError> {
    let mode = match reader.u8("mode")? {
        0 => Mode::Original,
        1 => Mode::Counted,
        value => return Err(WireError::Unknown { field: "mode", value: value.into() }),
    };
    let parameters = Parameters {
        mode,
        depth: reader.u32("depth")?,
        ring_bytes: reader.u32("ring_bytes")?,
        requests_max: reader.u32("requests_max")?,
        contents_max: reader.u32("contents_max")?,
        names_max: reader.u32("names_max")?,
        eager_bytes_max: reader.u32("eager_bytes_max")?,
        requests_per_message: reader.u32("requests_per_message")?,
        piece_bytes: reader.u32("piece_bytes")?,
        validation: read_validation(reader)?,
    };
    parameters.check()?;
    Ok(parameters)
}

fn read_validation(reader: &mut Reader<'_>) -> Result<Validation, WireError> {
    let number = u32::from(reader.u8("validation")?);
    Validation::from_number(number).ok_or(WireError::Unknown { field: "validation", value: number.into() })
}

fn write_region(writer: &mut Writer<'_>, region: &RegionRecord) {
    writer.u32(region.region);
    writer.u32(region.generation);
    writer.u64(region.base);
    writer.u64(region.length);
    writer.u32(region.key);
}

fn read_region(reader: &mut Reader<'_>) -> Result<RegionRecord, WireError> {
    Ok(RegionRecord {
        region: reader.u32("region")?,
        generation: reader.u32("generation")?,
        base: reader.u64("base")?,
        length: reader.u64("length")?,
        key: reader.u32("key")?,
    })
}

fn write_number(writer: &mut Writer<'_>, kind: u8, number: u32) {
    writer.u8(kind);
    writer.u32(number);
}

fn write_pair(writer: &mut Writer<'_>, kind: u8, connection: u32, region: u32) {
    writer.u8(kind);
    writer.u32(connection);
    writer.u32(region);
}

pub(super) fn write_entry(writer: &mut Writer<'_>, entry: &ListEntry) {
    writer.text(&entry.name);
    writer.metadata(&entry.metadata);
    writer.u64(entry.version);
    writer.option(entry.checksum, Writer::u64);
}

fn read_entry(reader: &mut Reader<'_>) -> Result<ListEntry, WireError> {
    Ok(ListEntry {
        name: reader.name("name", NAME_BYTES_MAX)?.to_owned(),
        metadata: reader.metadata()?,
        version: reader.u64("version")?,
        checksum: reader.option("checksum", |reader| reader.u64("checksum"))?,
    })
}

fn read_fabric(reader: &mut Reader<'_>) -> Result<FabricOffer, WireError> {
    let kind = reader.u8("fabric")?;
    Ok(FabricOffer { kind, reach: reader.bytes("reach", REACH_BYTES_MAX)?.to_vec() })
}

fn read_hello(reader: &mut Reader<'_>) -> Result<ControlFrame, WireError> {
    let wire_version = reader.u16("wire version")?;
    if wire_version != WIRE_VERSION {
        // The rest of the frame has that version's layout.
        return Err(WireError::Version { peer: wire_version, own: WIRE_VERSION });
    }
    Ok(ControlFrame::Hello {
        wire_version,
        worker: reader.name("worker", WORKER_NAME_BYTES_MAX)?.to_owned(),
        incarnation: reader.u64("incarnation")?,
        listen_address: reader
            .option("listen address", |reader| reader.name("listen address", ADDRESS_BYTES_MAX))?
            .map(str::to_owned),
        nonce: reader.array("nonce")?,
    })
}

pub(super) fn read_frame(reader: &mut Reader<'_>) -> Result<ControlFrame, WireError> {
    Ok(match reader.u8("kind")? {
        HELLO => read_hello(reader)?,
        PROOF => ControlFrame::Proof { proof: reader.array("proof")? },
        WELCOME => {
            let count = reader.count("fabrics", FABRICS_MAX, FABRIC_BYTES_MIN)?;
            let fabrics = (0..count).map(|_| read_fabric(reader)).collect::<Result<_, _>>()?;
            ControlFrame::Welcome { fabrics, proof: reader.array("proof")? }
        }
        CONNECT => ControlFrame::Connect(read_end(reader)?),
        CONNECTED => ControlFrame::Connected(read_end(reader)?),
        STANDBY => ControlFrame::Standby { replaces: reader.u32("replaces")?, offer: read_end(reader)? },
        RETIRED => ControlFrame::Retired { connection: reader.u32("connection")? },
        REFUSED => ControlFrame::Refused { connection: reader.u32("connection")?, status: reader.status()? },
        REGION_ADD => {
            ControlFrame::RegionAdd { connection: reader.u32("connection")?, region: read_region(reader)? }
        }
        REGION_ACK => {
            ControlFrame::RegionAck { connection: reader.u32("connection")?, region: reader.u32("region")? }
        }
        REGION_REMOVE => ControlFrame::RegionRemove {
            connection: reader.u32("connection")?,
            region: reader.u32("region")?,
        },
        LIST_REQUEST => ControlFrame::ListRequest {
            request: reader.u32("request")?,
            after: reader.option("after", |reader| reader.name("after", NAME_BYTES_MAX))?.map(str::to_owned),
            with_checksums: reader.flag("with_checksums")?,
        },
        LIST_RESPONSE => {
            let request = reader.u32("request")?;
            let count = reader.count("entries", LIST_ENTRIES_MAX, LIST_ENTRY_BYTES_MIN)?;
            let entries = (0..count).map(|_| read_entry(reader)).collect::<Result<_, _>>()?;
            ControlFrame::ListResponse { request, entries, more: reader.flag("more")? }
        }
        REPORT_REQUEST => ControlFrame::ReportRequest { request: reader.u32("request")? },
        REPORT_RESPONSE => ControlFrame::ReportResponse {
            request: reader.u32("request")?,
            report: Box::new(read_report(reader)?),
        },
        STORE_REQUEST => {
            ControlFrame::StoreRequest { request: reader.u32("request")?, body: reader.rest("body").to_vec() }
        }
        STORE_RESPONSE => ControlFrame::StoreResponse {
            request: reader.u32("request")?,
            body: reader.option("body", |reader| Ok(reader.rest("body").to_vec()))?,
        },
        STORE_CANCEL => ControlFrame::StoreCancel { request: reader.u32("request")? },
        PING => ControlFrame::Ping { nonce: reader.u64("nonce")? },
        PONG => ControlFrame::Pong { nonce: reader.u64("nonce")? },
        GOODBYE => ControlFrame::Goodbye { status: reader.status()? },
        DISCONNECTED => {
            ControlFrame::Disconnected { connection: reader.u32("connection")?, status: reader.status()? }
        }
        value => return Err(WireError::Unknown { field: "kind", value: value.into() }),
    })
}
