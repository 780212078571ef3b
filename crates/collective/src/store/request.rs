//! Requests to stores, and their answers.

use std::{fmt, marker::PhantomData, sync::Arc};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, SeqAccess, Visitor},
};

use super::{
    StoreError,
    rules::{check_key, check_keys, check_value},
};

/// A value, shared with its readers.
pub(super) type Value = Arc<[u8]>;

/// The most keys in a request that is encoded.
pub(super) const KEYS_MAX: usize = 4096;

/// A request to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        #[serde(deserialize_with = "few")]
        keys: Vec<String>,
    },
    /// Only a store that is served to peers gets it. Other stores are polled.
    Wait {
        /// In microseconds.
        limit: u64,
        #[serde(deserialize_with = "few")]
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
}

impl Request {
    /// Checks keys and values by the rules that all stores share.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for the first that breaks a rule.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        match self {
            Self::Set { key, value } => check_key(key).and_then(|()| check_value(value)),
            Self::Get { keys } | Self::Wait { keys, .. } => check_keys(keys),
            Self::Add { key, .. } | Self::Delete { key } => check_key(key),
            Self::CompareSet { key, expected, value } => {
                check_key(key)?;
                check_value(expected.as_deref().unwrap_or_default())?;
                check_value(value)
            }
        }
    }
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Values(#[serde(deserialize_with = "few")] Vec<Option<Value>>),
    Sum(i64),
    Value(Option<Value>),
    Deleted(bool),
}

impl Answer {
    pub(super) fn value(value: Option<Vec<u8>>) -> Self {
        Self::Value(value.map(Value::from))
    }

    pub(super) fn values(values: Vec<Option<Vec<u8>>>) -> Self {
        Self::Values(values.into_iter().map(|value| value.map(Value::from)).collect())
    }
}

/// Reads a list of at most [`KEYS_MAX`] elements: short ones would take many times the memory of the body.
pub(super) fn few<'de, D: Deserializer<'de>, T: Deserialize<'de>>(list: D) -> Result<Vec<T>, D::Error> {
    list.deserialize_seq(Few(PhantomData))
}

struct Few<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {KEYS_MAX} elements")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Vec<T>, S::Error> {
        let mut few = Vec::new();
        while let Some(element) = list.next_element()? {
            if few.len() == KEYS_MAX {
                return Err(S::Error::invalid_length(KEYS_MAX + 1, &self));
            }
            few.push(element);
        }
        Ok(few)
    }
}
