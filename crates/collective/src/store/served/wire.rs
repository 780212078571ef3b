//! The requests to a store and their answers, as the bodies of store frames.
//!
//! All numbers are little-endian. A body has 1 byte with its kind, and the fields of the kind. A key has 2 bytes for its length, a
//! value 4.

use std::time::Duration;

use super::super::{
    KEY_BYTES_MAX, VALUE_BYTES_MAX,
    board::{Counted, Refused},
    request::{Answer, Request, Value},
    rules::NoSum,
};

/// The most bytes of values in one answer. The longest value fits.
const VALUES_BYTES_MAX: usize = VALUE_BYTES_MAX;

/// The most keys in one request.
const KEYS_MAX: usize = 4096;

/// How much of an operation one request takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    keys: usize,
    /// Of all keys together.
    bytes: usize,
}

impl Part {
    pub(super) const READ: Self = Self { keys: KEYS_MAX, bytes: 256 << 10 };

    /// The server holds the keys of all waits, and each of thousands of ranks may wait for all ranks.
    pub(super) const WAIT: Self = Self { keys: 256, bytes: 64 << 10 };

    /// The first of `keys` that fit into one request, at least one.
    pub(super) fn of(self, keys: &[String]) -> &[String] {
        let mut bytes = 0;
        let fits = |key: &&String| {
            bytes += key.len();
            bytes <= self.bytes
        };
        &keys[..keys.iter().take(self.keys).take_while(fits).count()]
    }
}

const SET: u8 = 1;
const GET: u8 = 2;
const WAIT: u8 = 3;
const ADD: u8 = 4;
const COMPARE_SET: u8 = 5;
const DELETE: u8 = 6;

const DONE: u8 = 129;
const VALUES: u8 = 130;
const MISSING: u8 = 131;
const NUMBER: u8 = 132;
const VALUE: u8 = 133;
const DELETED: u8 = 134;
const REFUSED: u8 = 135;

/// Why bytes are no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Malformed(pub(super) &'static str);

const fn malformed<T>(what: &'static str) -> Result<T, Malformed> {
    Err(Malformed(what))
}

/// The answer of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Response {
    /// If it has values: those of the request's first keys, as many as fit.
    Answer(Answer),
    /// Which of the awaited keys are missing, as indices into the request.
    Missing(Vec<u32>),
    /// The reason, and the limit that was reached.
    Refused(Refused, u64),
}

impl Request {
    /// A wait for `keys`.
    pub(super) fn wait(limit: Duration, keys: &[String]) -> Self {
        Self::Wait { limit: u64::try_from(limit.as_micros()).unwrap_or(u64::MAX), keys: keys.to_vec() }
    }

    /// Whether it may happen twice: it reads, or writes the same value again.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self, Self::Set { .. } | Self::Get { .. } | Self::Wait { .. })
    }

    /// Keys and values have been checked.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Frame(vec![self.kind()]);
        match self {
            Self::Set { key, value } => frame.key(key).value(value),
            Self::Get { keys } => frame.keys(keys),
            Self::Wait { limit, keys } => frame.u64(*limit).keys(keys),
            Self::Add { key, delta } => frame.key(key).u64(delta.cast_unsigned()),
            Self::CompareSet { key, expected, value } => {
                frame.key(key).option(expected.as_deref()).value(value)
            }
            Self::Delete { key } => frame.key(key),
        };
        frame.0
    }

    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(body);
        let request = match fields.u8()? {
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
            _ => return malformed("a request of an unknown kind"),
        };
        fields.end()?;
        Ok(request)
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Set { .. } => SET,
            Self::Get { .. } => GET,
            Self::Wait { .. } => WAIT,
            Self::Add { .. } => ADD,
            Self::CompareSet { .. } => COMPARE_SET,
            Self::Delete { .. } => DELETE,
        }
    }
}

impl Response {
    /// The first of `values` that fit, at least one.
    pub(super) fn values(mut values: Vec<Option<Value>>) -> Self {
        let mut room = VALUES_BYTES_MAX;
        let mut fits = |value: &Option<Value>| {
            let bytes = value.as_ref().map_or(0, |value| value.len());
            room.checked_sub(bytes).map(|rest| room = rest).is_some()
        };
        let count = values.iter().take_while(|value| fits(value)).count();
        values.truncate(count);
        Self::Answer(Answer::Values(values))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Frame(vec![self.kind()]);
        match self {
            Self::Answer(Answer::Done) => &mut frame,
            Self::Answer(Answer::Values(values)) => {
                frame.count(values.len());
                values.iter().fold(&mut frame, |frame, value| frame.option(value.as_deref()))
            }
            Self::Missing(indices) => {
                frame.count(indices.len());
                indices.iter().fold(&mut frame, |frame, index| frame.u32(*index))
            }
            Self::Answer(Answer::Sum(sum)) => frame.u64(sum.cast_unsigned()),
            Self::Answer(Answer::Value(value)) => frame.option(value.as_deref()),
            Self::Answer(Answer::Deleted(had_one)) => frame.u8((*had_one).into()),
            Self::Refused(why, limit) => frame.u8(code(*why)).u64(*limit),
        };
        frame.0
    }

    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(body);
        let answer = match fields.u8()? {
            DONE => Answer::Done,
            VALUES => {
                let count = fields.count()?;
                let value = |_| Ok(fields.option()?.map(Value::from));
                Answer::Values((0..count).map(value).collect::<Result<_, _>>()?)
            }
            MISSING => {
                let count = fields.count()?;
                let missing = Self::Missing((0..count).map(|_| fields.u32()).collect::<Result<_, _>>()?);
                return fields.end().map(|()| missing);
            }
            NUMBER => Answer::Sum(fields.u64()?.cast_signed()),
            VALUE => Answer::Value(fields.option()?.map(Value::from)),
            DELETED => Answer::Deleted(fields.flag()?),
            REFUSED => {
                let refused = Self::Refused(why(fields.u8()?)?, fields.u64()?);
                return fields.end().map(|()| refused);
            }
            _ => return malformed("an answer of an unknown kind"),
        };
        fields.end().map(|()| Self::Answer(answer))
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Answer(Answer::Done) => DONE,
            Self::Answer(Answer::Values(_)) => VALUES,
            Self::Missing(_) => MISSING,
            Self::Answer(Answer::Sum(_)) => NUMBER,
            Self::Answer(Answer::Value(_)) => VALUE,
            Self::Answer(Answer::Deleted(_)) => DELETED,
            Self::Refused(..) => REFUSED,
        }
    }
}

fn code(why: Refused) -> u8 {
    match why {
        Refused::NoSum(NoSum::NotANumber) => 1,
        Refused::NoSum(NoSum::Overflow) => 2,
        Refused::Full(Counted::Keys) => 3,
        Refused::Full(Counted::Bytes) => 4,
        Refused::Full(Counted::Waits) => 5,
    }
}

fn why(code: u8) -> Result<Refused, Malformed> {
    match code {
        1 => Ok(Refused::NoSum(NoSum::NotANumber)),
        2 => Ok(Refused::NoSum(NoSum::Overflow)),
        3 => Ok(Refused::Full(Counted::Keys)),
        4 => Ok(Refused::Full(Counted::Bytes)),
        5 => Ok(Refused::Full(Counted::Waits)),
        _ => malformed("a refusal for an unknown reason"),
    }
}

/// A body being written.
struct Frame(Vec<u8>);

impl Frame {
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
}

/// The rest of a body being read. Every length is compared with it before anything is allocated.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let Some((taken, rest)) = self.0.split_at_checked(count) else {
            return malformed("a body that ends too early");
        };
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some((taken, rest)) = self.0.split_first_chunk() else {
            return malformed("a body that ends too early");
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
        if self.0.is_empty() { Ok(()) } else { malformed("a body with bytes after its end") }
    }
}

#[cfg(test)]
mod tests;
