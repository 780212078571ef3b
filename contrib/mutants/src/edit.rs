//! Changes to a source text that keep every line where it is.

use std::{cmp::Reverse, ops::Range};

/// Text around a range of the source.
#[derive(Debug)]
struct Wrap {
    range: Range<usize>,
    before: String,
    after: String,
}

/// Wraps to apply at once. Ranges are nested or apart; of equal ones the first is the outermost.
#[derive(Debug, Default)]
pub(crate) struct Edits(Vec<Wrap>);

impl Edits {
    /// Puts `before` and `after` around `range`.
    pub(crate) fn wrap(&mut self, range: Range<usize>, before: String, after: &str) {
        self.0.push(Wrap { range, before, after: after.to_owned() });
    }

    /// The source with every wrap in it.
    pub(crate) fn apply(&self, source: &str) -> String {
        let mut places = Vec::with_capacity(2 * self.0.len());
        for (index, wrap) in self.0.iter().enumerate() {
            let Range { start, end } = wrap.range;
            // Wraps that end at an offset come before those that begin there; an inner wrap ends first and begins last.
            places.push(((start, 1, Reverse(end), index), &wrap.before));
            places.push((
                (end, usize::from(start == end) * 2, Reverse(start), usize::MAX - index),
                &wrap.after,
            ));
        }
        places.sort();
        let mut changed = String::with_capacity(2 * source.len());
        let mut done = 0;
        for ((at, ..), text) in places {
            changed.push_str(&source[done..at]);
            changed.push_str(text);
            done = at;
        }
        changed.push_str(&source[done..]);
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_nest_and_lines_stay() {
        let mut edits = Edits::default();
        edits.wrap(0..5, "<".to_owned(), ">");
        edits.wrap(0..5, "(".to_owned(), ")");
        edits.wrap(0..1, "[".to_owned(), "]");
        edits.wrap(4..5, "{".to_owned(), "}");
        edits.wrap(5..5, "!".to_owned(), "");
        edits.wrap(5..6, "'".to_owned(), "'");
        assert_eq!(edits.apply("a +\nb\n"), "<([a] +\n{b})>'!\n'");
    }
}
