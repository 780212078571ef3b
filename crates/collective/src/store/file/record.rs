//! The content of a key's file.

use super::super::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

const MAGIC: [u8; 4] = *b"TWR1";

const HEADER_BYTES: usize = 12;

/// The longest file.
pub(super) const RECORD_BYTES_MAX: usize = HEADER_BYTES + KEY_BYTES_MAX + VALUE_BYTES_MAX;

/// A magic number, the little-endian lengths of key and value, and both. Their lengths have been checked.
pub(super) fn encode(key: &str, value: &[u8]) -> Vec<u8> {
    let lengths = [key.len() as u32, value.len() as u32].map(u32::to_le_bytes);
    [&MAGIC, lengths.as_flattened(), key.as_bytes(), value].concat()
}

/// The value of `key`.
///
/// # Errors
/// What is wrong with the file, and what to do.
pub(super) fn decode(mut file: Vec<u8>, key: &str) -> Result<Vec<u8>, &'static str> {
    let Some((header, rest)) = file.split_first_chunk::<HEADER_BYTES>() else {
        return Err("not a record of a store: give the store its own folder");
    };
    if header[..4] != MAGIC {
        return Err("not a record of a store: give the store its own folder");
    }
    let length =
        |at: usize| header[at..at + 4].iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    let (key_bytes, value_bytes) = (length(4), length(8));
    if key_bytes.checked_add(value_bytes) != Some(rest.len()) {
        return Err("incomplete: the file system may be full; remove the file");
    }
    if &rest[..key_bytes] != key.as_bytes() {
        return Err("it has another key with the same hash: rename one of the keys");
    }
    Ok(file.split_off(HEADER_BYTES + key_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        for value in [&b""[..], b"value"] {
            let file = encode("key", value);
            assert_eq!(decode(file.clone(), "key").unwrap(), value);
            assert!((0..file.len()).all(|cut| decode(file[..cut].to_vec(), "key").is_err()));
            assert!(decode([&file[..], b"x"].concat(), "key").is_err());
            assert!(decode(file, "kez").unwrap_err().contains("another key"));
        }
        assert!(decode(b"something else altogether".to_vec(), "key").unwrap_err().contains("not a record"));
        let overflow = [&MAGIC[..], &[0xff; 8], b"key"].concat();
        assert!(decode(overflow, "key").is_err());
    }
}
