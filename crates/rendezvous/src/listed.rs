//! What a peer says that it has published, page by page, as far as a peer may go on saying.

use protocol::{Code, Status, wire::control::ListEntry};

use crate::{Published, Version};

/// Longest list of one peer, in bytes as it travels: some millions of usual names.
pub(crate) const LIST_BYTES_MAX: usize = 256 << 20;

/// The pages that have come.
#[derive(Debug)]
pub(crate) struct ListSoFar {
    pub(crate) entries: Vec<Published>,
    bytes: usize,
    bytes_max: usize,
}

/// Why a page is not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ListRefused {
    /// Its names do not go on where the page before ended: it would never end.
    Disordered,
    /// The list is longer than may be.
    TooLong(Status),
}

impl ListSoFar {
    /// No page yet.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { entries: Vec::new(), bytes: 0, bytes_max }
    }

    /// The name that the next page begins after.
    pub(crate) fn last_name(&self) -> Option<String> {
        self.entries.last().map(|entry| entry.name.clone())
    }

    /// Takes a page of a peer in that life.
    ///
    /// # Errors
    /// Why the list is over.
    pub(crate) fn take(&mut self, page: Vec<ListEntry>, incarnation: u64) -> Result<(), ListRefused> {
        for entry in page {
            if self.entries.last().is_some_and(|last| last.name >= entry.name) {
                return Err(ListRefused::Disordered);
            }
            self.bytes += entry.encoded_length();
            if self.bytes > self.bytes_max {
                let message = format!(
                    "the peer lists more than {} bytes of names and shapes: fetch by name instead",
                    self.bytes_max
                );
                return Err(ListRefused::TooLong(Status::new(Code::ResourceExhausted, message)));
            }
            let version = Version { incarnation, number: entry.version };
            let ListEntry { name, metadata, checksum, .. } = entry;
            self.entries.push(Published { name, metadata, version, checksum });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use protocol::{DataType, Metadata, Shape};

    use super::*;

    fn entry(name: String, rank: usize) -> ListEntry {
        let shape = Shape::new(vec![1; rank]).unwrap();
        let metadata = Metadata::new(DataType::U8, shape).unwrap();
        ListEntry { name, metadata, version: 1, checksum: None }
    }

    #[test]
    fn s5_a_list_that_does_not_go_on_is_refused() {
        let mut list = ListSoFar::new(1 << 20);
        assert_eq!(list.take(vec![entry("a".into(), 0), entry("b".into(), 0)], 7), Ok(()));
        assert_eq!(list.last_name().as_deref(), Some("b"));
        assert_eq!(list.take(Vec::new(), 7), Ok(()));
        assert_eq!(
            list.take(vec![entry("c".into(), 0), entry("c".into(), 0)], 7),
            Err(ListRefused::Disordered)
        );
        assert_eq!(list.take(vec![entry("a".into(), 0)], 7), Err(ListRefused::Disordered));
        assert_eq!(list.entries.len(), 3);
    }

    #[test]
    fn s4_a_list_without_an_end_is_refused() {
        let mut list = ListSoFar::new(1 << 20);
        let page = |number: usize| vec![entry(format!("{number:08}{}", "x".repeat(1000)), 254)];
        let pages = (0..1_000_000).take_while(|&number| list.take(page(number), 7).is_ok()).count();
        assert!((300..400).contains(&pages), "{pages}");
        let refused = list.take(page(usize::MAX), 7).unwrap_err();
        assert!(matches!(refused, ListRefused::TooLong(status) if status.message.contains("1048576")));
    }
}
