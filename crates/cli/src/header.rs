//! The header of a safetensors file: its tensors and their ranges.

use std::{collections::HashMap, ops::Range};

use safetensors::{
    Dtype, SafeTensorError,
    tensor::{Metadata, TensorInfo},
};

/// Longest header that is read, in bytes: the format's own limit.
pub(crate) const HEADER_BYTES_MAX: usize = 100_000_000;

/// Maximum number of values in a header: tensors, their fields and dimensions, and pairs of metadata. A tensor of two
/// dimensions has 8 values. The parser takes up to 300 bytes for each.
pub(crate) const VALUES_MAX: usize = 1 << 20;

/// Bytes before the header: its length.
pub(crate) const PREFIX_BYTES: usize = 8;

/// Name under which a server publishes the text of its file's header, as bytes. With this text a client writes exactly
/// the served file, with its metadata, and with element types that the wire has no name for.
pub(crate) const HEADER_NAME: &str = "tensorwire:header";

/// Why a text is no header.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeaderError {
    #[error(transparent)]
    Format(#[from] SafeTensorError),
    #[error(
        "it has more than {VALUES_MAX} values (tensors, their fields and dimensions, pairs of metadata): divide the file into \
         smaller ones"
    )]
    Values,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// The range of its bytes, counted from the end of the header.
    pub(crate) range: Range<u64>,
}

impl Entry {
    pub(crate) fn byte_length(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// A header, checked: ranges follow each other without gaps and have the length of dtype and shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Header {
    text: String,
    entries: Vec<Entry>,
}

impl Header {
    /// Parses the JSON text of a header, of at most [`HEADER_BYTES_MAX`] bytes. The length of the file that it describes
    /// fits 64 bits, so every position in it does.
    pub(crate) fn parse(text: String) -> Result<Self, HeaderError> {
        if text.len() > HEADER_BYTES_MAX {
            return Err(SafeTensorError::HeaderTooLarge.into());
        }
        if values(&text) > VALUES_MAX {
            return Err(HeaderError::Values);
        }
        let parsed = metadata(&text)?;
        let mut infos = parsed.tensors();
        let mut entries = Vec::with_capacity(infos.len());
        for name in parsed.offset_keys() {
            let Some(info) = infos.remove(&name) else { continue };
            let (start, end) = info.data_offsets;
            entries.push(Entry {
                name,
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: start as u64..end as u64,
            });
        }
        // Tensors without bytes may have equal ranges, and the parser returns these in any order.
        entries.sort_by(|one, other| {
            let place = |entry: &Entry| (entry.range.start, entry.range.end);
            place(one).cmp(&place(other)).then_with(|| one.name.cmp(&other.name))
        });
        let header = Self { text, entries };
        header.data_start().checked_add(header.data_bytes()).ok_or(SafeTensorError::ValidationOverflow)?;
        Ok(header)
    }

    /// The header of a file with only `entries`, in their order, with new ranges.
    pub(crate) fn of(
        metadata: Option<HashMap<String, String>>,
        entries: &[Entry],
    ) -> Result<Self, HeaderError> {
        let mut start = 0usize;
        let mut infos = Vec::with_capacity(entries.len());
        for entry in entries {
            let length =
                usize::try_from(entry.byte_length()).map_err(|_| SafeTensorError::ValidationOverflow)?;
            let end = start.checked_add(length).ok_or(SafeTensorError::ValidationOverflow)?;
            let info =
                TensorInfo { dtype: entry.dtype, shape: entry.shape.clone(), data_offsets: (start, end) };
            infos.push((entry.name.clone(), info));
            start = end;
        }
        let mut text = serde_json::to_string(&Metadata::new(metadata, infos)?)
            .map_err(SafeTensorError::InvalidHeaderDeserialization)?;
        // The data begins at a multiple of 8, so that a reader can map it.
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        Self::parse(text)
    }

    /// The same file with the tensors that `keep` accepts.
    pub(crate) fn subset(&self, keep: impl Fn(&Entry) -> bool) -> Result<Self, HeaderError> {
        let entries: Vec<Entry> = self.entries.iter().filter(|entry| keep(entry)).cloned().collect();
        Self::of(metadata(&self.text)?.metadata().clone(), &entries)
    }

    /// The JSON text, with its padding.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The tensors, in the order of the file.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.entries.last().map_or(0, |entry| entry.range.end)
    }

    /// The position in the file at which the data begins.
    pub(crate) fn data_start(&self) -> u64 {
        (PREFIX_BYTES + self.text.len()) as u64
    }

    /// Length of the whole file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.data_start() + self.data_bytes()
    }

    /// The bytes before the data: length and text.
    pub(crate) fn prefix(&self) -> Vec<u8> {
        let mut prefix = (self.text.len() as u64).to_le_bytes().to_vec();
        prefix.extend_from_slice(self.text.as_bytes());
        prefix
    }
}

fn metadata(text: &str) -> Result<Metadata, SafeTensorError> {
    serde_json::from_str(text).map_err(SafeTensorError::InvalidHeaderDeserialization)
}

/// An upper bound of the values in a JSON text: each except the first begins a list or an object, or follows a comma.
fn values(text: &str) -> usize {
    let (mut values, mut is_string, mut is_escaped) = (0, false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_string,
            b'"' => is_string = !is_string,
            b',' | b'[' | b'{' => values += usize::from(!is_string),
            _ => {}
        }
    }
    values
}

// By its path, because the fuzz target includes this file by its path, too.
#[cfg(any(test, fuzzing))]
#[path = "header/fuzzing.rs"]
pub(crate) mod fuzzing;

#[cfg(test)]
mod tests {
    use super::{HEADER_BYTES_MAX, Header, HeaderError, SafeTensorError, VALUES_MAX};

    const TEXT: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
        "empty":{"dtype":"F32","shape":[0,5],"data_offsets":[12,12]},
        "a":{"dtype":"U8","shape":[],"data_offsets":[12,13]}}"#;

    #[test]
    fn entries_come_by_place_in_the_file() {
        let header = Header::parse(TEXT.to_owned()).unwrap();
        let names: Vec<&str> = header.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["b", "empty", "a"]);
        assert_eq!(header.data_bytes(), 13);
        assert_eq!(header.text(), TEXT);
    }

    #[test]
    fn subset_closes_the_gaps_and_keeps_the_metadata() {
        let header = Header::parse(TEXT.to_owned()).unwrap();
        let subset = header.subset(|entry| entry.name != "b").unwrap();
        assert_eq!(subset.data_bytes(), 1);
        assert!(subset.text().contains(r#""format":"pt""#));
        assert_eq!(subset.data_start() % 8, 0);
    }

    #[test]
    fn gaps_overlaps_and_wrong_lengths_are_refused() {
        for (from, to) in [("[12,13]", "[13,14]"), ("[12,13]", "[11,12]"), ("[2,3]", "[2,4]"), ("BF16", "X9")]
        {
            assert!(Header::parse(TEXT.replace(from, to)).is_err(), "{from} to {to}");
        }
    }

    #[test]
    fn s5_a_file_whose_length_overflows_is_refused() {
        // Each tensor fits; the data of eight end 8 bytes before 2^64, and the header adds more.
        let tensor = |index: u64| {
            let bytes = (1u64 << 61) - 1;
            let (start, end) = (index * bytes, (index + 1) * bytes);
            format!(r#""{index}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{start},{end}]}}"#)
        };
        let text = |count| format!("{{{}}}", (0..count).map(tensor).collect::<Vec<_>>().join(","));
        let header = Header::parse(text(7)).unwrap();
        assert_eq!(header.file_bytes(), header.data_start() + 7 * ((1 << 61) - 1));
        let refused = Header::parse(text(8));
        assert!(matches!(refused, Err(HeaderError::Format(SafeTensorError::ValidationOverflow))));
    }

    #[test]
    fn s4_a_header_that_is_too_long_is_refused_before_it_is_parsed() {
        let text = format!("{TEXT}{}", " ".repeat(HEADER_BYTES_MAX - TEXT.len()));
        assert!(Header::parse(text.clone()).is_ok());
        let refused = Header::parse(text + " ");
        assert!(matches!(refused, Err(HeaderError::Format(SafeTensorError::HeaderTooLarge))));
    }

    #[test]
    fn s4_a_header_with_too_many_values_is_refused_before_it_is_parsed() {
        let shape = |dimensions: usize| {
            let shape = vec!["1"; dimensions].join(",");
            format!(r#"{{"a\\\"[,[":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#)
        };
        let metadata = |pairs: usize| {
            let pairs = (0..pairs).map(|number| format!(r#""{number}":"""#)).collect::<Vec<_>>().join(",");
            format!(r#"{{"__metadata__":{{{pairs}}}}}"#)
        };
        // Besides the dimensions there are six values, and besides the pairs one.
        assert!(Header::parse(shape(VALUES_MAX - 6)).is_ok());
        for text in [shape(VALUES_MAX - 5), metadata(VALUES_MAX)] {
            let error = Header::parse(text).unwrap_err().to_string();
            assert!(
                error.contains("more than 1048576 values") && error.contains("divide the file"),
                "{error}"
            );
        }
        let error = Header::parse("[".repeat(VALUES_MAX + 1)).unwrap_err();
        assert!(matches!(error, HeaderError::Values), "{error}");
    }

    #[test]
    fn shape_whose_size_overflows_is_refused() {
        let text = TEXT.replace("[2,3]", "[4294967296,4294967296,4294967296]");
        assert!(Header::parse(text).is_err());
    }
}
