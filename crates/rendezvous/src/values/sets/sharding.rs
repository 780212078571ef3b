//! How tensors of several publishers make a larger one.

use std::ops::Range;

use super::reading::{Problem, Reader, write_number};

/// How a tensor is part of a larger one: it is the concatenation, along a dimension, of ranges of that dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Sharding {
    pub(crate) axis: usize,
    /// Elements of the dimension in the larger tensor.
    pub(crate) length: u64,
    /// Ascending, and none with elements of another.
    pub(crate) ranges: Vec<Range<u64>>,
}

impl Sharding {
    /// Checks that a tensor of this shape can be sharded in this way.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn check(&self, shape: &[u64]) -> Result<(), &'static str> {
        let dimension = *shape.get(self.axis).ok_or("the tensor has no such dimension")?;
        check_ranges(&self.ranges, self.length)?;
        if elements(&self.ranges) == dimension {
            Ok(())
        } else {
            Err("the ranges have another length than the tensor")
        }
    }

    /// So many numbers encode it.
    pub(super) fn numbers(&self) -> usize {
        3 + 2 * self.ranges.len()
    }
}

/// Checks that the ranges ascend up to `length`.
pub(crate) fn check_ranges(ranges: &[Range<u64>], length: u64) -> Result<(), &'static str> {
    let mut end = 0;
    for range in ranges {
        if range.start < end || range.end < range.start {
            return Err("the ranges do not ascend");
        }
        end = range.end;
    }
    if end <= length { Ok(()) } else { Err("a range exceeds the dimension") }
}

/// Elements of ascending ranges.
pub(crate) fn elements(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Each range with its first place in their concatenation.
pub(crate) fn placed(ranges: &[Range<u64>]) -> impl Iterator<Item = (&Range<u64>, u64)> {
    ranges.iter().scan(0, |next, range| {
        let at = *next;
        *next += range.end - range.start;
        Some((range, at))
    })
}

/// Writes the sharding of a tensor: 0 for a whole one, else the axis from 1 on, the length, and the ranges as gaps and lengths.
pub(super) fn write_sharding(into: &mut Vec<u8>, sharding: Option<&Sharding>) {
    let Some(Sharding { axis, length, ranges }) = sharding else { return write_number(into, 0) };
    write_number(into, *axis as u64 + 1);
    write_number(into, *length);
    write_number(into, ranges.len() as u64);
    let mut end = 0;
    for range in ranges {
        write_number(into, range.start - end);
        write_number(into, range.end - range.start);
        end = range.end;
    }
}

/// The sharding of a tensor of this shape.
pub(super) fn read_sharding(reader: &mut Reader<'_>, shape: &[u64]) -> Result<Option<Sharding>, Problem> {
    let Some(axis) = reader.number()?.checked_sub(1) else { return Ok(None) };
    let axis = usize::try_from(axis).map_err(|_| "a tensor has no such dimension")?;
    let length = reader.number()?;
    let count = reader.count(2)?;
    let mut ranges = Vec::with_capacity(count);
    let mut next = 0_u64;
    for _ in 0..count {
        let start = next.checked_add(reader.number()?).ok_or("a range is too large")?;
        next = start.checked_add(reader.number()?).ok_or("a range is too large")?;
        ranges.push(start..next);
    }
    let sharding = Sharding { axis, length, ranges };
    sharding.check(shape)?;
    Ok(Some(sharding))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // tensors of one dimension
mod tests {
    use super::*;

    fn sharding(axis: usize, length: u64, ranges: &[Range<u64>]) -> Sharding {
        Sharding { axis, length, ranges: ranges.to_vec() }
    }

    #[test]
    fn shardings_lead_back() {
        for sharding in
            [None, Some(sharding(1, 12, &[0..2, 4..4, 8..12])), Some(sharding(1, u64::MAX, &[5..11]))]
        {
            let mut bytes = Vec::new();
            write_sharding(&mut bytes, sharding.as_ref());
            let mut reader = Reader::new(&bytes);
            assert_eq!(read_sharding(&mut reader, &[3, 6]), Ok(sharding));
            assert_eq!(reader.end(), Ok(()));
        }
    }

    #[test]
    fn s5_shardings_that_do_not_fit_are_refused() {
        let short = sharding(0, 10, &[0..4]);
        assert!(short.check(&[5, 3]).is_err() && short.check(&[]).is_err());
        assert!(sharding(0, 10, &[4..5, 0..3]).check(&[4]).is_err());
        assert!(sharding(0, 10, &[4..11]).check(&[7]).is_err());
        let most = u64::MAX;
        let refused: [&[u64]; 6] = [
            &[1, 10, 1, 0, 5],      // another length than that of the dimension
            &[3, 10, 1, 0, 4],      // no such dimension
            &[1, 3, 1, 0, 4],       // behind the end
            &[1, 10, 9, 0, 4],      // more ranges than bytes
            &[1, most, 1, most, 4], // beyond 64 bits
            &[most, 10, 1, 0, 4],
        ];
        for numbers in refused {
            let mut bytes = Vec::new();
            numbers.iter().for_each(|&number| write_number(&mut bytes, number));
            assert!(read_sharding(&mut Reader::new(&bytes), &[4, 4]).is_err(), "{numbers:?}");
        }
    }
}
