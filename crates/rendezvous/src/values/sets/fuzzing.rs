//! Fuzzing of what a peer says about a set: heads, manifests, their differences, and deltas.

use tensorwire_protocol::{DataType, Metadata, Shape};
use zerocopy::IntoBytes as _;

use super::{
    delta::Runs,
    manifest::{Head, Manifest, ManifestEntry},
    manifest_delta::{self, Origin},
};

/// Decodes `data` as what its first byte says. What is accepted must be consistent.
pub fn sets(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => head(data),
        1 => manifest(data),
        2 => difference(data),
        _ => delta(data, usize::from(kind / 4)),
    }
}

fn head(data: &[u8]) {
    if let Ok(head) = Head::decode(data) {
        assert_eq!(head.as_bytes(), data);
        assert!(head.before().is_none_or(|before| before.version() < head.newest.version()));
    }
}

fn manifest(data: &[u8]) {
    if let Ok(manifest) = Manifest::decode(data) {
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
}

fn difference(data: &[u8]) {
    let entries = (0..9_u64).map(|number| {
        let metadata = Metadata::new(DataType::Bf16, Shape::new([100 * number]).unwrap()).unwrap();
        let name = format!("{}", number + 1).into();
        ManifestEntry { name, metadata, sharding: None, stamp: 1, checksum: None }
    });
    let old = Manifest { incarnation: 1, entries: entries.collect() };
    let Ok((new, origins)) = manifest_delta::decode(&old, 2, data) else { return };
    assert_eq!(Manifest::decode(&new.encode()).as_ref(), Ok(&new));
    for (entry, origin) in new.entries.iter().zip(&origins) {
        match *origin {
            Origin::Same(place) => assert_eq!(*entry, old.entries[place]),
            Origin::Runs { place, bytes, .. } => {
                assert_eq!(entry.metadata, old.entries[place].metadata);
                assert!(bytes < entry.metadata.byte_length);
            }
            Origin::Full => assert_eq!(entry.stamp, 2),
        }
    }
}

fn delta(data: &[u8], kind: usize) {
    let dtype = [DataType::U8, DataType::Bf16, DataType::F32, DataType::F64, DataType::C128][kind % 5];
    let metadata = Metadata::new(dtype, Shape::new([1 + 5 * kind as u64]).unwrap()).unwrap();
    let Ok(mut runs) = Runs::new(data, &metadata) else { return };
    let mut end = 0;
    while let Ok(Some(run)) = runs.read() {
        assert!(run.offset >= end && !run.values.is_empty());
        end = run.offset + run.values.len();
        assert!(end as u64 <= metadata.byte_length);
    }
}
