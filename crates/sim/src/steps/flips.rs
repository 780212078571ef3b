//! Bits that flip in flight and that no checksum of the network detects.

use std::ops::Range;

use tensorwire_fabric::{Immediate, Purpose};
use tensorwire_protocol::{
    MESSAGE_IMMEDIATE, Message, Mode,
    limits::REQUESTS_PER_MESSAGE_MAX,
    names::NameTable,
    wire::record::{Record, decode_record},
};

use crate::{ids::EndpointId, shared::Shared, state::State, trace::Event};

/// Longest length prefix of a message.
const PREFIX: usize = 4;

impl Shared {
    /// Sometimes flips a bit of a content, or of a result slot, as it lands in memory.
    pub(crate) fn flip_payload(&self, state: &mut State, id: EndpointId, purpose: Purpose, bytes: &mut [u8]) {
        if purpose == Purpose::Payload {
            let all = 0..bytes.len();
            self.flip(state, id, "bit flipped", bytes, all);
        }
    }

    /// Sometimes flips a bit of a content inside a message. `piece` is the part of `whole` that was read.
    pub(crate) fn flip_message(
        &self,
        id: EndpointId,
        immediate: Option<Immediate>,
        whole: &[u8],
        (range, piece): (&Range<usize>, &mut [u8]),
    ) {
        let mut state = self.state();
        if state.flips_of_65536 == 0 || immediate != Some(Immediate(MESSAGE_IMMEDIATE)) {
            return;
        }
        let Some(content) = content_of(whole) else { return };
        let (start, end) = (content.start.max(range.start), content.end.min(range.end));
        if start < end {
            let inside = start - range.start..end - range.start;
            self.flip(&mut state, id, "bit of a message's content flipped", piece, inside);
        }
    }

    fn flip(
        &self,
        state: &mut State,
        endpoint: EndpointId,
        how: &'static str,
        bytes: &mut [u8],
        inside: Range<usize>,
    ) {
        if state.flips_of_65536 == 0 || inside.is_empty() {
            return;
        }
        if state.rng.chance(state.flips_of_65536, 1 << 16) {
            let (byte, bit) = (inside.start + state.rng.below(inside.len()), state.rng.below(8));
            if let Some(byte) = bytes.get_mut(byte) {
                *byte ^= 1 << bit;
            }
            self.ledger().flips += 1;
            self.record(Event::BitFlipped { endpoint, how });
        }
    }
}

/// The range of the content in a record of the message ring, if it has one: its last bytes.
fn content_of(record: &[u8]) -> Option<Range<usize>> {
    if record.len() < PREFIX {
        return None;
    }
    let (_, record_in) =
        decode_record(Mode::Counted, record, &mut NameTable::new(0), REQUESTS_PER_MESSAGE_MAX).ok()?;
    let Record::Message(Message::MetaDataResponse(response)) = record_in else { return None };
    let content = response.content?;
    let start = record.len().checked_sub(content.len())?;
    (!content.is_empty()).then_some(start..record.len())
}

#[cfg(test)]
mod tests {
    use tensorwire_protocol::{
        DataType, MetaDataResponse, Metadata, RequestIndex, Shape, credit::Counts, names::NameForm,
        wire::record::encode_message,
    };

    use super::*;

    fn encoded(content: Option<&[u8]>) -> Vec<u8> {
        let length = content.map_or(5, <[u8]>::len) as u64;
        let metadata = Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap();
        let response = MetaDataResponse {
            index: RequestIndex(3),
            metadata,
            content: content.map(tensorwire_protocol::EagerContent::from_slice),
            loan_follows: false,
            checksum: content.map(|_| 7),
        };
        let mut bytes = Vec::new();
        let counted = Some((Counts::default(), &[NameForm::Plain][..]));
        encode_message(counted, &Message::MetaDataResponse(response), &mut bytes);
        bytes
    }

    #[test]
    fn a_messages_content_is_found_and_nothing_else() {
        let bytes = encoded(Some(b"hello"));
        assert_eq!(bytes[content_of(&bytes).unwrap()], *b"hello");
        assert_eq!(content_of(&encoded(Some(b""))), None);
        assert_eq!(content_of(&encoded(None)), None);
        for cut in 0..bytes.len() {
            assert_eq!(content_of(&bytes[..cut]), None, "{cut}");
        }
    }
}
