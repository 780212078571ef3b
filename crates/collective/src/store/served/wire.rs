//! The requests to a store and their answers, as the bodies of store frames, in the format of the crate `postcard`.

use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::super::{
    VALUE_BYTES_MAX,
    board::Refused,
    request::{Answer, KEYS_MAX, Request, Value, few},
};

/// The most bytes of values in one answer. The longest value fits.
const VALUES_BYTES_MAX: usize = VALUE_BYTES_MAX;

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

/// Why bytes are no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Malformed(pub(super) &'static str);

/// The answer of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Response {
    /// If it has values: those of the request's first keys, as many as fit.
    Answer(Answer),
    /// Which of the awaited keys are missing, as indices into the request.
    Missing(#[serde(deserialize_with = "few")] Vec<u32>),
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
        encode(self)
    }

    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let request: Self = decode(body)?;
        request.check().map_err(|_| Malformed("a key or a value of a length that none has"))?;
        Ok(request)
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
        encode(self)
    }

    /// # Errors
    /// [`Malformed`] for everything that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let response = decode(body)?;
        let values = match &response {
            Self::Answer(Answer::Values(values)) => &**values,
            Self::Answer(Answer::Value(value)) => std::slice::from_ref(value),
            _ => &[],
        };
        if values.iter().flatten().any(|value| value.len() > VALUE_BYTES_MAX) {
            return Err(Malformed("a value longer than values are"));
        }
        Ok(response)
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    // Only a sequence of unknown length would be an error.
    postcard::to_stdvec(message).unwrap_or_default()
}

fn decode<T: Serialize + DeserializeOwned>(body: &[u8]) -> Result<T, Malformed> {
    let message =
        postcard::from_bytes(body).map_err(|_| Malformed("bytes that are no message of a store"))?;
    // A number may be encoded in more bytes than it needs, and bytes may follow.
    if encode(&message) != body {
        return Err(Malformed("a message that is not encoded as stores encode it"));
    }
    Ok(message)
}

#[cfg(test)]
mod tests;
