//! Requests to stores, and their answers.

use std::sync::Arc;

/// A value, shared with its readers.
pub(super) type Value = Arc<[u8]>;

/// A request to a store. Keys and values have been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        keys: Vec<String>,
    },
    /// Only a store that is served to peers gets it. Other stores are polled.
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
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    Values(Vec<Option<Value>>),
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
