//! What a rogue does with subscriptions: those of honest workers, and its own.

use tensorwire_protocol::{
    BufferRequest, Buffers, Message, RequestIndex, Scope, SubscriptionTerms, TensorRequest, TensorWrite,
    Want, Wanted, limits::SUBSCRIPTION_VALUES_MAX,
};
use tensorwire_sim::Rng;

use super::{answers, line::Line};

/// A value in TENSOR_WRITE.
fn write(line: &Line, index: RequestIndex, (sequence, bytes): (u64, &[u8])) -> Message {
    let fits = bytes.len() <= line.agreed.eager_bytes_max as usize;
    let value = answers::response(line, index, bytes, fits.then_some(bytes));
    let checksum = line.agreed.validation.checksum(bytes);
    let value = tensorwire_protocol::MetaDataResponse { checksum, ..value };
    Message::TensorWrite(TensorWrite { version: sequence, sequence, began: sequence / 2, value })
}

/// Answers the subscription of an honest worker, in some way.
pub(super) fn answer(line: &Line, index: RequestIndex, rng: &mut Rng) {
    let (metadata, bytes) = Line::value(rng);
    match rng.below(6) {
        0 => {
            line.did("requests buffers twice");
            let request = Message::BufferRequest(BufferRequest { index, metadata });
            line.message(&request);
            line.message(&request);
        }
        1 => {
            line.did("sends more values than it may");
            for sequence in 1..70 {
                line.message(&write(line, index, (sequence, &[])));
            }
        }
        2 => {
            line.did("sends a value without a buffer");
            let value = answers::response(line, index, &[7; 64], None);
            let checksum = line.agreed.validation.checksum(&[7; 64]);
            let value = tensorwire_protocol::MetaDataResponse { checksum, ..value };
            line.message(&Message::TensorWrite(TensorWrite { version: 1, sequence: 1, began: 1, value }));
        }
        3 => {
            line.did("requests a buffer and leaves it");
            line.message(&Message::BufferRequest(BufferRequest { index, metadata }));
        }
        _ => {
            line.did("sends a value to a subscriber");
            let sequence = rng.pick([0, 1, 9, u64::MAX]);
            line.message(&write(line, index, (sequence, &bytes)));
        }
    }
}

/// Puts values into the buffers that an honest worker has named, or does not.
pub(super) fn fill(line: &Line, buffers: &Buffers, rng: &mut Rng) {
    let Some(destination) = buffers.destinations.first() else { return };
    let bytes = vec![rng.next_u64() as u8; destination.capacity.min(5000) as usize];
    if rng.chance(1, 4) {
        return line.did("leaves the buffers empty");
    }
    line.did("fills a buffer");
    line.uncounted(*destination, &bytes);
    let value = answers::response(line, buffers.index, &bytes, None);
    let checksum = line.agreed.validation.checksum(&bytes);
    let value = tensorwire_protocol::MetaDataResponse { checksum, ..value };
    line.message(&Message::TensorWrite(TensorWrite { version: 2, sequence: 2, began: 1, value }));
    if rng.chance(1, 3) {
        line.did("writes a buffer again");
        line.uncounted(*destination, &vec![!bytes[0]; bytes.len()]);
    }
}

/// Subscribes to a value of an honest worker, and continues in any way.
pub(super) fn subscribe(line: &Line, rng: &mut Rng) {
    line.did("subscribes");
    let index = RequestIndex(line.next_index());
    let wanted = Wanted::NewerThan { incarnation: 0, version: 0 };
    let terms = SubscriptionTerms {
        values: rng.pick([1, 2, SUBSCRIPTION_VALUES_MAX]),
        every: rng.chance(1, 2),
        view: rng.chance(1, 2),
    };
    let is_plain = rng.chance(1, 4);
    let request = TensorRequest {
        index,
        scope: if rng.chance(1, 8) { Scope::Published } else { Scope::Versioned(wanted) },
        key: rng.pick(["p0", "p1", "none"]).into(),
        known: [].into(),
        want: if is_plain { Want::Write(None) } else { Want::Each(terms) },
        arguments: None,
    };
    line.message(&Message::TensorRequest(request));
    let destinations = line.rogue.lent.lend(64).map(|(_, _, lent)| lent).into_iter().collect();
    let buffers = Buffers { index, values: 0, destinations };
    match rng.below(4) {
        0 => {
            line.did("returns values that it never had");
            let idle =
                Buffers { values: SUBSCRIPTION_VALUES_MAX, destinations: Default::default(), ..buffers };
            line.message(&Message::BufferIdle(idle));
        }
        1 => {
            line.did("names buffers unasked");
            line.message(&Message::BufferResponse(buffers));
        }
        2 => {
            line.did("names idle buffers before others");
            line.message(&Message::BufferIdle(buffers));
        }
        _ => {}
    }
}

/// A message of a subscription for any request.
pub(super) fn unasked(line: &Line, index: RequestIndex, rng: &mut Rng) {
    line.did("sends a message of a subscription that may not be");
    let (metadata, bytes) = Line::value(rng);
    let values = rng.pick([0, 1, SUBSCRIPTION_VALUES_MAX]);
    let message = match rng.below(3) {
        0 => Message::BufferRequest(BufferRequest { index, metadata }),
        1 => Message::BufferIdle(Buffers { index, values, destinations: Default::default() }),
        _ => write(line, index, (1, &bytes)),
    };
    line.message(&message);
}
