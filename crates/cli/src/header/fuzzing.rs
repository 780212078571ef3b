//! The fuzz target of headers of safetensors files, and a test with the inputs that it has found so far.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

use super::Header;

/// An accepted header is consistent: its ranges follow each other, and its subsets are headers again.
pub(crate) fn header(data: &[u8]) {
    let Ok(text) = String::from_utf8(data.to_vec()) else { return };
    let Ok(header) = Header::parse(text.clone()) else { return };
    assert_eq!(header.text(), text);
    assert_eq!(header.prefix().len() as u64, header.data_start());
    let mut end = 0;
    for entry in header.entries() {
        assert_eq!(entry.range.start, end, "{}", entry.name);
        assert!(entry.range.end >= end);
        end = entry.range.end;
        let elements = entry.shape.iter().try_fold(1u64, |all, &one| all.checked_mul(one as u64)).unwrap();
        assert_eq!(elements.checked_mul(entry.dtype.bitsize() as u64), entry.byte_length().checked_mul(8));
    }
    assert_eq!(header.data_bytes(), end);
    let all = header.subset(|_| true).unwrap();
    assert_eq!(all.entries(), header.entries());
    let none = header.subset(|_| false).unwrap();
    assert_eq!((none.entries().len(), none.data_start() % 8), (0, 0));
}

#[cfg(test)]
#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[test]
fn d_fuzz_safetensors() {
    replay::replay("safetensors", header);
}
