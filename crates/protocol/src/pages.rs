//! [`PageMoves`]: which pages of a sender's memory go to which pages of the receiver's.

use std::fmt;

use crate::{limits::PAGES_PER_REQUEST_MAX, text::number};

/// One page of the sender's and the page of the receiver's that it goes to, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageMove {
    /// The sender's page.
    pub from: u32,
    /// The receiver's page.
    pub to: u32,
}

/// Pages that one request moves, in order. No two go to the same page.
///
/// A request has their text behind the name of the arena: `kv{5>20+8,91>3}` moves the eight pages from number 5 on to those from number 20
/// on, and page 91 to page 3. Names may contain braces, because the text begins at the last one.
///
/// ```
/// use tensorwire_protocol::pages::{PageMove, PageMoves};
///
/// let moves = PageMoves::new((0..3).map(|page| PageMove { from: 5 + page, to: 20 + page })).unwrap();
/// assert_eq!(moves.to_string(), "{5>20+3}");
/// assert_eq!(PageMoves::split("kv{5>20+3}").unwrap(), ("kv", moves));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageMoves(Vec<PageMove>);

/// Why a list of pages cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidPages {
    /// A text that ends with no list.
    #[error("`{text}` does not end with pages to move, such as `{{5>20+8,91>3}}`")]
    Text {
        /// The text.
        text: String,
    },
    /// More pages than one request moves.
    #[error("a request moves at most {PAGES_PER_REQUEST_MAX} pages")]
    TooMany,
    /// Two pages that go to the same one.
    #[error("two pages go to page {to}")]
    Twice {
        /// The receiver's page.
        to: u32,
    },
}

impl PageMoves {
    /// The list of these.
    ///
    /// # Errors
    /// [`InvalidPages`].
    pub fn new(moves: impl IntoIterator<Item = PageMove>) -> Result<Self, InvalidPages> {
        let moves: Vec<_> = moves.into_iter().take(PAGES_PER_REQUEST_MAX + 1).collect();
        if moves.len() > PAGES_PER_REQUEST_MAX {
            return Err(InvalidPages::TooMany);
        }
        let mut sorted: Vec<_> = moves.iter().map(|page| page.to).collect();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(InvalidPages::Twice { to: pair[0] }),
            None => Ok(Self(moves)),
        }
    }

    /// The name and the list that `text` consists of.
    ///
    /// # Errors
    /// [`InvalidPages`]. Only what [`Display`](fmt::Display) writes is a list.
    pub fn split(text: &str) -> Result<(&str, Self), InvalidPages> {
        let invalid = || InvalidPages::Text { text: text.to_owned() };
        let (name, rest) = text.rsplit_once('{').ok_or_else(invalid)?;
        let inner = rest.strip_suffix('}').ok_or_else(invalid)?;
        let mut moves = Vec::new();
        for run in inner.split(',').filter(|_| !inner.is_empty()) {
            let run = Run::parse(run).ok_or_else(invalid)?;
            // A long list is refused before it is made.
            if moves.len() + run.count as usize > PAGES_PER_REQUEST_MAX {
                return Err(InvalidPages::TooMany);
            }
            moves.extend(run.moves());
        }
        let moves = Self::new(moves)?;
        // Each list has one text.
        if moves.to_string().len() == rest.len() + 1 { Ok((name, moves)) } else { Err(invalid()) }
    }

    /// Its moves, in order.
    pub fn as_slice(&self) -> &[PageMove] {
        &self.0
    }

    fn runs(&self) -> impl Iterator<Item = Run> {
        self.0.chunk_by(|one, next| one.is_before(*next)).filter_map(|run| {
            let first = run.first()?;
            Some(Run { from: first.from, to: first.to, count: run.len() as u32 })
        })
    }
}

impl PageMove {
    fn is_before(self, next: Self) -> bool {
        self.from.checked_add(1) == Some(next.from) && self.to.checked_add(1) == Some(next.to)
    }
}

impl fmt::Display for PageMoves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (number, Run { from, to, count }) in self.runs().enumerate() {
            let separator = if number == 0 { "" } else { "," };
            write!(f, "{separator}{from}>{to}")?;
            if count > 1 {
                write!(f, "+{count}")?;
            }
        }
        f.write_str("}")
    }
}

/// Pages that follow each other at both ends.
struct Run {
    from: u32,
    to: u32,
    count: u32,
}

impl Run {
    fn parse(text: &str) -> Option<Self> {
        let (from, rest) = text.split_once('>')?;
        let (to, count) = match rest.split_once('+') {
            Some((to, count)) => (to, number(count).filter(|count| *count > 1)?),
            None => (rest, 1),
        };
        let run = Self { from: number(from)?, to: number(to)?, count };
        // The last page has a number, too.
        run.from.checked_add(run.count - 1)?;
        run.to.checked_add(run.count - 1)?;
        Some(run)
    }

    fn moves(self) -> impl Iterator<Item = PageMove> {
        (0..self.count).map(move |page| PageMove { from: self.from + page, to: self.to + page })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_list_is_what_its_text_says(pages in proptest::collection::btree_map(any::<u32>(), any::<u32>(), 0..=64), run in 0_u32..20) {
            let run = (0..run).map(|page| PageMove { from: 7 + page, to: 1000 + page });
            let pages = pages.into_iter().map(|(to, from)| PageMove { from, to });
            let all: Vec<_> = pages.chain(run).take(PAGES_PER_REQUEST_MAX).collect();
            if let Ok(moves) = PageMoves::new(all) {
                let text = format!("a{{0}}{moves}");
                prop_assert_eq!(PageMoves::split(&text), Ok(("a{0}", moves)));
            }
        }

        #[test]
        fn no_other_text_is_a_list(text in "[a-z]{0,2}\\{[0-9>+,]{0,12}\\}?") {
            if let Ok((name, moves)) = PageMoves::split(&text) {
                prop_assert_eq!(format!("{name}{moves}"), text);
            }
        }
    }

    #[test]
    fn a_list_that_is_too_long_or_has_a_page_twice_is_refused() {
        let moves = |pages: u32| PageMoves::new((0..pages).map(|page| PageMove { from: 0, to: page }));
        assert!(moves(PAGES_PER_REQUEST_MAX as u32).is_ok());
        assert_eq!(moves(PAGES_PER_REQUEST_MAX as u32 + 1), Err(InvalidPages::TooMany));
        assert_eq!(PageMoves::split("a{0>0+4294967295}"), Err(InvalidPages::TooMany));
        assert_eq!(PageMoves::split("a{1>2,3>2}"), Err(InvalidPages::Twice { to: 2 }));
        for text in [
            "a",
            "a{1>2",
            "a{1>2}b",
            "a{1}",
            "a{1>2+1}",
            "a{01>2}",
            "a{1>2,}",
            "a{1>2,2>3}",
            "a{4294967295>0+2}",
        ] {
            assert!(matches!(PageMoves::split(text), Err(InvalidPages::Text { .. })), "{text}");
        }
        assert_eq!(PageMoves::split("a{}").unwrap().1.as_slice(), []);
    }
}
