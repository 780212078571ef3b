//! The tensors that a pull fetches, and their positions in the files.

use std::collections::BTreeMap;

use tensorwire::{Peer, Published, Version, arrays::safetensors_dtype};

use crate::{
    arguments::Pull,
    failure::Failure,
    header::{Entry, HEADER_BYTES_MAX, Header},
    layout::{Layout, LayoutError, Texts, is_text},
};

/// Maximum number of names listed in an error.
const NAMES_SHOWN: usize = 5;

/// The tensors that a server lists, in the order of their names.
#[derive(Debug)]
pub(crate) struct Listing(Vec<Published>);

impl Listing {
    /// Asks the server.
    pub(crate) async fn ask(server: &Peer, arguments: &Pull) -> Result<Self, Failure> {
        // A pull that continues after a restart must know whether the file is the same.
        let listed = if arguments.verify || arguments.resume || arguments.retry.is_some() {
            server.list().with_checksums().await?
        } else {
            server.list().await?
        };
        let listing = Self(listed);
        let texts = listing.texts().map(|text| text.metadata.byte_length);
        check_length(texts.fold(0, u64::saturating_add), &arguments.address)?;
        Ok(listing)
    }

    /// A list, sorted by name.
    pub(crate) fn of(listed: Vec<Published>) -> Self {
        Self(listed)
    }

    /// The texts of headers and of an index.
    fn texts(&self) -> impl Iterator<Item = &Published> {
        self.0.iter().filter(|published| is_text(&published.name))
    }

    /// Whether the server has published the headers of its files, which it does last.
    pub(crate) fn is_file(&self) -> bool {
        self.texts().next().is_some()
    }

    /// Bytes of the largest tensor that `arguments` want, the headers among them.
    pub(crate) fn largest(&self, arguments: &Pull) -> u64 {
        let is_wanted = |name: &str| is_text(name) || wants(arguments, name);
        let wanted = self.0.iter().filter(|published| is_wanted(&published.name));
        wanted.map(|published| published.metadata.byte_length).max().unwrap_or(0)
    }

    fn find(&self, name: &str) -> Option<&Published> {
        let place = self.0.binary_search_by(|published| published.name.as_str().cmp(name)).ok()?;
        self.0.get(place)
    }
}

/// The tensors to fetch, laid out as files.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) layout: Layout,
    /// The checksums in the order of the layout; `None` unless requested.
    pub(crate) checksums: Vec<Option<u64>>,
    /// The versions, in the same order.
    versions: Vec<Option<Version>>,
    /// Whether the server publishes the headers of its files.
    pub(crate) is_file: bool,
}

impl Plan {
    /// Selects the tensors that `arguments` name from `listing`.
    pub(crate) async fn make(server: &Peer, listing: &Listing, arguments: &Pull) -> Result<Self, Failure> {
        let (names, address) = (&arguments.tensor, &arguments.address);
        let is_file = listing.is_file();
        let layout = match is_file {
            true => {
                let texts = Texts::parse(published_texts(server, listing, address).await?)?;
                // A file may have no tensors.
                match names.is_empty() {
                    true => texts.layout(),
                    false => Layout::of_header(&pick(texts.merged()?, names, address)?),
                }
            }
            false => Layout::of_header(&pick(header_of(listing, arguments)?, names, address)?),
        };
        let of = |name: &str| listing.find(name);
        let checksums = layout.pieces.iter().map(|piece| of(&piece.name)?.checksum).collect();
        let versions = layout.pieces.iter().map(|piece| of(&piece.name).map(|known| known.version)).collect();
        Ok(Self { layout, checksums, versions, is_file })
    }

    /// Whether `now` has the same tensors: by their checksums or, where the server has none, by their versions.
    pub(crate) fn is_same(&self, now: &Self) -> bool {
        let is_same = |place: usize| match (self.checksums[place], now.checksums[place]) {
            (Some(before), Some(now)) => before == now,
            _ => self.versions[place].is_some() && self.versions[place] == now.versions[place],
        };
        self.layout == now.layout && (0..self.checksums.len()).all(is_same)
    }

    /// Whether the tensors of `listing` are still those of this plan.
    pub(crate) fn is_current(&self, listing: &Listing) -> bool {
        let mut pieces = self.layout.pieces.iter().zip(&self.versions);
        pieces.all(|(piece, version)| listing.find(&piece.name).map(|known| known.version) == *version)
    }
}

fn wants(arguments: &Pull, name: &str) -> bool {
    arguments.tensor.is_empty() || arguments.tensor.iter().any(|wanted| wanted == name)
}

/// The texts of headers and index that the server publishes, by their names.
async fn published_texts(
    server: &Peer,
    listing: &Listing,
    address: &str,
) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let (mut texts, mut bytes) = (BTreeMap::new(), 0);
    for Published { name, .. } in listing.texts() {
        let text = server.fetch(name).await?;
        // A text may differ from the listed one.
        bytes += text.bytes().len() as u64;
        check_length(bytes, address)?;
        texts.insert(name.clone(), text.bytes().to_vec());
    }
    Ok(texts)
}

fn check_length(bytes: u64, address: &str) -> Result<(), Failure> {
    if bytes <= HEADER_BYTES_MAX as u64 {
        return Ok(());
    }
    Err(Failure::HeaderLength { address: address.to_owned(), bytes })
}

/// A header for tensors that another program than `tensorwire serve` has published.
fn header_of(Listing(listed): &Listing, arguments: &Pull) -> Result<Header, Failure> {
    let mut entries = Vec::new();
    for published in listed.iter().filter(|published| !published.metadata.is_dead) {
        let (name, metadata) = (&published.name, &published.metadata);
        let Some(dtype) = safetensors_dtype(metadata.dtype) else {
            // A tensor that is not wanted need not fit the format.
            if wants(arguments, name) {
                return Err(Failure::NoFileType { name: name.clone(), dtype: metadata.dtype });
            }
            continue;
        };
        let too_large = |_| Failure::TooLarge { name: name.clone(), bytes: metadata.byte_length };
        let dimensions = metadata.shape.dimensions().iter().map(|&dimension| usize::try_from(dimension));
        let shape = dimensions.collect::<Result<_, _>>().map_err(too_large)?;
        entries.push(Entry { name: name.clone(), dtype, shape, range: 0..metadata.byte_length });
    }
    Ok(Header::of(None, &entries).map_err(LayoutError::Header)?)
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
    Ok(whole.subset(|entry| names.contains(&entry.name)).map_err(LayoutError::Header)?)
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
impl Plan {
    /// A plan for tensors without checksums.
    pub(crate) fn of(header: &Header) -> Self {
        let (tensors, layout) = (header.entries().len(), Layout::of_header(header));
        Self { layout, checksums: vec![None; tensors], versions: vec![None; tensors], is_file: true }
    }
}

#[cfg(test)]
mod tests {
    use super::{Failure, Header, Plan, pick, quoted};

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
    fn a_plan_is_the_same_by_checksums_and_never_by_their_absence() {
        let plan = |sums: [Option<u64>; 2], text: &str| {
            let plan = Plan::of(&Header::parse(text.to_owned()).unwrap());
            Plan { checksums: sums.to_vec(), ..plan }
        };
        let (sums, other) = ([Some(1), Some(2)], TEXT.replace("[2]", "[1,2]"));
        assert!(plan(sums, TEXT).is_same(&plan(sums, TEXT)));
        assert!(!plan(sums, TEXT).is_same(&plan(sums, &other)));
        assert!(!plan(sums, TEXT).is_same(&plan([Some(1), Some(3)], TEXT)));
        assert!(!plan([Some(1), None], TEXT).is_same(&plan([Some(1), None], TEXT)));
    }

    #[test]
    fn long_lists_of_names_are_cut() {
        let names = ["1", "2", "3", "4", "5", "6", "7"];
        assert_eq!(quoted(names.into_iter()), "`1`, `2`, `3`, `4`, `5` and 2 more");
    }
}
