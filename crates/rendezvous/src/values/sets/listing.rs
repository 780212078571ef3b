//! The list of a worker's sets.

use super::{
    manifest::{read_name, write_name},
    reading::{Problem, Reader, write_number},
};

/// A set in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedSet {
    /// Its name.
    pub name: String,
    /// The newest version.
    pub version: u64,
    /// The number of tensors of that version.
    pub tensors: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
}

pub(crate) fn encode(sets: &[ListedSet]) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_number(&mut bytes, sets.len() as u64);
    for set in sets {
        write_name(&mut bytes, &set.name);
        [set.version, set.tensors, set.bytes].into_iter().for_each(|number| write_number(&mut bytes, number));
    }
    bytes
}

/// The list that `bytes` of a peer encode.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<ListedSet>, Problem> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(5)?;
    let mut sets: Vec<ListedSet> = Vec::new();
    for _ in 0..count {
        let name = read_name(&mut reader)?.to_string();
        if sets.last().is_some_and(|last| last.name >= name) {
            return Err("the names are not in order");
        }
        let (version, tensors, bytes) = (reader.number()?, reader.number()?, reader.number()?);
        sets.push(ListedSet { name, version, tensors, bytes });
    }
    reader.end()?;
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_lead_back_and_others_are_refused() {
        let set = |name: &str| ListedSet { name: name.to_owned(), version: 300, tensors: 2, bytes: 1 << 40 };
        let bytes = encode(&[set("a"), set("b")]);
        assert_eq!(decode(&bytes), Ok(vec![set("a"), set("b")]));
        assert!((0..bytes.len()).all(|cut| decode(&bytes[..cut]).is_err()));
        assert!(decode(&encode(&[set("b"), set("a")])).is_err());
        assert!(decode(&encode(&[set("")])).is_err());
    }
}
