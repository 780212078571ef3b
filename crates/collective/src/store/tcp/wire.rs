//! The protocol between client and server.
//!
//! All numbers are little-endian. A connection begins with a hello of each side, the client's first:
//!
//! | bytes | client | server |
//! | --- | --- | --- |
//! | 8 | magic | magic |
//! | 2 | version | version |
//! | 2 | 0 | 0: accepted; 1: too many connections |
//! | 4 | 0 | the limit of connections |
//! | 8 | 0 | a random number of this server |
//!
//! Frames follow: 4 bytes with the length of the rest, 8 with the request's number, 1 with the kind, and the fields of the kind.
//! A server answers requests in any order, and each at most once. A key has 2 bytes for its length, a value 4.

use super::super::{
    KEY_BYTES_MAX, VALUE_BYTES_MAX,
    board::{Counted, Refused, Value},
    rules::NoSum,
};

pub(super) const HELLO_BYTES: usize = 24;

/// The longest frame in bytes, without its length field.
pub(super) const FRAME_BYTES_MAX: usize = 4 << 20;

/// The shortest frame: a number and a kind.
pub(super) const FRAME_BYTES_MIN: usize = 9;

/// The length of a frame's length field.
pub(super) const LENGTH_BYTES: usize = 4;

/// The most keys in one request.
pub(super) const KEYS_MAX: usize = 4096;

/// The most bytes of keys in one request. `KEYS_MAX` short keys fit.
pub(super) const KEYS_BYTES_MAX: usize = 1 << 20;

pub(super) const VERSION: u16 = 1;

// No text protocol begins with these bytes.
const MAGIC: [u8; 8] = *b"\x89TWSTO\r\n";

const SET: u8 = 1;
const GET: u8 = 2;
const WAIT: u8 = 3;
const ADD: u8 = 4;
const COMPARE_SET: u8 = 5;
const DELETE: u8 = 6;
const CANCEL: u8 = 7;

const DONE: u8 = 129;
const VALUES: u8 = 130;
const MISSING: u8 = 131;
const NUMBER: u8 = 132;
const VALUE: u8 = 133;
const DELETED: u8 = 134;
const REFUSED: u8 = 135;

/// Why bytes are not valid in this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Malformed(pub(super) &'static str);

const fn malformed<T>(what: &'static str) -> Result<T, Malformed> {
    Err(Malformed(what))
}

/// The hello of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Welcome {
    pub(super) version: u16,
    /// The limit, if there are too many connections.
    pub(super) full: Option<u32>,
    /// Changes with each restart of the server.
    pub(super) instance: u64,
}

pub(super) fn client_hello() -> [u8; HELLO_BYTES] {
    Welcome { version: VERSION, full: None, instance: 0 }.encode()
}

/// The version of a client.
///
/// # Errors
/// [`Malformed`] if it is no client of a store.
pub(super) fn client_version(hello: &[u8; HELLO_BYTES]) -> Result<u16, Malformed> {
    Ok(Welcome::decode(hello)?.version)
}

impl Welcome {
    pub(super) fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = self.full.is_some().into();
        bytes[12..16].copy_from_slice(&self.full.unwrap_or(0).to_le_bytes());
        bytes[16..].copy_from_slice(&self.instance.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`Malformed`]. A later version has the same magic number, and its version in the same bytes.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        if fields.array()? != MAGIC {
            return malformed("it does not begin as a store does");
        }
        let version = u16::from_le_bytes(fields.array()?);
        let is_full = u16::from_le_bytes(fields.array()?) != 0;
        let limit = fields.u32()?;
        Ok(Self { version, full: is_full.then_some(limit), instance: fields.u64()? })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        keys: Vec<String>,
    },
    Wait {
        /// In microseconds.
        limit: u64,
        keys: Vec<String>,
    },
    Add {
        key: String,
        delta: i64,
    },
    CompareSet {
        key: String,
        expected: Option<Vec<u8>>,
        value: Vec<u8>,
    },
    Delete {
        key: String,
    },
    /// The answer to the request of this number is not needed. Has no answer itself.
    Cancel,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    /// The values of the request's first keys, as many as fit into a frame.
    Values(Vec<Option<Value>>),
    /// Which of the awaited keys are missing, as indices into the request.
    Missing(Vec<u32>),
    Number(i64),
    Value(Option<Value>),
    Deleted(bool),
    /// The reason, and the limit that was reached.
    Refused(Refused, u64),
}

impl Request {
    /// Whether it may happen twice: it reads, or writes the same value again.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self, Self::Set { .. } | Self::Get { .. } | Self::Wait { .. })
    }

    /// The whole frame. Keys and values have been checked.
    pub(super) fn encode(&self, number: u64) -> Vec<u8> {
        let mut frame = Frame::new(number, self.kind());
        match self {
            Self::Set { key, value } => frame.key(key).value(value),
            Self::Get { keys } => frame.keys(keys),
            Self::Wait { limit, keys } => frame.u64(*limit).keys(keys),
            Self::Add { key, delta } => frame.key(key).u64(delta.cast_unsigned()),
            Self::CompareSet { key, expected, value } => {
                frame.key(key).option(expected.as_deref()).value(value)
            }
            Self::Delete { key } => frame.key(key),
            Self::Cancel => &mut frame,
        };
        frame.end()
    }

    /// The number and the request of a frame without its length field.
    ///
    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(frame: &[u8]) -> Result<(u64, Self), Malformed> {
        let mut fields = Fields(frame);
        let (number, kind) = (fields.u64()?, fields.u8()?);
        let request = match kind {
            SET => Self::Set { key: fields.key()?, value: fields.value()?.to_vec() },
            GET => Self::Get { keys: fields.keys()? },
            WAIT => Self::Wait { limit: fields.u64()?, keys: fields.keys()? },
            ADD => Self::Add { key: fields.key()?, delta: fields.u64()?.cast_signed() },
            COMPARE_SET => Self::CompareSet {
                key: fields.key()?,
                expected: fields.option()?.map(<[u8]>::to_vec),
                value: fields.value()?.to_vec(),
            },
            DELETE => Self::Delete { key: fields.key()? },
            CANCEL => Self::Cancel,
            _ => return malformed("a request of an unknown kind"),
        };
        fields.end()?;
        Ok((number, request))
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Set { .. } => SET,
            Self::Get { .. } => GET,
            Self::Wait { .. } => WAIT,
            Self::Add { .. } => ADD,
            Self::CompareSet { .. } => COMPARE_SET,
            Self::Delete { .. } => DELETE,
            Self::Cancel => CANCEL,
        }
    }
}

impl Answer {
    /// The first of `values` that fit into a frame, at least one.
    pub(super) fn values(mut values: Vec<Option<Value>>) -> Self {
        let mut room = FRAME_BYTES_MAX - FRAME_BYTES_MIN - 4;
        let mut fits = |value: &Option<Value>| {
            let bytes = value.as_ref().map_or(1, |value| 5 + value.len());
            room.checked_sub(bytes).map(|rest| room = rest).is_some()
        };
        let count = values.iter().take_while(|value| fits(value)).count();
        values.truncate(count);
        Self::Values(values)
    }

    /// The whole frame.
    pub(super) fn encode(&self, number: u64) -> Vec<u8> {
        let mut frame = Frame::new(number, self.kind());
        match self {
            Self::Done => &mut frame,
            Self::Values(values) => {
                frame.count(values.len());
                values.iter().fold(&mut frame, |frame, value| frame.option(value.as_deref()))
            }
            Self::Missing(indices) => {
                frame.count(indices.len());
                indices.iter().fold(&mut frame, |frame, index| frame.u32(*index))
            }
            Self::Number(sum) => frame.u64(sum.cast_unsigned()),
            Self::Value(value) => frame.option(value.as_deref()),
            Self::Deleted(had_one) => frame.u8((*had_one).into()),
            Self::Refused(why, limit) => frame.u8(code(*why)).u64(*limit),
        };
        frame.end()
    }

    /// The request's number and the answer of a frame without its length field.
    ///
    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(frame: &[u8]) -> Result<(u64, Self), Malformed> {
        let mut fields = Fields(frame);
        let (number, kind) = (fields.u64()?, fields.u8()?);
        let answer = match kind {
            DONE => Self::Done,
            VALUES => {
                let count = fields.count()?;
                let value = |_| Ok(fields.option()?.map(Value::from));
                Self::Values((0..count).map(value).collect::<Result<_, _>>()?)
            }
            MISSING => {
                let count = fields.count()?;
                Self::Missing((0..count).map(|_| fields.u32()).collect::<Result<_, _>>()?)
            }
            NUMBER => Self::Number(fields.u64()?.cast_signed()),
            VALUE => Self::Value(fields.option()?.map(Value::from)),
            DELETED => Self::Deleted(fields.flag()?),
            REFUSED => Self::Refused(why(fields.u8()?)?, fields.u64()?),
            _ => return malformed("an answer of an unknown kind"),
        };
        fields.end()?;
        Ok((number, answer))
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Done => DONE,
            Self::Values(_) => VALUES,
            Self::Missing(_) => MISSING,
            Self::Number(_) => NUMBER,
            Self::Value(_) => VALUE,
            Self::Deleted(_) => DELETED,
            Self::Refused(..) => REFUSED,
        }
    }
}

fn code(why: Refused) -> u8 {
    match why {
        Refused::NoSum(NoSum::NotANumber) => 1,
        Refused::NoSum(NoSum::Overflow) => 2,
        Refused::Full(Counted::Connections) => 3,
        Refused::Full(Counted::Keys) => 4,
        Refused::Full(Counted::Bytes) => 5,
        Refused::Full(Counted::Waits) => 6,
    }
}

fn why(code: u8) -> Result<Refused, Malformed> {
    match code {
        1 => Ok(Refused::NoSum(NoSum::NotANumber)),
        2 => Ok(Refused::NoSum(NoSum::Overflow)),
        3 => Ok(Refused::Full(Counted::Connections)),
        4 => Ok(Refused::Full(Counted::Keys)),
        5 => Ok(Refused::Full(Counted::Bytes)),
        6 => Ok(Refused::Full(Counted::Waits)),
        _ => malformed("a refusal for an unknown reason"),
    }
}

/// The length of the frame at the start of `bytes`, without its length field. `None` if that is incomplete.
///
/// # Errors
/// [`Malformed`] if the length is out of range.
pub(super) fn frame_length(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&length) {
        return malformed("a frame of a length that no frame has");
    }
    Ok(Some(length))
}

/// A frame being written.
struct Frame(Vec<u8>);

impl Frame {
    fn new(number: u64, kind: u8) -> Self {
        let mut frame = Self(vec![0; LENGTH_BYTES]);
        frame.u64(number).u8(kind);
        frame
    }

    fn u8(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    fn u32(&mut self, number: u32) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn u64(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn key(&mut self, key: &str) -> &mut Self {
        // At most `KEY_BYTES_MAX`, which fits `u16`.
        self.0.extend_from_slice(&(key.len() as u16).to_le_bytes());
        self.0.extend_from_slice(key.as_bytes());
        self
    }

    fn count(&mut self, count: usize) -> &mut Self {
        // At most `KEYS_MAX` or `VALUE_BYTES_MAX`, which fit `u32`.
        self.u32(count as u32)
    }

    fn keys(&mut self, keys: &[String]) -> &mut Self {
        self.count(keys.len());
        keys.iter().fold(self, |frame, key| frame.key(key))
    }

    fn value(&mut self, value: &[u8]) -> &mut Self {
        self.count(value.len());
        self.0.extend_from_slice(value);
        self
    }

    fn option(&mut self, value: Option<&[u8]>) -> &mut Self {
        match value {
            Some(value) => self.u8(1).value(value),
            None => self.u8(0),
        }
    }

    fn end(mut self) -> Vec<u8> {
        // At most `FRAME_BYTES_MAX`, which fits `u32`.
        let length = (self.0.len() - LENGTH_BYTES) as u32;
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// The rest of a frame being read. Every length is compared with it before anything is allocated.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let Some((taken, rest)) = self.0.split_at_checked(count) else {
            return malformed("a frame that ends too early");
        };
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some((taken, rest)) = self.0.split_first_chunk() else {
            return malformed("a frame that ends too early");
        };
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => malformed("a flag that is neither 0 nor 1"),
        }
    }

    fn key(&mut self) -> Result<String, Malformed> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if !(1..=KEY_BYTES_MAX).contains(&length) {
            return malformed("a key of a length that no key has");
        }
        let Ok(key) = std::str::from_utf8(self.bytes(length)?) else {
            return malformed("a key that is not UTF-8");
        };
        Ok(key.to_owned())
    }

    fn count(&mut self) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        if count > KEYS_MAX {
            return malformed("more keys than a request has");
        }
        Ok(count)
    }

    fn keys(&mut self) -> Result<Vec<String>, Malformed> {
        let count = self.count()?;
        (0..count).map(|_| self.key()).collect()
    }

    fn value(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        if length > VALUE_BYTES_MAX {
            return malformed("a value longer than values are");
        }
        self.bytes(length)
    }

    fn option(&mut self) -> Result<Option<&'a [u8]>, Malformed> {
        if self.flag()? { self.value().map(Some) } else { Ok(None) }
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { malformed("a frame with bytes after its end") }
    }
}

#[cfg(test)]
mod tests;
