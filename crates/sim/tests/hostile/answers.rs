//! How a rogue answers the requests of honest workers: correctly, or in any other way.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::Immediate;
use tensorwire_protocol::{
    Code, DataType, Destination, EagerContent, ErrorStatus, Message, MetaDataResponse, Metadata,
    RequestIndex, ResultSlot, Scope, Shape, Status, TensorReRequest, TensorRequest, Validation,
    VersionNotice, Want,
    limits::{RESULT_BYTES, RESULT_SLOT_BYTES},
};
use tensorwire_sim::Rng;

use super::{line::Line, memory_of::range_of, paging, subscribing};

/// Bytes with their metadata.
pub(super) fn value_of(length: usize, rng: &mut Rng) -> (Metadata, Vec<u8>) {
    let bytes = (0..length).map(|_| rng.next_u64() as u8).collect();
    (metadata_of(length as u64), bytes)
}

fn metadata_of(length: u64) -> Metadata {
    Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
}

/// The value that answers a request, the same each time.
fn value_for(index: RequestIndex) -> (Metadata, Vec<u8>) {
    let mut rng = Rng::new(index.0.into());
    let length = rng.pick([0, 1, 8, 64, 64, 64, 300, 5000]);
    value_of(length, &mut rng)
}

/// The content of a result slot.
pub(super) fn result_of(validation: Validation, bytes: &[u8]) -> [u8; RESULT_BYTES] {
    let mut result = [0; RESULT_BYTES];
    let algorithm = validation as u32;
    let sum = validation.checksum(bytes).unwrap_or(0);
    result[..4].copy_from_slice(&1_u32.to_le_bytes());
    result[4..8].copy_from_slice(&algorithm.to_le_bytes());
    result[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    result[16..].copy_from_slice(&sum.to_le_bytes());
    result
}

/// A correct META_DATA_RESPONSE.
pub(super) fn response(
    line: &Line,
    index: RequestIndex,
    bytes: &[u8],
    content: Option<&[u8]>,
) -> MetaDataResponse {
    let with_sum = content.is_some() || line.agreed.describes_first();
    MetaDataResponse {
        index,
        metadata: metadata_of(bytes.len() as u64),
        content: content.map(EagerContent::from_slice),
        loan_follows: false,
        checksum: line.agreed.validation.checksum(bytes).filter(|_| with_sum),
    }
}

pub(super) fn react(line: &Arc<Line>, message: &Message, rng: &mut Rng) {
    match message {
        Message::TensorRequest(_) | Message::TensorRequests(_) => {
            for request in message.requests() {
                answer_some_time(line, request, rng);
            }
        }
        Message::TensorReRequest(request) => {
            if rng.chance(1, 8) {
                return line.did("ignores RE_REQUEST");
            }
            let (_, mut bytes) = value_for(request.index);
            if rng.chance(1, 8) && !bytes.is_empty() {
                line.did("sends content that is too short");
                bytes.pop();
            }
            line.content(request.destination, &bytes, request.index.immediate(0));
            if rng.chance(1, 8) {
                line.did("sends a content twice");
                line.content(request.destination, &bytes, request.index.immediate(0));
            }
        }
        Message::BufferResponse(buffers) | Message::BufferIdle(buffers) => {
            subscribing::fill(line, buffers, rng);
        }
        Message::Cancel(index) => match rng.below(8) {
            0 => line.did("ignores CANCEL"),
            1 => {
                line.did("acknowledges a cancel twice");
                line.message(&Message::CancelAck(*index));
                line.message(&Message::CancelAck(*index));
            }
            _ => drop(line.message(&Message::CancelAck(*index))),
        },
        Message::MetaDataResponse(response) if response.content.is_none() && !response.loan_follows => {
            let bytes = response.metadata.byte_length as u32;
            let lent =
                line.rogue.lent.lend(bytes.max(1) + RESULT_SLOT_BYTES).map(|(_, _, destination)| destination);
            let Some(lent) = lent else { return };
            let result = line.agreed.has_result_slots().then_some(ResultSlot {
                region: lent.region,
                generation: lent.generation,
                offset: lent.offset + u64::from(bytes.max(1)),
            });
            let mut capacity = bytes.into();
            if rng.chance(1, 4) {
                line.did("names a destination that does not fit the value");
                capacity = rng.pick([0, 1, capacity / 2]);
            }
            let destination = (bytes > 0).then_some(Destination { capacity, result, ..lent });
            line.did("asks for a value as it should");
            line.message(&Message::TensorReRequest(TensorReRequest { index: response.index, destination }));
        }
        _ => {}
    }
}

/// Answers the next request of the honest worker, which it cannot send yet because it lacks credits.
pub(super) fn answer_too_soon(line: &Line, message: &Message) {
    let Some(latest) = message.requests().last() else { return };
    line.did("answers what was not asked for yet");
    for ahead in 1..3 {
        let (index, status) = (RequestIndex(latest.index.0 + ahead), Status::new(Code::Internal, "rogue"));
        line.message(&Message::ErrorStatus(ErrorStatus { index, status }));
    }
}

fn answer_some_time(line: &Arc<Line>, request: &TensorRequest, rng: &mut Rng) {
    if rng.chance(1, 6) {
        return line.did("never answers a request");
    }
    if !rng.chance(1, 6) {
        return answer(line, request, rng);
    }
    let (line, request, mut rng) = (line.clone(), request.clone(), Rng::new(rng.next_u64()));
    let node = line.rogue.node.clone();
    node.spawn("rogue answers late", async move {
        line.did("answers late");
        line.rogue.rest(&mut rng, Duration::from_secs(4)).await;
        answer(&line, &request, &mut rng);
    });
}

fn answer(line: &Line, request: &TensorRequest, rng: &mut Rng) {
    if matches!(request.want, Want::Each(_)) && rng.chance(5, 6) {
        return subscribing::answer(line, request.index, rng);
    }
    if rng.chance(5, 6) && paging::answer(line, request, rng) {
        return;
    }
    if rng.chance(1, 2) {
        return answer_well(line, request);
    }
    if matches!(request.scope, Scope::Versioned(_)) && rng.chance(1, 2) {
        line.did("leaves the version out");
        return with_value(line, request);
    }
    let index = request.index;
    let (_, bytes) = value_for(index);
    let meta = |content: Option<&[u8]>| response(line, index, &bytes, content);
    let destination = match request.want {
        Want::Write(destination) => destination,
        Want::Eager | Want::View | Want::Each(_) => None,
    };
    let version = Message::Version(VersionNotice { index, version: rng.next_u64() });
    match rng.below(11) {
        0 => {
            line.did("sends META_DATA_RESPONSE twice");
            line.message(&Message::MetaDataResponse(meta(None)));
            line.message(&Message::MetaDataResponse(meta(None)));
        }
        1 => {
            line.did("sends too much inside a message");
            let content = vec![7; line.agreed.eager_bytes_max as usize + 1];
            let response = response(line, index, &content, Some(&content));
            line.message(&Message::MetaDataResponse(response));
        }
        2 => {
            line.did("sends a checksum against the agreement");
            let checksum = if line.agreed.validation.is_on() { None } else { Some(5) };
            let most = bytes.len().min(line.agreed.eager_bytes_max as usize);
            let content = Some(EagerContent::from_slice(&bytes[..most]));
            line.message(&Message::MetaDataResponse(MetaDataResponse { checksum, content, ..meta(None) }));
        }
        3 => {
            line.did("promises a loan that was not asked for");
            let checksum = line.agreed.validation.checksum(&bytes);
            let response = MetaDataResponse { loan_follows: true, checksum, ..meta(None) };
            line.message(&Message::MetaDataResponse(response));
        }
        4 => {
            line.did("lends what was not asked for");
            lend(line, &[1; 64], index.immediate(0));
        }
        5 => {
            line.did("tells a version unasked, or twice");
            line.message(&version);
            line.message(&version);
        }
        _ => answer_strangely(line, request, (&bytes, destination), rng),
    }
}

fn answer_strangely(
    line: &Line,
    request: &TensorRequest,
    (bytes, destination): (&[u8], Option<Destination>),
    rng: &mut Rng,
) {
    let index = request.index;
    match rng.below(5) {
        0 => {
            line.did("sends content of unknown metadata");
            line.content(destination, bytes, index.immediate(3));
        }
        1 => {
            line.did("says that an error is the answer");
            let status = Status::new(Code::DataLoss, "rogue".repeat(rng.below(500)));
            line.message(&Message::ErrorStatus(ErrorStatus { index, status }));
        }
        2 => {
            line.did("writes on after the answer");
            answer_well(line, request);
            if let Some(destination) = destination {
                line.write(range_of(&destination, 0, 0), &[0xEE; 1], None);
            }
        }
        3 => {
            line.did("writes half and says nothing");
            if let Some(Destination { capacity: 2.., .. }) = destination
                && let Some(destination) = destination
            {
                line.write(range_of(&destination, 1, 0), &vec![9; destination.capacity as usize / 2], None);
            }
        }
        _ => {
            line.did("sends a wrong checksum");
            let content = &bytes[..bytes.len().min(line.agreed.eager_bytes_max as usize)];
            let good = response(line, index, content, Some(content));
            let checksum = good.checksum.map(|sum| sum ^ 1);
            line.message(&Message::MetaDataResponse(MetaDataResponse { checksum, ..good }));
        }
    }
}

/// Answers correctly.
fn answer_well(line: &Line, request: &TensorRequest) {
    let index = request.index;
    if matches!(request.scope, Scope::Versioned(_)) {
        line.message(&Message::Version(VersionNotice { index, version: 1 }));
    }
    with_value(line, request);
}

fn with_value(line: &Line, request: &TensorRequest) {
    let index = request.index;
    let (metadata, bytes) = value_for(index);
    let known = request.known.iter().position(|known| *known == metadata);
    match (request.want, known.filter(|_| !line.agreed.describes_first())) {
        (Want::View, which) if !bytes.is_empty() => {
            if which.is_none() {
                let checksum = line.agreed.validation.checksum(&bytes);
                let told =
                    MetaDataResponse { loan_follows: true, checksum, ..response(line, index, &bytes, None) };
                line.message(&Message::MetaDataResponse(told));
                return lend(line, &bytes, index.immediate(0));
            }
            lend(line, &bytes, index.immediate(which.unwrap_or(0)));
        }
        (Want::Write(destination), Some(which)) => line.content(destination, &bytes, index.immediate(which)),
        _ if bytes.len() <= line.agreed.eager_bytes_max as usize && line.agreed.eager_bytes_max > 0 => {
            line.message(&Message::MetaDataResponse(response(line, index, &bytes, Some(&bytes))));
        }
        _ => drop(line.message(&Message::MetaDataResponse(response(line, index, &bytes, None)))),
    }
}

fn lend(line: &Line, bytes: &[u8], immediate: u32) {
    let Some(mut local) = line.rogue.source.buffer(bytes.len()) else { return };
    local.copy_from_slice(bytes);
    // The request may fail, because the number of leases is limited.
    drop(line.queue_pair.lend_now(local.freeze(), Immediate(immediate)));
}
