//! [`Slice`]: a part of a tensor.

use std::{fmt, ops::Range};

use crate::{DataType, Metadata, Shape, limits::RANK_MAX, text::number};

/// A part of a tensor: a range of elements in each dimension; none for a scalar.
///
/// A request for a slice has its text behind the name: `weight[0:128,64:128]`. Names may contain brackets, because the slice begins at the
/// last one.
///
/// ```
/// use tensorwire_protocol::slice::Slice;
///
/// let slice = Slice::new(&[0..2, 1..3])?;
/// assert_eq!(slice.to_string(), "[0:2,1:3]");
/// assert_eq!(Slice::split("w[0][0:2,1:3]")?, ("w[0]", slice.clone()));
/// // In a tensor of 3 rows and 4 columns it has two runs of elements.
/// assert_eq!(slice.runs(&[3, 4]).collect::<Vec<_>>(), [1..3, 5..7]);
/// # Ok::<(), tensorwire_protocol::slice::InvalidSlice>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Slice(Vec<Range<u64>>);

/// Why a slice cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSlice {
    /// A text that ends with no slice.
    #[error("`{text}` does not end with a range of each dimension, such as `[0:128,64:128]`")]
    Text {
        /// The text.
        text: String,
    },
    /// A range that ends before it begins.
    #[error("the range {start}..{end} of dimension {dimension} ends before it begins")]
    Reversed {
        /// The dimension, from 0.
        dimension: usize,
        /// The first element.
        start: u64,
        /// Behind the last element.
        end: u64,
    },
    /// Another number of ranges than the tensor has dimensions.
    #[error("{ranges} ranges do not fit a tensor of {rank} dimensions: give one for each")]
    Rank {
        /// The number of ranges.
        ranges: usize,
        /// The number of dimensions.
        rank: usize,
    },
    /// A range that the dimension does not have.
    #[error("the range {start}..{end} exceeds dimension {dimension}, which has {length} elements")]
    Outside {
        /// The dimension, from 0.
        dimension: usize,
        /// The first element.
        start: u64,
        /// Behind the last element.
        end: u64,
        /// The length of the dimension.
        length: u64,
    },
    /// An element type whose elements do not begin at bytes.
    #[error("elements of type {0} are not a whole number of bytes each: take the whole tensor")]
    Type(DataType),
}

impl Slice {
    /// With these ranges.
    ///
    /// # Errors
    /// [`InvalidSlice::Reversed`], and [`InvalidSlice::Rank`] for more ranges than a tensor may have dimensions.
    pub fn new(ranges: &[Range<u64>]) -> Result<Self, InvalidSlice> {
        if ranges.len() > RANK_MAX {
            return Err(InvalidSlice::Rank { ranges: ranges.len(), rank: RANK_MAX });
        }
        match ranges.iter().enumerate().find(|(_, range)| range.start > range.end) {
            Some((dimension, &Range { start, end })) => Err(InvalidSlice::Reversed { dimension, start, end }),
            None => Ok(Self(ranges.to_vec())),
        }
    }

    /// All of a tensor of this shape.
    pub fn whole(shape: &[u64]) -> Self {
        Self(shape.iter().map(|&length| 0..length).collect())
    }

    /// The name and the slice that `text` consists of.
    ///
    /// # Errors
    /// [`InvalidSlice`]. Only what [`Display`](fmt::Display) writes is a slice.
    pub fn split(text: &str) -> Result<(&str, Self), InvalidSlice> {
        let invalid = || InvalidSlice::Text { text: text.to_owned() };
        let (name, rest) = text.rsplit_once('[').ok_or_else(invalid)?;
        let inner = rest.strip_suffix(']').ok_or_else(invalid)?;
        let ranges = match inner {
            "" => Some(Vec::new()),
            // A long text is refused before its ranges are read.
            _ if inner.bytes().filter(|byte| *byte == b',').count() >= RANK_MAX => None,
            _ => inner.split(',').map(range).collect::<Option<Vec<_>>>(),
        };
        Ok((name, Self::new(&ranges.ok_or_else(invalid)?)?))
    }

    /// A range for each dimension.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// The lengths of its ranges.
    pub fn lengths(&self) -> Vec<u64> {
        self.0.iter().map(length).collect()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.0.iter().any(Range::is_empty)
    }

    /// The metadata of this slice of a tensor of metadata `whole`.
    ///
    /// # Errors
    /// [`InvalidSlice`] if the tensor has no such slice.
    pub fn metadata(&self, whole: &Metadata) -> Result<Metadata, InvalidSlice> {
        let rank = whole.shape.dimensions().len();
        if self.0.len() != rank {
            return Err(InvalidSlice::Rank { ranges: self.0.len(), rank });
        }
        let mut dimensions = self.0.iter().zip(whole.shape.dimensions()).enumerate();
        if let Some((dimension, (range, &length))) =
            dimensions.find(|(_, (range, length))| range.end > **length)
        {
            let Range { start, end } = *range;
            return Err(InvalidSlice::Outside { dimension, start, end, length });
        }
        let dtype = whole.dtype;
        if !dtype.bits().is_multiple_of(8) || !dtype.is_plain() {
            return Err(InvalidSlice::Type(dtype));
        }
        let shape = Shape::new(self.lengths()).ok_or(InvalidSlice::Rank { ranges: self.0.len(), rank })?;
        if whole.is_dead {
            return Ok(Metadata::dead(dtype, shape));
        }
        Metadata::new(dtype, shape).ok_or(InvalidSlice::Type(dtype))
    }

    /// What this slice has in common with `other`; `None` if that is nothing, or the numbers of ranges differ.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.0.len() != other.0.len() {
            return None;
        }
        let ranges = self.0.iter().zip(&other.0);
        let ranges = ranges.map(|(one, other)| one.start.max(other.start)..one.end.min(other.end));
        ranges.map(|range| Some(range).filter(|range| !range.is_empty())).collect::<Option<_>>().map(Self)
    }

    /// Where the elements of this slice are in a tensor of this shape, of which it is a slice: runs of elements, in row-major order,
    /// none next to the one before.
    pub fn runs(&self, shape: &[u64]) -> Runs {
        Runs::new(self, shape)
    }

    /// The elements, if they are one run in a tensor of this shape, of which it is a slice; `0..0` for none.
    pub fn contiguous(&self, shape: &[u64]) -> Option<Range<u64>> {
        let runs = self.runs(shape);
        runs.outer.is_empty().then(|| runs.next.map_or(0..0, |start| start..start + runs.length))
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dimension, Range { start, end }) in self.0.iter().enumerate() {
            let separator = if dimension == 0 { "" } else { "," };
            write!(f, "{separator}{start}:{end}")?;
        }
        f.write_str("]")
    }
}

/// Elements of a range that does not end before it begins.
fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

fn range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once(':')?;
    Some(number(start)?..number(end)?)
}

/// The runs of elements of a slice.
#[derive(Debug, Clone)]
pub struct Runs {
    /// The first element of the next run.
    next: Option<u64>,
    /// Elements of each run.
    length: u64,
    /// The dimensions in which the runs repeat, the innermost first.
    outer: Vec<Repeated>,
}

#[derive(Debug, Clone)]
struct Repeated {
    at: u64,
    count: u64,
    /// Elements from one run to the next.
    stride: u64,
}

impl Runs {
    fn new(slice: &Slice, shape: &[u64]) -> Self {
        if slice.is_empty() {
            return Self { next: None, length: 0, outer: Vec::new() };
        }
        let (mut start, mut length, mut stride, mut is_whole) = (0_u64, 1_u64, 1_u64, true);
        let mut outer = Vec::new();
        for (range, &dimension) in slice.0.iter().zip(shape).rev() {
            let count = self::length(range);
            start = start.saturating_add(range.start.saturating_mul(stride));
            if is_whole {
                length = length.saturating_mul(count);
                is_whole = count == dimension;
            } else if count > 1 {
                outer.push(Repeated { at: 0, count, stride });
            }
            stride = stride.saturating_mul(dimension);
        }
        Self { next: Some(start), length, outer }
    }

    /// The first element of the run after the one that begins at `start`.
    fn after(&mut self, mut start: u64) -> Option<u64> {
        for dimension in &mut self.outer {
            dimension.at += 1;
            if dimension.at < dimension.count {
                return Some(start.saturating_add(dimension.stride));
            }
            dimension.at = 0;
            start = start.saturating_sub(dimension.stride.saturating_mul(dimension.count - 1));
        }
        None
    }
}

impl Iterator for Runs {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.next?;
        self.next = self.after(start);
        Some(start..start.saturating_add(self.length))
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // tensors of one dimension
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slice(ranges: &[Range<u64>]) -> Slice {
        Slice::new(ranges).unwrap()
    }

    /// A shape, and a slice of it.
    fn part() -> impl Strategy<Value = (Vec<u64>, Slice)> {
        let dimension = (0..6_u64, 0..6_u64, 0..6_u64).prop_map(|(one, other, third)| {
            let mut all = [one, other, third];
            all.sort();
            (all[2], all[0]..all[1])
        });
        proptest::collection::vec(dimension, 0..5).prop_map(|dimensions| {
            let (shape, ranges): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
            (shape, slice(&ranges))
        })
    }

    /// The elements of `slice`, one by one.
    fn elements(shape: &[u64], slice: &Slice) -> Vec<u64> {
        let all = shape.iter().product::<u64>();
        let is_inside = |element: &u64| {
            let mut rest = *element;
            let mut dimensions = shape.iter().zip(slice.ranges()).rev();
            dimensions.all(|(length, range)| {
                let place = rest % length;
                rest /= length;
                range.contains(&place)
            })
        };
        (0..all).filter(is_inside).collect()
    }

    #[test]
    fn a_slice_has_the_metadata_of_its_ranges() {
        let of = |dtype, shape: &[u64]| Metadata::new(dtype, Shape::new(shape).unwrap()).unwrap();
        let whole = of(DataType::Bf16, &[4, 6]);
        assert_eq!(slice(&[1..3, 0..6]).metadata(&whole), Ok(of(DataType::Bf16, &[2, 6])));
        assert_eq!(slice(&[4..4, 0..6]).metadata(&whole), Ok(of(DataType::Bf16, &[0, 6])));
        let outside = InvalidSlice::Outside { dimension: 1, start: 2, end: 7, length: 6 };
        assert_eq!(slice(&[0..4, 2..7]).metadata(&whole), Err(outside));
        let of_one = slice(&[0..4]).metadata(&whole);
        assert_eq!(of_one, Err(InvalidSlice::Rank { ranges: 1, rank: 2 }));
        let strings = Metadata::encoded(DataType::String, Shape::new([3]).unwrap(), 9).unwrap();
        assert_eq!(slice(&[0..1]).metadata(&strings), Err(InvalidSlice::Type(DataType::String)));
        let dead = Metadata::dead(DataType::F32, Shape::new([3]).unwrap());
        assert_eq!(slice(&[0..1]).metadata(&dead).unwrap().byte_length, 0);
        assert_eq!(slice(&[]).metadata(&of(DataType::U8, &[])).unwrap().byte_length, 1);
        let huge = Metadata::new(DataType::F64, Shape::new([0, 1 << 63, 1 << 63]).unwrap()).unwrap();
        assert_eq!(slice(&[0..0, 0..1 << 63, 0..1 << 63]).metadata(&huge).unwrap().byte_length, 0);
        let reversed = Slice::new(&[0..1, Range { start: 3, end: 2 }]);
        assert_eq!(reversed, Err(InvalidSlice::Reversed { dimension: 1, start: 3, end: 2 }));
        assert!(Slice::new(&vec![0..1; RANK_MAX + 1]).is_err());
    }

    #[test]
    fn rows_are_one_run_and_columns_are_not() {
        assert_eq!(slice(&[2..5, 0..7]).contiguous(&[9, 7]), Some(14..35));
        assert_eq!(slice(&[2..3, 1..4]).contiguous(&[9, 7]), Some(15..18));
        assert_eq!(slice(&[2..4, 1..4]).contiguous(&[9, 7]), None);
        assert_eq!(slice(&[1..2, 2..4, 0..7]).contiguous(&[3, 9, 7]), Some(77..91));
        assert_eq!(slice(&[]).contiguous(&[]), Some(0..1));
        assert_eq!(slice(&[2..4, 3..3]).contiguous(&[9, 7]), Some(0..0));
    }

    #[test]
    fn s5_texts_that_end_with_no_slice_are_refused() {
        let long = format!("w[{}]", vec!["0:1"; RANK_MAX + 1].join(","));
        let refused = [
            "",
            "w",
            "w[",
            "w]",
            "w[0:1",
            "w0:1]",
            "w[0:1]x",
            "w[0:1,]",
            "w[,0:1]",
            "w[0]",
            "w[0:1:2]",
            "w[00:1]",
            "w[+0:1]",
            "w[-1:1]",
            "w[0: 1]",
            "w[0:1 ]",
            "w[:1]",
            "w[0:]",
            "w[2:1]",
            "w[0:18446744073709551616]",
            "w[٠:١]",
            &long,
        ];
        for text in refused {
            assert!(Slice::split(text).is_err(), "{text}");
        }
        let most = format!("w[{}]", vec!["0:1"; RANK_MAX].join(","));
        assert_eq!(Slice::split(&most).unwrap().1.ranges().len(), RANK_MAX);
        assert_eq!(Slice::split("w[]").unwrap(), ("w", slice(&[])));
        let last = u64::MAX;
        assert_eq!(Slice::split("[a][0:18446744073709551615]").unwrap(), ("[a]", slice(&[0..last])));
    }

    proptest! {
        #[test]
        fn a_text_leads_back(name in ".{0,20}", (_, slice) in part()) {
            let text = format!("{name}{slice}");
            prop_assert_eq!(Slice::split(&text).unwrap(), (&*name, slice));
        }

        #[test]
        fn s5_any_text_is_a_slice_or_an_error(text in ".{0,9}\\[[0-9:,\\[\\]]{0,40}") {
            if let Ok((name, slice)) = Slice::split(&text) {
                prop_assert_eq!(format!("{name}{slice}"), text);
                prop_assert!(slice.ranges().iter().all(|range| range.start <= range.end));
            }
        }

        #[test]
        fn runs_are_the_elements_of_the_slice((shape, slice) in part()) {
            let runs: Vec<_> = slice.runs(&shape).collect();
            let all: Vec<_> = runs.iter().cloned().flatten().collect();
            prop_assert_eq!(&all, &elements(&shape, &slice));
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", runs);
            prop_assert_eq!(slice.contiguous(&shape).is_some(), runs.len() <= 1);
            let metadata = Metadata::new(DataType::U16, Shape::new(&shape).unwrap()).unwrap();
            prop_assert_eq!(slice.metadata(&metadata).unwrap().byte_length, 2 * all.len() as u64);
        }

        #[test]
        fn an_intersection_has_the_common_elements((shape, one) in part(), starts in any::<[u8; 5]>()) {
            let ranges = shape.iter().zip(starts).map(|(&length, start)| {
                let start = u64::from(start) % (length + 1);
                start..length.min(start + 2)
            });
            let other = slice(&ranges.collect::<Vec<_>>());
            let others = elements(&shape, &other);
            let common: Vec<_> = elements(&shape, &one).into_iter().filter(|at| others.contains(at)).collect();
            let found = one.intersection(&other);
            prop_assert_eq!(&found, &other.intersection(&one));
            prop_assert_eq!(found.map_or_else(Vec::new, |found| elements(&shape, &found)), common);
        }
    }
}
