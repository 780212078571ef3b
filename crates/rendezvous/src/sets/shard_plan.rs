//! Which parts of the publishers' tensors make the tensors that a follower of a sharded set wants.

use std::{ops::Range, slice};

use tensorwire_protocol::{Metadata, Shape, slice::Slice};

use crate::values::sets::sharding::{Sharding, check_ranges, elements, placed};

/// A tensor that a publisher has, whose sharding was [checked](Sharding::check).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer<'a> {
    /// The number of the publisher.
    pub(crate) publisher: usize,
    pub(crate) metadata: &'a Metadata,
    /// `None` for a whole tensor.
    pub(crate) sharding: Option<&'a Sharding>,
}

/// The part of a tensor that a follower wants: ranges of a dimension, which ascend.
pub(crate) type Wanted<'a> = (usize, &'a [Range<u64>]);

/// A part of a publisher's tensor, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) publisher: usize,
    /// In the publisher's tensor.
    pub(crate) from: Slice,
    /// In the result.
    pub(crate) into: Slice,
}

/// How a tensor is made. Each element of it is in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) metadata: Metadata,
    pub(crate) pieces: Vec<Piece>,
}

/// Why a tensor cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Misfit {
    /// Both publishers have other element types, shapes or dimensions along which they are sharded.
    Unlike(usize, usize),
    /// Both publishers have these elements of the dimension.
    Overlap(usize, usize, Range<u64>),
    /// No publisher has these elements; those who have the ones before and behind.
    Gap(Option<usize>, Option<usize>, Range<u64>),
    /// The wanted ranges are not those of the tensor.
    Wanted(&'static str),
}

/// How a tensor is made of what the publishers have of it. Of several that have exactly the same part, `spread` chooses one.
pub(crate) fn plan(offers: &[Offer<'_>], wanted: Option<Wanted<'_>>, spread: u64) -> Result<Planned, Misfit> {
    let first = offers.first().ok_or(Misfit::Wanted("nobody has the tensor"))?;
    let whole = whole_shape(first);
    if let Some(other) = offers.iter().find(|offer| !is_alike(first, offer)) {
        return Err(Misfit::Unlike(first.publisher, other.publisher));
    }
    let result = wanted.map_or_else(|| Ok(whole.clone()), |wanted| result_shape(&whole, wanted))?;
    let metadata = match wanted.is_some() || first.sharding.is_some() {
        // Strings are not sharded.
        true => Shape::new(&result).and_then(|shape| Metadata::new(first.metadata.dtype, shape)),
        false => Some(first.metadata.clone()),
    };
    let metadata = metadata.ok_or(Misfit::Wanted("the elements have no fixed size"))?;
    let sources = sources(offers, &whole, spread)?;
    let targets =
        wanted.map_or_else(|| vec![Slice::whole(&whole)], |(axis, ranges)| boxes(&whole, axis, ranges));
    let target_axis = wanted.map_or(0, |(axis, _)| axis);
    let mut pieces = Vec::new();
    for (target, target_at) in targets.iter().zip(starts(&targets, target_axis)) {
        for source in &sources {
            let Some(common) = source.part.intersection(target) else { continue };
            let from = moved(&common, source.axis, start(&source.part, source.axis), source.at);
            let into = moved(&common, target_axis, start(target, target_axis), target_at);
            pieces.push(Piece { publisher: source.publisher, from, into });
        }
    }
    Ok(Planned { metadata, pieces: joined(pieces) })
}

/// A box of the whole tensor, and where a publisher has it.
struct Source {
    publisher: usize,
    part: Slice,
    axis: usize,
    /// Its first place along the axis in the publisher's tensor.
    at: u64,
}

fn whole_shape(offer: &Offer<'_>) -> Vec<u64> {
    let mut shape = offer.metadata.shape.dimensions().to_vec();
    if let Some(sharding) = offer.sharding
        && let Some(dimension) = shape.get_mut(sharding.axis)
    {
        *dimension = sharding.length;
    }
    shape
}

fn is_alike(one: &Offer<'_>, other: &Offer<'_>) -> bool {
    let axes = (one.sharding.map(|sharding| sharding.axis), other.sharding.map(|sharding| sharding.axis));
    let is_same_axis = !matches!(axes, (Some(one), Some(other)) if one != other);
    let is_whole = one.sharding.is_none() && other.sharding.is_none();
    is_same_axis
        && one.metadata.dtype == other.metadata.dtype
        && whole_shape(one) == whole_shape(other)
        && (!is_whole || one.metadata == other.metadata)
}

fn result_shape(whole: &[u64], (axis, ranges): Wanted<'_>) -> Result<Vec<u64>, Misfit> {
    let mut shape = whole.to_vec();
    let dimension = shape.get_mut(axis).ok_or(Misfit::Wanted("the tensor has no such dimension"))?;
    check_ranges(ranges, *dimension).map_err(Misfit::Wanted)?;
    *dimension = elements(ranges);
    Ok(shape)
}

/// The boxes of the whole tensor that publishers have. Each element is in one box.
fn sources(offers: &[Offer<'_>], whole: &[u64], spread: u64) -> Result<Vec<Source>, Misfit> {
    let axis = offers.iter().find_map(|offer| Some(offer.sharding?.axis)).unwrap_or_default();
    let length = whole.get(axis).copied().unwrap_or_default();
    let parts = chosen(offers, length, spread);
    if let [(ranges, offer)] = &*parts
        && elements(ranges) == length
    {
        let publisher = offer.publisher;
        return Ok(vec![Source { publisher, part: Slice::whole(whole), axis: 0, at: 0 }]);
    }
    let ranges = parts
        .iter()
        .flat_map(|(ranges, offer)| placed(ranges).map(|(range, at)| (range.clone(), offer.publisher, at)));
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|(range, publisher, _)| (range.start, range.end, *publisher));
    covers(&ranges, length)?;
    let sources = ranges.into_iter().flat_map(|(range, publisher, at)| {
        let boxes = boxes(whole, axis, &[range]);
        boxes.into_iter().map(move |part| Source { publisher, part, axis, at })
    });
    Ok(sources.collect())
}

/// The parts of a dimension of `length` elements that publishers have, and of those who have exactly the same part one for each.
fn chosen<'a>(offers: &'a [Offer<'a>], length: u64, spread: u64) -> Vec<(Vec<Range<u64>>, &'a Offer<'a>)> {
    let all = 0..length;
    let mut parts = Vec::<(_, Vec<_>)>::new();
    for offer in offers {
        let ranges = merged(offer.sharding.map_or(slice::from_ref(&all), |sharding| &sharding.ranges));
        match parts.iter_mut().find(|(known, _)| *known == ranges) {
            Some((_, replicas)) => replicas.push(offer),
            None => parts.push((ranges, vec![offer])),
        }
    }
    let parts = parts.into_iter().filter_map(|(ranges, replicas)| {
        Some((ranges, *replicas.get((spread % replicas.len().max(1) as u64) as usize)?))
    });
    parts.collect()
}

/// The same elements, without empty ranges, and as one range where one ends at the next.
fn merged(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range.clone()),
        }
    }
    merged
}

/// Checks that the ranges, which are sorted, follow each other from 0 to `length`.
fn covers(ranges: &[(Range<u64>, usize, u64)], length: u64) -> Result<(), Misfit> {
    let (mut end, mut before) = (0, None);
    for (range, publisher, _) in ranges {
        match before {
            Some(before) if range.start < end => {
                return Err(Misfit::Overlap(before, *publisher, range.start..end.min(range.end)));
            }
            _ if range.start > end => return Err(Misfit::Gap(before, Some(*publisher), end..range.start)),
            _ => (end, before) = (range.end, Some(*publisher)),
        }
    }
    if end == length { Ok(()) } else { Err(Misfit::Gap(before, None, end..length)) }
}

/// The boxes that ranges of a dimension are.
fn boxes(whole: &[u64], axis: usize, ranges: &[Range<u64>]) -> Vec<Slice> {
    let of = |range: &Range<u64>| {
        let mut all: Vec<_> = whole.iter().map(|&length| 0..length).collect();
        all.get_mut(axis)?.clone_from(range);
        Slice::new(&all).ok()
    };
    ranges.iter().filter_map(of).collect()
}

fn start(slice: &Slice, axis: usize) -> u64 {
    slice.ranges().get(axis).map_or(0, |range| range.start)
}

/// Where each box begins when they are put one behind the other along the axis.
fn starts(boxes: &[Slice], axis: usize) -> Vec<u64> {
    let ranges: Vec<_> = boxes.iter().map(|part| part.ranges().get(axis).cloned().unwrap_or(0..1)).collect();
    placed(&ranges).map(|(_, at)| at).collect()
}

/// `slice` in a tensor in which the element `from` of the axis is the element `into`.
fn moved(slice: &Slice, axis: usize, from: u64, into: u64) -> Slice {
    let mut ranges = slice.ranges().to_vec();
    if let Some(range) = ranges.get_mut(axis) {
        *range = range.start - from + into..range.end - from + into;
    }
    Slice::new(&ranges).unwrap_or_else(|_| slice.clone())
}

/// The pieces, of which those that are next to each other at both ends are one.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        let together = joined.last().and_then(|last| {
            let is_same = last.publisher == piece.publisher;
            is_same.then_some(())?;
            Some((union(&last.from, &piece.from)?, union(&last.into, &piece.into)?))
        });
        match (together, joined.last_mut()) {
            (Some((from, into)), Some(last)) => (last.from, last.into) = (from, into),
            _ => joined.push(piece),
        }
    }
    joined
}

/// One box, if `second` begins where `first` ends in one dimension, and they are alike in all others.
fn union(first: &Slice, second: &Slice) -> Option<Slice> {
    let pairs = first.ranges().iter().zip(second.ranges());
    let mut different = pairs.enumerate().filter(|(_, (one, other))| one != other);
    let (axis, (one, other)) = different.next()?;
    if different.next().is_some() || one.end != other.start {
        return None;
    }
    let mut ranges = first.ranges().to_vec();
    ranges.get_mut(axis)?.end = other.end;
    Slice::new(&ranges).ok()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // tensors of one dimension
mod tests {
    use proptest::prelude::*;
    use tensorwire_protocol::DataType;

    use super::*;

    fn metadata(dtype: DataType, shape: &[u64]) -> Metadata {
        Metadata::new(dtype, Shape::new(shape).unwrap()).unwrap()
    }

    fn sharding(axis: usize, length: u64, ranges: &[Range<u64>]) -> Sharding {
        Sharding { axis, length, ranges: ranges.to_vec() }
    }

    /// The elements of a dense tensor, as places of the whole one, along ascending ranges of a dimension.
    fn part(whole: &[u64], axis: usize, ranges: &[Range<u64>]) -> Vec<u64> {
        let mut places = vec![0];
        for (dimension, &length) in whole.iter().enumerate() {
            let all = [0..length];
            let ranges = if dimension == axis { ranges } else { &all };
            let along: Vec<u64> = ranges.iter().cloned().flatten().collect();
            places = places.iter().flat_map(|&row| along.iter().map(move |at| row * length + at)).collect();
        }
        places
    }

    /// Ascending ranges of `0..length`, and what is left, by `cuts`.
    fn divided(length: u64, cuts: &[u64]) -> Vec<Range<u64>> {
        let mut ends: Vec<_> = cuts.iter().map(|cut| cut % (length + 1)).chain([0, length]).collect();
        ends.sort();
        ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    proptest! {
        #[test]
        fn each_element_of_the_result_is_moved_once_from_who_has_it(
            whole in proptest::collection::vec(0..7_u64, 1..4),
            (source_axis, target_axis) in (0..3_usize, 0..3_usize),
            cuts in proptest::collection::vec(any::<u64>(), 0..8),
            (owners, replicas) in (proptest::collection::vec(0..3_usize, 9), 3..7_usize),
            (wanted_cuts, is_wanted) in (proptest::collection::vec(any::<u64>(), 0..6), any::<[bool; 7]>()),
        ) {
            let (source_axis, target_axis) = (source_axis % whole.len(), target_axis % whole.len());
            let length = whole[source_axis];
            let mut parts = vec![Vec::new(); 3];
            for (range, owner) in divided(length, &cuts).into_iter().zip(owners) {
                parts[owner].push(range);
            }
            let shardings: Vec<_> = parts.iter().map(|ranges| sharding(source_axis, length, ranges)).collect();
            let shapes: Vec<_> = parts.iter().map(|ranges| {
                let mut shape = whole.clone();
                shape[source_axis] = elements(ranges);
                metadata(DataType::U16, &shape)
            }).collect();
            // Those from the fourth on have the same as the first ones.
            let offers: Vec<_> = (0..replicas).map(|publisher| {
                let (metadata, sharding) = (&shapes[publisher % 3], &shardings[publisher % 3]);
                sharding.check(metadata.shape.dimensions()).unwrap();
                Offer { publisher, metadata, sharding: Some(sharding) }
            }).collect();
            let ranges: Vec<_> = divided(whole[target_axis], &wanted_cuts).into_iter().zip(is_wanted)
                .filter_map(|(range, is_wanted)| is_wanted.then_some(range)).collect();
            let planned = plan(&offers, Some((target_axis, &ranges)), 5).unwrap();

            let expected = part(&whole, target_axis, &ranges);
            prop_assert_eq!(planned.metadata.byte_length, 2 * expected.len() as u64);
            let mut result = vec![None; expected.len()];
            let mut moved = 0;
            for Piece { publisher, from, into } in &planned.pieces {
                let tensor = part(&whole, source_axis, &parts[publisher % 3]);
                let sources = from.runs(shapes[publisher % 3].shape.dimensions()).flatten();
                let places: Vec<_> = into.runs(planned.metadata.shape.dimensions()).flatten().collect();
                let values: Vec<_> = sources.map(|at| tensor[at as usize]).collect();
                prop_assert_eq!(values.len(), places.len());
                moved += values.len();
                for (place, value) in places.into_iter().zip(values) {
                    prop_assert_eq!(result[place as usize].replace(value), None, "moved twice");
                }
            }
            prop_assert_eq!(moved, expected.len());
            prop_assert_eq!(result.into_iter().map(Option::unwrap).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn whole_tensors_are_replicas_and_each_name_takes_one() {
        let shape = metadata(DataType::F32, &[4, 6]);
        let offers = [0, 1, 2].map(|publisher| Offer { publisher, metadata: &shape, sharding: None });
        for spread in 0..6 {
            let planned = plan(&offers, None, spread).unwrap();
            let all = Slice::whole(&[4, 6]);
            let piece = Piece { publisher: spread as usize % 3, from: all.clone(), into: all };
            assert_eq!((planned.metadata, planned.pieces), (shape.clone(), vec![piece]));
        }
        let strings = Metadata::encoded(DataType::String, Shape::new([2]).unwrap(), 30).unwrap();
        let offer = Offer { publisher: 0, metadata: &strings, sharding: None };
        assert_eq!(plan(&[offer], None, 0).unwrap().metadata, strings);
        assert!(plan(&[offer], Some((0, &[0..1])), 0).is_err());
        let scalar = metadata(DataType::F32, &[]);
        let offer = Offer { publisher: 0, metadata: &scalar, sharding: None };
        assert_eq!(plan(&[offer], None, 0).unwrap().pieces.len(), 1);
    }

    #[test]
    fn equal_parts_are_replicas_and_each_name_takes_one_of_each() {
        let (low, split, high) =
            (sharding(0, 10, &[0..4]), sharding(0, 10, &[0..1, 1..4]), sharding(0, 10, &[4..10]));
        let (four, six) = (metadata(DataType::F32, &[4, 3]), metadata(DataType::F32, &[6, 3]));
        let parts = [(&low, &four), (&high, &six), (&split, &four), (&high, &six)];
        let offers = parts.iter().enumerate().map(|(publisher, (sharding, metadata))| Offer {
            publisher,
            metadata,
            sharding: Some(sharding),
        });
        let offers: Vec<_> = offers.collect();
        let publishers = |spread| {
            let planned = plan(&offers, None, spread).unwrap();
            planned.pieces.iter().map(|piece| piece.publisher).collect::<Vec<_>>()
        };
        assert_eq!((publishers(0), publishers(1)), (vec![0, 1], vec![2, 3]));
        // Parts that share only some elements are none.
        let other = Offer { publisher: 4, metadata: &four, sharding: Some(&sharding(0, 10, &[0..3, 9..10])) };
        let planned = plan(&[&*offers, &[other]].concat(), None, 0);
        assert_eq!(planned, Err(Misfit::Overlap(4, 0, 0..3)));
    }

    #[test]
    fn fused_parts_are_one_piece_each_and_equal_layouts_move_whole_parts() {
        // Queries, keys and values of two publishers, each of which has half of the heads.
        let (one, other) = (sharding(0, 12, &[0..2, 4..6, 8..10]), sharding(0, 12, &[2..4, 6..8, 10..12]));
        let shape = metadata(DataType::Bf16, &[6, 8]);
        let offers = [(0, &one), (1, &other)];
        let offers = offers.map(|(publisher, sharding)| Offer {
            publisher,
            metadata: &shape,
            sharding: Some(sharding),
        });
        let planned = plan(&offers, Some((0, &one.ranges)), 0).unwrap();
        assert_eq!(
            planned.pieces,
            [Piece { publisher: 0, from: Slice::whole(&[6, 8]), into: Slice::whole(&[6, 8]) }]
        );
        assert_eq!(plan(&offers, None, 0).unwrap().pieces.len(), 6);
    }

    #[test]
    fn misfits_name_both_publishers() {
        let of = |ranges: &[Range<u64>]| {
            (sharding(0, 10, ranges), metadata(DataType::F32, &[elements(ranges), 3]))
        };
        let planned = |parts: &[(Sharding, Metadata)]| {
            let offers = parts.iter().enumerate().map(|(publisher, (sharding, metadata))| Offer {
                publisher,
                metadata,
                sharding: Some(sharding),
            });
            plan(&offers.collect::<Vec<_>>(), None, 0).map(drop)
        };
        assert_eq!(planned(&[of(&[0..4]), of(&[4..10])]), Ok(()));
        assert_eq!(planned(&[of(&[0..4]), of(&[3..10])]), Err(Misfit::Overlap(0, 1, 3..4)));
        assert_eq!(planned(&[of(&[6..10]), of(&[0..4])]), Err(Misfit::Gap(Some(1), Some(0), 4..6)));
        assert_eq!(planned(&[of(&[0..4]), of(&[4..9])]), Err(Misfit::Gap(Some(1), None, 9..10)));
        assert_eq!(planned(&[of(&[1..10])]), Err(Misfit::Gap(None, Some(0), 0..1)));
        assert_eq!(planned(&[of(&[0..10]), of(&[2..3])]), Err(Misfit::Overlap(0, 1, 2..3)));
        let half = (sharding(0, 10, &[4..10]), metadata(DataType::F16, &[6, 3]));
        assert_eq!(planned(&[of(&[0..4]), half]), Err(Misfit::Unlike(0, 1)));
        let columns = (sharding(1, 3, &[0..3]), metadata(DataType::F32, &[10, 3]));
        assert_eq!(planned(&[of(&[0..4]), columns]), Err(Misfit::Unlike(0, 1)));
    }
}
