//! The file names of keys.

use std::fmt::Write;

/// The longest name, in bytes, that spells its key. With the additions of locks and temporary files it fits all file systems.
const SPELLED_MAX: usize = 180;

/// How many bytes of a longer key its name spells, so that people can read a listing of the folder.
const BEGINNING: usize = 100;

/// The name of `key`'s file. Lower-case letters, digits, `-` and `_` stay as they are, and other bytes become `%` with two
/// digits, because some file systems do not distinguish `a` from `A`. No name begins with a dot.
///
/// The name of a long key ends in `%%` and a hash. No other name contains `%%`. The file contains the key, in case two have the
/// same hash.
pub(super) fn file_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte.into()),
            // Writing to a string does not fail.
            _ => drop(write!(name, "%{byte:02x}")),
        }
    }
    if name.len() > SPELLED_MAX {
        name.truncate(BEGINNING);
        let _ = write!(name, "%%{:032x}", hash(key.as_bytes()));
    }
    name
}

/// FNV-1a of 128 bits, the same in every release and on every machine. A collision on purpose would gain nothing.
fn hash(bytes: &[u8]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(BASIS, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_those_of_files_and_differ() {
        let keys = ["a", "A", "a/b", "a%2fb", ".", "..", "/", "%", "a ", "é", "\0", "k/../k"];
        let long = [
            "k".repeat(180),
            "k".repeat(181),
            "k".repeat(1024),
            "K".repeat(61),
            format!("{}l", "k".repeat(1023)),
        ];
        let keys: Vec<&str> = keys.into_iter().chain(long.iter().map(String::as_str)).collect();
        let names: HashSet<String> = keys.iter().map(|key| file_name(key).to_lowercase()).collect();
        assert_eq!(names.len(), keys.len());
        for name in names {
            assert!(
                (1..=180).contains(&name.len()) && !name.starts_with('.') && !name.contains('/'),
                "{name}"
            );
        }
        assert_eq!(file_name("rank/0"), "rank%2f0");
    }

    #[test]
    fn the_hash_stays_the_same() {
        assert_eq!(hash(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
