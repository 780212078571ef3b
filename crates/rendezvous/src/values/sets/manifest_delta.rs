//! The difference of two manifests, and how the contents of one version are made of those before.

use super::{
    manifest::{
        FIRST_TENSOR, Manifest, ManifestEntry, read_description, read_name, write_description, write_name,
    },
    reading::{Problem, Reader, write_number},
};

/// How a content differs from the content that the version before has under the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is equal.
    Same,
    /// A delta of so many bytes, whose result has this checksum.
    Runs { bytes: u64, checksum: u64 },
    /// The whole content is needed.
    Full,
}

/// Where a content comes from, in terms of the version before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The content at this place.
    Same(usize),
    /// The content at this place, changed by the delta with this number and length.
    Runs { place: usize, number: u32, bytes: u64 },
    /// The whole content is needed.
    Full,
}

const FULL: u64 = 0;
/// With another element type, shape or sharding.
const OTHER_METADATA: u64 = 1;
/// A delta; its length is added to this.
const RUNS: u64 = 2;

/// Encodes how `new` differs from `old`. `changes` has one change for each entry of `new`.
pub(crate) fn encode(old: &Manifest, new: &Manifest, changes: &[Change]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let removed = old.entries.iter().enumerate().filter(|(_, entry)| new.place(&entry.name).is_none());
    write_places(&mut bytes, removed.map(|(place, _)| place), |_, _| ());
    let (mut changed, mut added) = (Vec::new(), Vec::new());
    for (entry, change) in new.entries.iter().zip(changes) {
        match (old.place(&entry.name), change) {
            (None, _) => added.push(entry),
            (Some(_), Change::Same) => {}
            (Some(place), change) => changed.push((place, (entry, change))),
        }
    }
    write_places(&mut bytes, changed.iter().map(|(place, _)| *place), |bytes, index| {
        let Some((place, (entry, change))) = changed.get(index) else { return };
        let is_alike = old.entries.get(*place).is_some_and(|old| old.is_alike(entry));
        match change {
            Change::Runs { bytes: length, checksum } => {
                write_number(bytes, RUNS.saturating_add(*length));
                bytes.extend(checksum.to_le_bytes());
            }
            _ if is_alike => write_number(bytes, FULL),
            _ => {
                write_number(bytes, OTHER_METADATA);
                write_description(bytes, entry);
            }
        }
    });
    write_number(&mut bytes, added.len() as u64);
    for entry in added {
        write_name(&mut bytes, &entry.name);
        write_description(&mut bytes, entry);
    }
    bytes
}

/// Writes ascending places as gaps, each followed by what `also` writes for it.
fn write_places(
    bytes: &mut Vec<u8>,
    places: impl Iterator<Item = usize>,
    also: impl Fn(&mut Vec<u8>, usize),
) {
    let places: Vec<_> = places.collect();
    write_number(bytes, places.len() as u64);
    let mut next = 0;
    for (index, place) in places.into_iter().enumerate() {
        write_number(bytes, (place - next) as u64);
        also(bytes, index);
        next = place + 1;
    }
}

/// Reads ascending places, all below `end`.
struct Places {
    next: usize,
    end: usize,
}

impl Places {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<usize, Problem> {
        let gap = usize::try_from(reader.number()?).map_err(|_| "a place is too large")?;
        let place = self.next.checked_add(gap).filter(|&place| place < self.end);
        let place = place.ok_or("a place is behind the last entry")?;
        self.next = place + 1;
        Ok(place)
    }
}

/// An entry under construction, with its origin. `None` if it is removed.
type Made = Option<(ManifestEntry, Origin)>;

/// The manifest of edition `edition` that differs from `old` as `bytes` of a peer say, with the origin of each content.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn decode(old: &Manifest, edition: u64, bytes: &[u8]) -> Result<(Manifest, Vec<Origin>), Problem> {
    let mut reader = Reader::new(bytes);
    let entries = old.entries.iter().enumerate();
    let mut made: Vec<Made> =
        entries.map(|(place, entry)| Some((entry.clone(), Origin::Same(place)))).collect();
    let mut places = Places { next: 0, end: made.len() };
    for _ in 0..reader.count(1)? {
        let place = places.read(&mut reader)?;
        made.get_mut(place).ok_or("a place is behind the last entry")?.take();
    }
    let mut places = Places { next: 0, end: made.len() };
    for _ in 0..reader.count(2)? {
        let place = places.read(&mut reader)?;
        let entry = made.get_mut(place).and_then(Option::as_mut).ok_or("a removed entry is changed")?;
        read_change(&mut reader, (place, edition), entry)?;
    }
    let mut made: Vec<_> = made.into_iter().flatten().collect();
    for _ in 0..reader.count(5)? {
        let (name, (metadata, sharding)) = (read_name(&mut reader)?, read_description(&mut reader)?);
        let entry = ManifestEntry { name, metadata, sharding, stamp: edition, checksum: None };
        made.push((entry, Origin::Full));
    }
    reader.end()?;
    made.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
    let (entries, mut origins): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let manifest = Manifest { incarnation: old.incarnation, entries };
    manifest.check()?;
    number_deltas(&mut origins);
    Ok((manifest, origins))
}

fn read_change(
    reader: &mut Reader<'_>,
    (place, edition): (usize, u64),
    (entry, origin): &mut (ManifestEntry, Origin),
) -> Result<(), Problem> {
    (entry.stamp, entry.checksum, *origin) = (edition, None, Origin::Full);
    match reader.number()? {
        FULL => {}
        OTHER_METADATA => (entry.metadata, entry.sharding) = read_description(reader)?,
        runs => {
            let bytes = runs - RUNS;
            if bytes >= entry.metadata.byte_length {
                return Err("a delta is longer than the content");
            }
            entry.checksum = Some(reader.u64()?).filter(|&checksum| checksum > 0);
            *origin = Origin::Runs { place, number: 0, bytes };
        }
    }
    Ok(())
}

/// The deltas of a version have the numbers after its tensors, in the order of the tensors.
fn number_deltas(origins: &mut [Origin]) {
    let mut next = FIRST_TENSOR + origins.len() as u32;
    for origin in origins {
        if let Origin::Runs { number, .. } = origin {
            *number = next;
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::sets::manifest::tests::manifest;

    #[test]
    fn a_difference_has_all_changes() {
        let old = manifest(&[("a", 9, 1), ("b", 9, 1), ("c", 9, 1), ("e", 9, 1), ("f", 9, 1)]);
        let mut new =
            manifest(&[("0", 3, 2), ("a", 9, 1), ("b", 9, 2), ("d", 5, 2), ("e", 8, 2), ("f", 9, 2)]);
        new.entries[5].checksum = Some(77);
        let runs = Change::Runs { bytes: 4, checksum: 77 };
        let changes = [Change::Full, Change::Same, Change::Full, Change::Full, Change::Full, runs];
        let bytes = encode(&old, &new, &changes);
        let (decoded, origins) = decode(&old, 2, &bytes).unwrap();
        assert_eq!(decoded, new);
        let expected = [
            Origin::Full,
            Origin::Same(0),
            Origin::Full,
            Origin::Full,
            Origin::Full,
            Origin::Runs { place: 4, number: FIRST_TENSOR + 6, bytes: 4 },
        ];
        assert_eq!(origins, expected);
        for cut in 0..bytes.len() {
            assert!(decode(&old, 2, &bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert!(decode(&old, 2, &[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn nothing_changed_takes_three_bytes() {
        let names: Vec<_> = (0..300).map(|number| format!("{number:03}")).collect();
        let entries: Vec<_> = names.iter().map(|name| (&**name, 9, 1)).collect();
        let old = manifest(&entries);
        let bytes = encode(&old, &old, &[Change::Same; 300]);
        assert_eq!(bytes, [0, 0, 0]);
        assert_eq!(decode(&old, 2, &bytes).unwrap().0, old);
    }

    #[test]
    fn s5_differences_that_do_not_fit_are_refused() {
        let old = manifest(&[("a", 9, 1), ("b", 9, 1)]);
        let refused: [&[u8]; 7] = [
            &[1, 2, 0, 0],                             // a removed entry behind the last
            &[2, 0, 1, 0, 0],                          // the same
            &[1, 0, 1, 0, 0, 0],                       // a removed entry is changed
            &[0, 1, 5, 0, 0],                          // a changed entry behind the last
            &[0, 1, 0, 22, 1, 2, 3, 4, 5, 6, 7, 8, 0], // a delta that is longer than the content
            &[0, 0, 1, 1, b'a', 4, 0],                 // a name that is there already
            &[0, 0, 0xff, 0xff, 0xff, 0xff, 0x0f],     // more entries than bytes
        ];
        for bytes in refused {
            assert!(decode(&old, 2, bytes).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn s5_any_bytes_are_a_difference_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let old = manifest(&[("a", 9, 1), ("b", 9, 1), ("c", 9, 1)]);
            if let Ok((manifest, origins)) = decode(&old, 2, &bytes) {
                prop_assert_eq!(manifest.entries.len(), origins.len());
                prop_assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
            }
        }
    }
}
