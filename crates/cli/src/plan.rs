//! What a pull fetches, and where it goes in the file.

use std::collections::BTreeMap;

use tensorwire::{Peer, Published, Worker};

use crate::{
    arguments::Pull,
    dtype,
    failure::Failure,
    header::{Entry, HEADER_NAME, Header},
};

/// Names listed in an error, at most.
const NAMES_SHOWN: usize = 5;

/// The tensors to fetch, laid out as a file.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) header: Header,
    /// By place in the header; `None` unless asked for.
    pub(crate) checksums: Vec<Option<u64>>,
}

impl Plan {
    /// Asks the server what it has, and picks what `arguments` name.
    pub(crate) async fn make(worker: &Worker, server: &Peer, arguments: &Pull) -> Result<Self, Failure> {
        let listed = if arguments.verify {
            worker.list_with_checksums(server).await?
        } else {
            worker.list(server).await?
        };
        let mut listed: BTreeMap<String, Published> =
            listed.into_iter().map(|published| (published.name.clone(), published)).collect();
        let whole = match listed.remove(HEADER_NAME) {
            Some(_) => published_header(worker, server).await?,
            None => header_of(&listed, arguments)?,
        };
        let header = pick(whole, &arguments.tensor, &arguments.address)?;
        let checksum_of = |entry: &Entry| listed.get(&entry.name).and_then(|published| published.checksum);
        let checksums = header.entries().iter().map(checksum_of).collect();
        Ok(Self { header, checksums })
    }
}

/// The header of the file that the server serves.
async fn published_header(worker: &Worker, server: &Peer) -> Result<Header, Failure> {
    let text = worker.fetch(server, HEADER_NAME).await?;
    let text = String::from_utf8(text.bytes().to_vec()).map_err(|_| Failure::HeaderText)?;
    Header::parse(text).map_err(Failure::Header)
}

/// A header for tensors that another program than `tensorwire serve` has published.
fn header_of(listed: &BTreeMap<String, Published>, arguments: &Pull) -> Result<Header, Failure> {
    let wanted =
        |name: &str| arguments.tensor.is_empty() || arguments.tensor.iter().any(|wanted| wanted == name);
    let mut entries = Vec::new();
    for published in listed.values().filter(|published| !published.metadata.is_dead) {
        let (name, metadata) = (&published.name, &published.metadata);
        let Some(dtype) = dtype::for_file(metadata.dtype) else {
            // One that is not wanted disturbs nobody.
            if wanted(name) {
                return Err(Failure::NoFileType { name: name.clone(), dtype: metadata.dtype });
            }
            continue;
        };
        let too_large = |_| Failure::TooLarge { name: name.clone(), bytes: metadata.byte_length };
        let dimensions = metadata.shape.dimensions().iter().map(|&dimension| usize::try_from(dimension));
        let shape = dimensions.collect::<Result<_, _>>().map_err(too_large)?;
        entries.push(Entry { name: name.clone(), dtype, shape, range: 0..metadata.byte_length });
    }
    Header::of(None, &entries).map_err(Failure::Header)
}

/// The tensors called `names`, or all if there are none.
fn pick(whole: Header, names: &[String], address: &str) -> Result<Header, Failure> {
    if whole.entries().is_empty() && names.is_empty() {
        return Err(Failure::NothingPublished);
    }
    if names.is_empty() {
        return Ok(whole);
    }
    let has = |name: &String| whole.entries().iter().any(|entry| &entry.name == name);
    let missing: Vec<&String> = names.iter().filter(|name| !has(name)).collect();
    if !missing.is_empty() {
        return Err(Failure::NoSuchTensor {
            address: address.to_owned(),
            missing: quoted(missing.iter().map(|name| name.as_str())),
            known: quoted(whole.entries().iter().map(|entry| entry.name.as_str())),
        });
    }
    whole.subset(|entry| names.contains(&entry.name)).map_err(Failure::Header)
}

/// The first names in quotes, and how many more there are.
fn quoted<'a>(names: impl Iterator<Item = &'a str> + Clone) -> String {
    let count = names.clone().count();
    let mut text = names.take(NAMES_SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if count > NAMES_SHOWN {
        text.push_str(&format!(" and {} more", count - NAMES_SHOWN));
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::{Failure, Header, pick, quoted};

    const TEXT: &str = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
        "b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;

    const ADDRESS: &str = "127.0.0.1:1";

    #[test]
    fn no_names_mean_the_whole_file_unchanged() {
        let header = pick(Header::parse(TEXT.to_owned()).unwrap(), &[], ADDRESS).unwrap();
        assert_eq!(header.text(), TEXT);
    }

    #[test]
    fn missing_names_are_told_with_those_there_are() {
        let names = ["b".to_owned(), "x".to_owned()];
        let failure = pick(Header::parse(TEXT.to_owned()).unwrap(), &names, ADDRESS).unwrap_err();
        assert!(matches!(failure, Failure::NoSuchTensor { .. }));
        assert_eq!(failure.to_string(), "the server at 127.0.0.1:1 has no tensor `x`; it has `a`, `b`");
    }

    #[test]
    fn empty_server_is_an_error_instead_of_an_empty_file() {
        let empty = Header::parse("{}".to_owned()).unwrap();
        assert!(matches!(pick(empty, &[], ADDRESS), Err(Failure::NothingPublished)));
    }

    #[test]
    fn long_lists_of_names_are_cut() {
        let names = ["1", "2", "3", "4", "5", "6", "7"];
        assert_eq!(quoted(names.into_iter()), "`1`, `2`, `3`, `4`, `5` and 2 more");
    }
}
