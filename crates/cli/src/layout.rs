//! The files that a server publishes: their names, their beginnings, and the places of their tensors.

use crate::header::{HEADER_NAME, Header, HeaderError};

/// Why published texts are not those of files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LayoutError {
    #[error("what the server publishes does not make a safetensors file: {0}")]
    Header(HeaderError),
    #[error("the server's file header is not UTF-8: its `{name}` is not from tensorwire serve")]
    HeaderText { name: String },
    #[error(
        "the server publishes `{name}`, which names no *{end} file of a folder: it is not from tensorwire serve"
    )]
    FileName { name: String, end: &'static str },
    #[error("the server publishes both a file and a folder: it is not tensorwire serve")]
    FileAndFolder,
}

/// Name of the set whose versions are those of the files.
pub(crate) const SET: &str = "files";

/// Names of the tensors that have the texts of headers and of an index begin with this; the name of the file follows. The header of a
/// file that is served alone has the name [`HEADER_NAME`].
const HEADER_OF: &str = "tensorwire:header/";
const INDEX_OF: &str = "tensorwire:index/";

/// Ends of the names of files with tensors, and of indexes.
pub(crate) const TENSORS_END: &str = ".safetensors";
pub(crate) const INDEX_END: &str = ".json";

/// The name under which a server publishes the header of a file; `None` if the file is served alone.
pub(crate) fn header_name(file: Option<&str>) -> String {
    file.map_or_else(|| HEADER_NAME.to_owned(), |file| format!("{HEADER_OF}{file}"))
}

/// The name under which a server publishes the text of an index.
pub(crate) fn index_name(file: &str) -> String {
    format!("{INDEX_OF}{file}")
}

/// Whether a published tensor of this name is the text of a header or of an index.
pub(crate) fn is_text(name: &str) -> bool {
    name == HEADER_NAME || name.starts_with(HEADER_OF) || name.starts_with(INDEX_OF)
}

/// Whether `name` is that of a file in a folder, and of no other folder.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.starts_with('.') && !name.is_empty() && !name.contains(['/', '\0'])
}

/// One file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LaidOutFile {
    /// `None` if the server serves it alone.
    pub(crate) name: Option<String>,
    /// The bytes before the tensors.
    pub(crate) prefix: Vec<u8>,
    /// Its length.
    pub(crate) bytes: u64,
}

/// A tensor's place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub(crate) name: String,
    /// The index of its file.
    pub(crate) file: usize,
    /// The position of its first byte in the file.
    pub(crate) place: u64,
    pub(crate) bytes: u64,
}

/// Files and the places of their tensors, in the order of the files.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Layout {
    pub(crate) files: Vec<LaidOutFile>,
    pub(crate) pieces: Vec<Piece>,
}

/// The texts that a server has published, parsed.
#[derive(Debug)]
pub(crate) struct Texts {
    /// With the names of the files; `None` if the server serves one file alone.
    headers: Vec<(Option<String>, Header)>,
    indexes: Vec<(String, Vec<u8>)>,
}

impl Texts {
    /// Parses texts, by the names under which they are published. A server can name only files with tensors and indexes, in one
    /// folder.
    pub(crate) fn parse(texts: impl IntoIterator<Item = (String, Vec<u8>)>) -> Result<Self, LayoutError> {
        let mut parsed = Self { headers: Vec::new(), indexes: Vec::new() };
        for (name, text) in texts {
            if let Some(file) = name.strip_prefix(INDEX_OF) {
                check_name(&name, file, INDEX_END)?;
                parsed.indexes.push((file.to_owned(), text));
                continue;
            }
            let file = name.strip_prefix(HEADER_OF);
            if let Some(file) = file {
                check_name(&name, file, TENSORS_END)?;
            }
            let text = String::from_utf8(text).map_err(|_| LayoutError::HeaderText { name: name.clone() })?;
            let header = Header::parse(text).map_err(LayoutError::Header)?;
            parsed.headers.push((file.map(str::to_owned), header));
        }
        let has_unnamed = parsed.headers.iter().any(|(file, _)| file.is_none());
        match has_unnamed && parsed.headers.len() + parsed.indexes.len() > 1 {
            true => Err(LayoutError::FileAndFolder),
            false => Ok(parsed),
        }
    }

    /// The files, in the order of their names. An index comes last, so that it names no file that is not complete.
    pub(crate) fn layout(self) -> Layout {
        let mut layout = Layout::default();
        for (name, header) in &self.headers {
            layout.add(name.clone(), header);
        }
        let indexes = self.indexes.into_iter().map(|(name, text)| {
            let bytes = text.len() as u64;
            LaidOutFile { name: Some(name), prefix: text, bytes }
        });
        layout.files.extend(indexes);
        layout
    }

    /// One header for the tensors of all files.
    pub(crate) fn merged(mut self) -> Result<Header, LayoutError> {
        if self.headers.len() == 1
            && let Some((_, header)) = self.headers.pop()
        {
            return Ok(header);
        }
        let entries: Vec<_> = self.headers.iter().flat_map(|(_, header)| header.entries()).cloned().collect();
        Header::of(None, &entries).map_err(LayoutError::Header)
    }
}

impl Layout {
    /// One file without a name.
    pub(crate) fn of_header(header: &Header) -> Self {
        let mut layout = Self::default();
        layout.add(None, header);
        layout
    }

    fn add(&mut self, name: Option<String>, header: &Header) {
        let file = self.files.len();
        self.pieces.extend(header.entries().iter().map(|entry| Piece {
            name: entry.name.clone(),
            file,
            place: header.data_start() + entry.range.start,
            bytes: entry.byte_length(),
        }));
        self.files.push(LaidOutFile { name, prefix: header.prefix(), bytes: header.file_bytes() });
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |bytes, piece| bytes.saturating_add(piece.bytes))
    }
}

fn check_name(name: &str, file: &str, end: &'static str) -> Result<(), LayoutError> {
    if is_plain(file) && file.ends_with(end) {
        return Ok(());
    }
    Err(LayoutError::FileName { name: name.to_owned(), end })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Layout, LayoutError, Texts, header_name, index_name, is_text};

    const HEADER: &str = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;

    fn of(names: &[String]) -> Result<Layout, LayoutError> {
        let texts = names.iter().map(|name| (name.clone(), HEADER.as_bytes().to_vec()));
        Texts::parse(texts.collect::<BTreeMap<_, _>>()).map(Texts::layout)
    }

    #[test]
    fn a_folder_has_its_index_last() {
        let index = index_name("a.safetensors.index.json");
        let layout = of(&[header_name(Some("b.safetensors")), index, header_name(Some("a.safetensors"))]);
        let layout = layout.unwrap();
        let names: Vec<_> = layout.files.iter().map(|file| file.name.as_deref().unwrap()).collect();
        assert_eq!(names, ["a.safetensors", "b.safetensors", "a.safetensors.index.json"]);
        assert!(layout.pieces.len() == 2 && layout.data_bytes() == 4);
        assert_eq!(layout.files[2].prefix, HEADER.as_bytes());
        assert_eq!(of(&[header_name(None)]).unwrap().files[0].name, None);
    }

    #[test]
    fn s5_a_server_names_no_file_outside_of_the_folder_and_of_no_other_kind() {
        for file in [
            "../a.safetensors",
            "/a.safetensors",
            "",
            ".safetensors",
            "a",
            "a/b.safetensors",
            "a\0.safetensors",
        ] {
            let name = header_name(Some(file));
            assert!(is_text(&name) && matches!(of(&[name]), Err(LayoutError::FileName { .. })), "{file}");
        }
        for file in ["../a.json", ".json", "a.safetensors"] {
            assert!(matches!(of(&[index_name(file)]), Err(LayoutError::FileName { .. })), "{file}");
        }
    }

    #[test]
    fn s5_a_file_and_a_folder_are_refused() {
        assert!(matches!(
            of(&[header_name(None), header_name(Some("a.safetensors"))]),
            Err(LayoutError::FileAndFolder)
        ));
    }
}
