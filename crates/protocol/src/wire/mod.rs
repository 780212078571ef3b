//! Encoding: explicit, little-endian, length-prefixed. Every check of a length or an enum is in this module:
//! what [`decode`] returns is within all [limits](crate::limits).
//!
//! A frame is a `u32` total length (prefix included), a `u8` kind and the fields of that kind. Texts and byte
//! strings have a `u16` length, optional fields a `u8` that is 0 or 1. Names that are not safe to show are refused, and
//! messages of statuses are escaped ([`text`](crate::text)). A
//! destination has a `u8` before it that is 0 without one, 1, or 2 if a result slot (region, generation, offset) comes
//! first; META_DATA_RESPONSE's `u8` for how the content comes is 0x80 higher if a checksum (`u64`) follows it. The version is agreed once, in
//! [`ControlFrame::Hello`](control::ControlFrame::Hello). The records of a ring are in [`record`].

use std::sync::Arc;

mod codec;
pub mod control;
#[cfg(test)]
mod layout;
pub mod record;
mod scope;
pub mod tensors;

pub use crate::WireError;
pub(crate) use codec::check_metadata;
use codec::{Reader, Writer};

use crate::{
    BufferRequest, Buffers, EagerContent, ErrorStatus, Message, MetaDataResponse, Metadata, Note,
    RequestIndex, SubscriptionTerms, TensorReRequest, TensorRequest, TensorWrite, VersionNotice, Want,
    limits::{
        EAGER_BYTES_MAX, KNOWN_METADATA_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX, NOTE_BYTES_MAX,
        REQUESTS_PER_MESSAGE_MAX, SUBSCRIPTION_VALUES_MAX,
    },
    message::kind,
    names::{NameForm, NameTable},
};

/// Bytes of the shortest request: index, scope, a key by its number, no metadata, and how it wants the content.
const REQUEST_BYTES_MIN: usize = 4 + 1 + 3 + 1 + 1;

const NAME_PLAIN: u8 = 0;
const NAME_DEFINED: u8 = 1;
const NAME_NUMBER: u8 = 2;
const WANT_WRITE: u8 = 0;
const WANT_EAGER: u8 = 1;
const WANT_VIEW: u8 = 2;
/// A subscription. The number of values and the flags below follow.
const WANT_EACH: u8 = 3;

const EACH_EVERY: u8 = 1;
const EACH_VIEW: u8 = 2;

const CONTENT_ASKED: u8 = 0;
const CONTENT_HERE: u8 = 1;
const CONTENT_LENT: u8 = 2;
/// Added to one of these: a checksum comes first.
const CONTENT_CHECKED: u8 = 0x80;

/// Length prefix and kind.
const FRAME_BYTES_MIN: usize = 5;

/// The encoded form of `message`. A status text above its limit is cut at a character. A key above
/// [`NAME_BYTES_MAX`] makes a frame that every peer refuses; [`Connection`](crate::Connection) never sends one.
pub fn encode(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_into(message, &mut bytes);
    bytes
}

/// Appends the encoded form of `message` to `into`.
pub fn encode_into(message: &Message, into: &mut Vec<u8>) {
    codec::frame(into, |writer| write_message(writer, message, None));
}

/// Kind and fields. Requests name their keys in `forms`, one each; without forms, by the key alone.
fn write_message(writer: &mut Writer<'_>, message: &Message, forms: Option<&[NameForm]>) {
    writer.u8(message.kind());
    match message {
        Message::TensorRequest(request) => write_request(writer, request, form_of(forms, 0)),
        Message::TensorRequests(requests) => {
            writer.count(requests.len());
            for (at, request) in requests.iter().enumerate() {
                write_request(writer, request, form_of(forms, at));
            }
        }
        Message::MetaDataResponse(response) => write_meta_data_response(writer, response),
        Message::TensorReRequest(request) => {
            writer.u32(request.index.0);
            writer.target(request.destination);
        }
        Message::ErrorStatus(error) => {
            writer.u32(error.index.0);
            writer.status(&error.status);
        }
        Message::Cancel(index) | Message::CancelAck(index) => writer.u32(index.0),
        Message::Version(notice) => {
            writer.u32(notice.index.0);
            writer.u64(notice.version);
        }
        Message::Note(note) => {
            writer.u64(note.channel);
            writer.u16(note.lane);
            writer.bytes(&note.bytes);
        }
        Message::BufferRequest(request) => {
            writer.u32(request.index.0);
            writer.metadata(&request.metadata);
        }
        Message::BufferResponse(buffers) | Message::BufferIdle(buffers) => write_buffers(writer, buffers),
        Message::TensorWrite(write) => {
            writer.u64(write.version);
            writer.u64(write.sequence);
            writer.u64(write.began);
            write_meta_data_response(writer, &write.value);
        }
    }
}

fn write_buffers(writer: &mut Writer<'_>, Buffers { index, values, destinations }: &Buffers) {
    writer.u32(index.0);
    writer.u8(*values);
    writer.u8(u8::try_from(destinations.len()).unwrap_or(u8::MAX));
    destinations.iter().for_each(|destination| writer.target(Some(*destination)));
}

/// The form of the key of request number `at`.
fn form_of(forms: Option<&[NameForm]>, at: usize) -> Option<NameForm> {
    forms.map(|forms| forms.get(at).copied().unwrap_or(NameForm::Plain))
}

/// Bytes that `request`, whose key is named in `form`, takes in a ring record that others share with it. `scratch` is
/// overwritten.
pub(crate) fn request_bytes(request: &TensorRequest, form: NameForm, scratch: &mut Vec<u8>) -> usize {
    scratch.clear();
    codec::frame(scratch, |writer| write_request(writer, request, Some(form)));
    scratch.len().saturating_sub(4)
}

/// The fields of a request.
fn write_request(writer: &mut Writer<'_>, request: &TensorRequest, form: Option<NameForm>) {
    writer.u32(request.index.0);
    scope::write(writer, request.scope);
    write_name(writer, &request.key, form);
    writer.u8(u8::try_from(request.known.len()).unwrap_or(u8::MAX));
    request.known.iter().for_each(|metadata| writer.metadata(metadata));
    match request.want {
        Want::Write(destination) => {
            writer.u8(WANT_WRITE);
            writer.target(destination);
        }
        Want::Eager => writer.u8(WANT_EAGER),
        Want::View => writer.u8(WANT_VIEW),
        Want::Each(SubscriptionTerms { values, every, view }) => {
            writer.u8(WANT_EACH);
            writer.u8(values);
            writer.u8(if every { EACH_EVERY } else { 0 } | if view { EACH_VIEW } else { 0 });
        }
    }
    if request.scope.has_arguments() {
        writer.bytes(request.arguments.as_deref().unwrap_or_default());
    }
}

/// META_DATA_RESPONSE with a content, which is not copied before it is encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EagerResponse<'value> {
    pub(crate) index: RequestIndex,
    pub(crate) metadata: &'value Metadata,
    pub(crate) checksum: Option<u64>,
    /// Bytes of the content, at most [`EAGER_BYTES_MAX`].
    pub(crate) length: u64,
}

impl<'value> EagerResponse<'value> {
    /// With all bytes of a value of `metadata`.
    pub(crate) fn new(index: RequestIndex, metadata: &'value Metadata, checksum: Option<u64>) -> Self {
        Self { index, metadata, checksum, length: metadata.byte_length }
    }
}

/// Kind and fields of META_DATA_RESPONSE with the content that `content` appends.
fn write_eager(writer: &mut Writer<'_>, response: EagerResponse<'_>, content: impl FnOnce(&mut Vec<u8>)) {
    writer.u8(kind::META_DATA_RESPONSE);
    write_eager_fields(writer, response, content);
}

fn write_eager_fields(
    writer: &mut Writer<'_>,
    response: EagerResponse<'_>,
    content: impl FnOnce(&mut Vec<u8>),
) {
    let EagerResponse { index, metadata, checksum, length } = response;
    write_description(writer, index, metadata, CONTENT_HERE, checksum);
    writer.appended(length, content);
}

/// Fields of META_DATA_RESPONSE, without the content.
fn write_description(
    writer: &mut Writer<'_>,
    index: RequestIndex,
    metadata: &Metadata,
    how: u8,
    checksum: Option<u64>,
) {
    writer.u32(index.0);
    writer.metadata(metadata);
    match checksum {
        None => writer.u8(how),
        Some(checksum) => {
            writer.u8(how | CONTENT_CHECKED);
            writer.u64(checksum);
        }
    }
}

fn write_meta_data_response(writer: &mut Writer<'_>, response: &MetaDataResponse) {
    let MetaDataResponse { index, ref metadata, ref content, loan_follows, checksum } = *response;
    match content {
        Some(content) => {
            let length = content.len() as u64;
            let response = EagerResponse { index, metadata, checksum, length };
            write_eager_fields(writer, response, |into| into.extend_from_slice(content));
        }
        None => {
            let how = if loan_follows { CONTENT_LENT } else { CONTENT_ASKED };
            write_description(writer, index, metadata, how, checksum);
        }
    }
}

fn write_name(writer: &mut Writer<'_>, key: &str, form: Option<NameForm>) {
    match form {
        None => writer.text(key),
        Some(NameForm::Plain) => {
            writer.u8(NAME_PLAIN);
            writer.text(key);
        }
        Some(NameForm::Define(number)) => {
            writer.u8(NAME_DEFINED);
            writer.u16(number);
            writer.text(key);
        }
        Some(NameForm::Number(number)) => {
            writer.u8(NAME_NUMBER);
            writer.u16(number);
        }
    }
}

fn read_name(reader: &mut Reader<'_>, names: Option<&mut NameTable>) -> Result<Arc<str>, WireError> {
    let Some(names) = names else { return read_key(reader) };
    match reader.u8("key form")? {
        NAME_PLAIN => read_key(reader),
        NAME_DEFINED => {
            let number = reader.u16("key number")?;
            let key = read_key(reader)?;
            if names.define(number, key.clone()) { Ok(key) } else { Err(WireError::UnknownName(number)) }
        }
        NAME_NUMBER => {
            let number = reader.u16("key number")?;
            names.get(number).ok_or(WireError::UnknownName(number))
        }
        value => Err(WireError::Unknown { field: "key form", value: value.into() }),
    }
}

fn read_key(reader: &mut Reader<'_>) -> Result<Arc<str>, WireError> {
    reader.name("key", NAME_BYTES_MAX).map(Arc::from)
}

/// The length of the frame that starts with `prefix`, prefix included.
///
/// # Errors
/// [`WireError::Truncated`] or [`WireError::TooLong`] when no message is that long.
pub fn encoded_length(prefix: [u8; 4]) -> Result<usize, WireError> {
    frame_length(prefix, MESSAGE_BYTES_MAX)
}

fn frame_length(prefix: [u8; 4], limit: usize) -> Result<usize, WireError> {
    let length = u32::from_le_bytes(prefix) as usize;
    match length {
        0..FRAME_BYTES_MIN => Err(WireError::Truncated { field: "frame" }),
        _ if length > limit => Err(WireError::TooLong { field: "frame", length, limit }),
        _ => Ok(length),
    }
}

fn open_frame(bytes: &[u8], limit: usize) -> Result<Reader<'_>, WireError> {
    let prefix = bytes.first_chunk().ok_or(WireError::Truncated { field: "frame" })?;
    Reader::new(bytes, frame_length(*prefix, limit)?)
}

/// The message that `bytes` encode, all of them.
///
/// # Errors
/// [`WireError`] names what is wrong; the peer is faulty or hostile.
pub fn decode(bytes: &[u8]) -> Result<Message, WireError> {
    let mut reader = open_frame(bytes, MESSAGE_BYTES_MAX)?;
    let kind = reader.u8("kind")?;
    let message = read_message(kind, &mut reader, None, REQUESTS_PER_MESSAGE_MAX)?;
    reader.end()?;
    Ok(message)
}

/// The fields of a message of this kind, with at most so many requests. With `names`, requests name their keys in one
/// of several forms.
#[inline(always)]
fn read_message(
    kind: u8,
    reader: &mut Reader<'_>,
    names: Option<&mut NameTable>,
    requests_per_message: u32,
) -> Result<Message, WireError> {
    Ok(match kind {
        kind::TENSOR_REQUEST => Message::TensorRequest(read_request(reader, names)?),
        kind::TENSOR_REQUESTS => Message::TensorRequests(read_requests(reader, names, requests_per_message)?),
        kind::META_DATA_RESPONSE => Message::MetaDataResponse(read_meta_data_response(reader, names)?),
        kind::TENSOR_RE_REQUEST => {
            let (index, destination) = (reader.index()?, reader.target()?);
            Message::TensorReRequest(TensorReRequest { index, destination })
        }
        kind::ERROR_STATUS => {
            let (index, status) = (reader.index()?, reader.status()?);
            Message::ErrorStatus(ErrorStatus { index, status })
        }
        kind::CANCEL => Message::Cancel(reader.index()?),
        kind::CANCEL_ACK => Message::CancelAck(reader.index()?),
        kind::VERSION => {
            let (index, version) = (reader.index()?, reader.u64("version")?);
            Message::Version(VersionNotice { index, version })
        }
        kind::NOTE => {
            let (channel, lane) = (reader.u64("channel")?, reader.u16("lane")?);
            let bytes = EagerContent::from_slice(reader.bytes("note", NOTE_BYTES_MAX)?);
            Message::Note(Note { channel, lane, bytes })
        }
        kind::BUFFER_REQUEST => Message::BufferRequest(read_buffer_request(reader)?),
        kind::BUFFER_RESPONSE => Message::BufferResponse(read_buffers(reader)?),
        kind::BUFFER_IDLE => Message::BufferIdle(read_buffers(reader)?),
        kind::TENSOR_WRITE => {
            let (version, sequence) = (reader.u64("version")?, reader.u64("sequence")?);
            let began = reader.u64("first version")?;
            let value = read_meta_data_response(reader, names)?;
            Message::TensorWrite(TensorWrite { version, sequence, began, value })
        }
        _ => return Err(WireError::Unknown { field: "kind", value: kind.into() }),
    })
}

fn read_buffer_request(reader: &mut Reader<'_>) -> Result<BufferRequest, WireError> {
    let (index, metadata) = (reader.index()?, reader.metadata()?);
    if metadata.byte_length == 0 {
        return Err(WireError::Inconsistent { field: "byte length" });
    }
    Ok(BufferRequest { index, metadata })
}

fn read_buffers(reader: &mut Reader<'_>) -> Result<Buffers, WireError> {
    let (index, values) = (reader.index()?, reader.u8("values")?);
    let count = reader.u8("buffers")?;
    if count > SUBSCRIPTION_VALUES_MAX || values > SUBSCRIPTION_VALUES_MAX {
        let (length, limit) = (usize::from(count.max(values)), SUBSCRIPTION_VALUES_MAX.into());
        return Err(WireError::TooLong { field: "buffers", length, limit });
    }
    let destination = |_| reader.target()?.ok_or(WireError::Inconsistent { field: "destination" });
    let destinations = (0..count).map(destination).collect::<Result<_, _>>()?;
    Ok(Buffers { index, values, destinations })
}

fn read_terms(reader: &mut Reader<'_>) -> Result<SubscriptionTerms, WireError> {
    let (values, flags) = (reader.u8("values")?, reader.u8("flags")?);
    if values == 0 || values > SUBSCRIPTION_VALUES_MAX {
        let (value, maximum) = (values.into(), SUBSCRIPTION_VALUES_MAX.into());
        return Err(WireError::OutOfRange { field: "values", value, minimum: 1, maximum });
    }
    if flags & !(EACH_EVERY | EACH_VIEW) != 0 {
        return Err(WireError::Unknown { field: "flags", value: flags.into() });
    }
    Ok(SubscriptionTerms { values, every: flags & EACH_EVERY != 0, view: flags & EACH_VIEW != 0 })
}

/// Several requests. A single request has a kind of its own, so that every message has exactly one encoding.
fn read_requests(
    reader: &mut Reader<'_>,
    mut names: Option<&mut NameTable>,
    requests_per_message: u32,
) -> Result<Vec<TensorRequest>, WireError> {
    let count = reader.count("requests", requests_per_message as usize, REQUEST_BYTES_MIN)?;
    if count < 2 {
        return Err(WireError::Inconsistent { field: "requests" });
    }
    (0..count).map(|_| read_request(reader, names.as_deref_mut())).collect()
}

#[inline(always)]
fn read_request(
    reader: &mut Reader<'_>,
    mut names: Option<&mut NameTable>,
) -> Result<TensorRequest, WireError> {
    let index = reader.index()?;
    let scope = scope::read(reader)?;
    let key = read_name(reader, names.as_deref_mut())?;
    let known = match names {
        Some(names) => reader.repeated(&mut names.known, read_known)?,
        None => read_known(reader)?,
    };
    let want = match reader.u8("want")? {
        WANT_WRITE => Want::Write(reader.target()?),
        WANT_EAGER => Want::Eager,
        WANT_VIEW => Want::View,
        WANT_EACH => Want::Each(read_terms(reader)?),
        value => return Err(WireError::Unknown { field: "want", value: value.into() }),
    };
    check_want(&known, want)?;
    let arguments = if scope.has_arguments() {
        Some(Arc::from(reader.bytes("arguments", EAGER_BYTES_MAX as usize)?))
    } else {
        None
    };
    Ok(TensorRequest { index, scope, key, known, want, arguments })
}

#[inline(always)]
fn read_meta_data_response(
    reader: &mut Reader<'_>,
    names: Option<&mut NameTable>,
) -> Result<MetaDataResponse, WireError> {
    let index = reader.index()?;
    let metadata = match names {
        Some(names) => reader.repeated(&mut names.described, Reader::metadata)?,
        None => reader.metadata()?,
    };
    let Content { content, loan_follows, checksum } = read_content(reader)?;
    check_content(&metadata, content, loan_follows)?;
    let content = content.map(EagerContent::from_slice);
    Ok(MetaDataResponse { index, metadata, content, loan_follows, checksum })
}

/// How META_DATA_RESPONSE describes the content.
struct Content<'bytes> {
    /// It is in the message.
    content: Option<&'bytes [u8]>,
    loan_follows: bool,
    checksum: Option<u64>,
}

fn read_content<'bytes>(reader: &mut Reader<'bytes>) -> Result<Content<'bytes>, WireError> {
    let how = reader.u8("content")?;
    let checksum = if how & CONTENT_CHECKED == 0 { None } else { Some(reader.u64("checksum")?) };
    let (content, loan_follows) = match how & !CONTENT_CHECKED {
        CONTENT_ASKED => (None, false),
        CONTENT_HERE => (Some(reader.bytes("content", EAGER_BYTES_MAX as usize)?), false),
        CONTENT_LENT => (None, true),
        _ => return Err(WireError::Unknown { field: "content", value: how.into() }),
    };
    Ok(Content { content, loan_follows, checksum })
}

fn read_known(reader: &mut Reader<'_>) -> Result<Arc<[Metadata]>, WireError> {
    let count = usize::from(reader.u8("known metadata")?);
    if count > KNOWN_METADATA_MAX {
        let limit = KNOWN_METADATA_MAX;
        return Err(WireError::TooLong { field: "known metadata", length: count, limit });
    }
    if count == 1 {
        // Most requests name one, which needs no list besides.
        return Ok(Arc::new([reader.metadata()?]));
    }
    (0..count).map(|_| reader.metadata()).collect()
}

/// A destination is present exactly when a known value has bytes, and is large enough for the largest. Eager content is asked
/// for where each known value has bytes, and few.
fn check_want(known: &[Metadata], want: Want) -> Result<(), WireError> {
    let needed = known.iter().map(|metadata| metadata.byte_length).max().unwrap_or(0);
    let fits = match want {
        Want::Write(Some(destination)) => needed > 0 && destination.capacity >= needed,
        Want::Write(None) => needed == 0,
        Want::Eager => needed > 0 && needed <= u64::from(EAGER_BYTES_MAX),
        Want::View => true,
        Want::Each(_) => known.is_empty(),
    };
    if fits { Ok(()) } else { Err(WireError::Inconsistent { field: "want" }) }
}

/// Content has the length that the metadata declares; no loan is announced where there are no bytes.
fn check_content(metadata: &Metadata, content: Option<&[u8]>, loan_follows: bool) -> Result<(), WireError> {
    match content {
        None if loan_follows && metadata.byte_length == 0 => {
            Err(WireError::Inconsistent { field: "content" })
        }
        Some(content) if content.len() as u64 != metadata.byte_length => {
            Err(WireError::Inconsistent { field: "content" })
        }
        _ => Ok(()),
    }
}
