//! The rules for keys and values that all stores share.

use serde::{Deserialize, Serialize};

use super::{KEY_BYTES_MAX, StoreError, VALUE_BYTES_MAX};

/// The text of an error that a server may have written: its first kilobyte, escaped.
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) fn shown(error: impl std::fmt::Display) -> String {
    tensorwire_protocol::text::escaped_within(&error.to_string(), 1024)
}

/// # Errors
/// [`StoreError::Invalid`] if `key` is empty or longer than [`KEY_BYTES_MAX`].
pub(super) fn check_key(key: &str) -> Result<(), StoreError> {
    if (1..=KEY_BYTES_MAX).contains(&key.len()) {
        return Ok(());
    }
    let remedy = format!("a key has from 1 to {KEY_BYTES_MAX} bytes, its prefixes included");
    Err(StoreError::Invalid { field: "key", bytes: key.len(), remedy })
}

/// # Errors
/// As [`check_key`], for the first key that breaks the rule.
pub(super) fn check_keys(keys: &[String]) -> Result<(), StoreError> {
    keys.iter().try_for_each(|key| check_key(key))
}

/// # Errors
/// [`StoreError::Invalid`] if `value` is longer than [`VALUE_BYTES_MAX`].
pub(super) fn check_value(value: &[u8]) -> Result<(), StoreError> {
    if value.len() <= VALUE_BYTES_MAX {
        return Ok(());
    }
    let remedy = format!("a value has at most {VALUE_BYTES_MAX} bytes: write it under several keys");
    Err(StoreError::Invalid { field: "value", bytes: value.len(), remedy })
}

/// Why a store cannot add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum NoSum {
    /// The value is not a number.
    NotANumber,
    /// The sum exceeds 64 bits.
    Overflow,
}

impl NoSum {
    pub(super) fn error(self, store: String, key: &str, delta: i64) -> StoreError {
        let key = key.to_owned();
        match self {
            Self::NotANumber => StoreError::NotANumber { store, key },
            Self::Overflow => StoreError::Overflow { store, key, delta },
        }
    }
}

/// The sum of `delta` and the number in `value`, or 0 without a value.
///
/// # Errors
/// [`NoSum`].
pub(super) fn sum(value: Option<&[u8]>, delta: i64) -> Result<i64, NoSum> {
    let number = value.map_or(Some(0), number).ok_or(NoSum::NotANumber)?;
    number.checked_add(delta).ok_or(NoSum::Overflow)
}

/// The number that `add` wrote as `value`. Text that `add` never writes, such as `+1`, is not a number.
fn number(value: &[u8]) -> Option<i64> {
    let number: i64 = std::str::from_utf8(value).ok()?.parse().ok()?;
    (number.to_string().as_bytes() == value).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_add_writes_is_a_number() {
        for taken in [i64::MIN, -1, 0, 1, i64::MAX] {
            assert_eq!(number(taken.to_string().as_bytes()), Some(taken));
        }
        for refused in ["", "+1", "01", "-0", " 1", "1 ", "9223372036854775808", "x"] {
            assert_eq!(number(refused.as_bytes()), None, "{refused}");
        }
        assert_eq!(number(&[0xff]), None);
        assert_eq!(sum(Some(b"9223372036854775807"), 1), Err(NoSum::Overflow));
        assert_eq!(sum(None, i64::MIN), Ok(i64::MIN));
    }
}
