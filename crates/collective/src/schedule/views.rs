//! What the ranks of a host offer each other in [`Algorithm::Views`](super::Algorithm::Views).
//!
//! The value is cut into segments, and each segment has a part for each rank, which that rank combines. A rank offers one content at a
//! time to all others:
//!
//! ```text
//! content      result of its part of segment    values, for all other ranks, of segment
//! 0                                             0 and 1
//! 1            0                                2
//! n            n - 1                            n + 1
//! last         the last
//! ```
//!
//! So the values of a segment are offered before the previous segment is combined. If the first content is the whole value, the others have
//! results alone.

use std::ops::Range;

use super::parts;

/// The segment that all ranks combine before they go on. A longer one leaves the processor's cache before its results are read; a
/// shorter one needs more messages for the same bytes.
const SEGMENT_BYTES: usize = 1 << 20;

/// The segments of a value.
#[derive(Debug)]
pub(crate) struct Segments {
    size: usize,
    /// Whether the first content is the whole value.
    begins_whole: bool,
    /// The part of each rank, as a range of bytes of the value.
    parts: Vec<Vec<Range<usize>>>,
}

impl Segments {
    /// The segments of `bytes` bytes with elements of `width` bytes for `size` ranks.
    pub(crate) fn new(bytes: usize, width: usize, size: usize, begins_whole: bool) -> Self {
        let (count, segment) = (bytes / width, SEGMENT_BYTES / width);
        let segments = (0..count).step_by(segment).map(|start| start..(start + segment).min(count));
        let in_bytes = |part: Range<usize>| part.start * width..part.end * width;
        let parts = segments.map(|segment| parts(segment, size).into_iter().map(in_bytes).collect());
        Self { size, begins_whole, parts: parts.collect() }
    }

    pub(crate) fn ranks(&self) -> Range<usize> {
        0..self.size
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// The part of `rank` in segment `number`, as a range of the value.
    pub(crate) fn part(&self, number: usize, rank: usize) -> Range<usize> {
        self.parts.get(number).and_then(|parts| parts.get(rank)).cloned().unwrap_or_default()
    }

    /// The segments of which content `content` has the values for the other ranks.
    pub(crate) fn values_of(&self, content: usize) -> Range<usize> {
        if self.begins_whole {
            return 0..0;
        }
        let first = if content == 0 { 0 } else { content + 1 };
        first.min(self.count())..(content + 2).min(self.count())
    }

    /// The length of content `content` of `rank`.
    pub(crate) fn content_bytes(&self, content: usize, rank: usize) -> usize {
        if self.begins_whole && content == 0 {
            return self.parts.iter().flatten().map(Range::len).sum();
        }
        let values = self.values_of(content).map(|segment| self.bytes_for_others(segment, rank));
        self.result_bytes(content, rank) + values.sum::<usize>()
    }

    /// The length of the result with which content `content` of `rank` begins.
    pub(crate) fn result_bytes(&self, content: usize, rank: usize) -> usize {
        content.checked_sub(1).map_or(0, |segment| self.part(segment, rank).len())
    }

    /// The offset of the values of `from` for `to` in a segment, within the only content of `from` that has them.
    pub(crate) fn value(&self, segment: usize, from: usize, to: usize) -> Range<usize> {
        if self.begins_whole {
            return self.part(segment, to);
        }
        let content = segment.saturating_sub(1);
        let before = self.values_of(content).start..segment;
        let before: usize = before.map(|segment| self.bytes_for_others(segment, from)).sum();
        let earlier = (0..to).filter(|rank| *rank != from).map(|rank| self.part(segment, rank).len());
        let start = self.result_bytes(content, from) + before + earlier.sum::<usize>();
        start..start + self.part(segment, to).len()
    }

    fn bytes_for_others(&self, segment: usize, rank: usize) -> usize {
        let parts = self.parts.get(segment).into_iter().flatten();
        parts.map(Range::len).sum::<usize>() - self.part(segment, rank).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_rank_is_offered_once_and_contents_have_no_gaps() {
        let segment = SEGMENT_BYTES;
        for (bytes, width, size) in
            [(0, 4, 2), (4, 4, 3), (segment, 8, 4), (5 * segment / 2 + 8, 8, 3), (4 * segment, 1, 2)]
        {
            let segments = Segments::new(bytes, width, size, false);
            assert_eq!(segments.count(), bytes.div_ceil(segment));
            for from in 0..size {
                let mut contents = vec![Vec::new(); segments.count() + 1];
                for number in 0..segments.count() {
                    contents[number + 1].push(0..segments.part(number, from).len());
                    for to in (0..size).filter(|to| *to != from) {
                        let value = segments.value(number, from, to);
                        assert_eq!(value.len(), segments.part(number, to).len());
                        contents[number.saturating_sub(1)].push(value);
                    }
                }
                for (content, mut ranges) in contents.into_iter().enumerate() {
                    ranges.sort_by_key(|range| (range.start, range.end));
                    let end = ranges.iter().fold(0, |end, range| {
                        assert_eq!(range.start, end, "{bytes} bytes, content {content} of rank {from}");
                        range.end
                    });
                    assert_eq!(segments.content_bytes(content, from), end);
                }
            }
        }
    }

    #[test]
    fn parts_cover_the_value_and_hold_whole_elements() {
        let segments = Segments::new(3 * SEGMENT_BYTES + 48, 16, 3, false);
        let parts = (0..segments.count()).flat_map(|number| (0..3).map(move |rank| (number, rank)));
        let end = parts.fold(0, |end, (number, rank)| {
            let part = segments.part(number, rank);
            assert!(part.start == end && part.len().is_multiple_of(16));
            part.end
        });
        assert_eq!(end, 3 * SEGMENT_BYTES + 48);
    }

    #[test]
    fn results_alone_follow_a_whole_value() {
        let segments = Segments::new(2 * SEGMENT_BYTES + 16, 16, 3, true);
        assert_eq!(segments.content_bytes(0, 1), 2 * SEGMENT_BYTES + 16);
        for number in 0..segments.count() {
            assert_eq!(segments.content_bytes(number + 1, 1), segments.part(number, 1).len());
            assert_eq!(segments.value(number, 0, 1), segments.part(number, 1));
            assert!(segments.values_of(number).is_empty());
        }
    }
}
