//! Deltas by element: what one content of a tensor has to become another of the same element type and shape.
//!
//! A delta is the length of the gaps, the gaps, and the values. For each run of changed elements there is one gap, in elements and from
//! the end of the run before; its lowest bit says whether the length of the run, less two, follows. Both are in LEB128. The values of all
//! runs follow each other.

use tensorwire_protocol::{DataType, Metadata};

use super::reading::{Problem, Reader, write_number};

/// Bytes that are compared or copied before other tasks have their turn.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// Bytes that are compared at once. No element type is longer.
const BLOCK: usize = 64;

/// A content with more runs than one in so many elements is sent whole, because finding each run costs more than sending the content.
const ELEMENTS_PER_RUN_MIN: usize = 48;

/// A content of fewer bytes is compared without samples.
const SAMPLED_BYTES_MIN: usize = 128 << 10;

/// Samples of a content that changes in many elements where it begins, and the bytes of each.
const SAMPLES: usize = 32;
const SAMPLE_BYTES: usize = 512;

/// Bytes of an element of `dtype`, as far as deltas distinguish them.
pub(crate) fn width(dtype: DataType) -> usize {
    match dtype.bits() / 8 {
        width @ (2 | 4 | 8 | 16) if dtype.is_plain() => width as usize,
        _ => 1,
    }
}

/// The result of comparing two contents.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    Same,
    /// Their delta.
    Runs(Vec<u8>),
    /// They differ by so much that the whole content costs less.
    Full,
}

/// Compares two contents of equal length, a piece at a time.
#[derive(Debug)]
pub(crate) struct Comparison {
    width: usize,
    length: usize,
    /// Bytes compared so far.
    at: usize,
    /// First element and end of the run that may go on.
    run: (usize, usize),
    /// The end of the run before that.
    last: usize,
    runs: usize,
    gaps: Vec<u8>,
    values: Vec<u8>,
}

impl Comparison {
    /// Of two contents of `metadata`.
    pub(crate) fn new(metadata: &Metadata) -> Self {
        Self::of(width(metadata.dtype), usize::try_from(metadata.byte_length).unwrap_or(usize::MAX))
    }

    /// Of two contents of `length` bytes.
    fn of(width: usize, length: usize) -> Self {
        Self { width, length, at: 0, run: (0, 0), last: 0, runs: 0, gaps: Vec::new(), values: Vec::new() }
    }

    /// Continues with the next piece of the contents, which are the same at each call. Returns the result after the last one.
    pub(crate) fn go_on(&mut self, old: &[u8], new: &[u8]) -> Option<Compared> {
        let end = self.at.saturating_add(PIECE_BYTES).min(self.length);
        let (Some(from), Some(to)) = (old.get(self.at..end), new.get(self.at..end)) else {
            return Some(Compared::Full);
        };
        if self.at == 0 && self.is_dense(old, new) {
            return Some(Compared::Full);
        }
        self.compare_piece(from, to);
        self.at = end;
        if self.is_too_long() {
            return Some(Compared::Full);
        }
        (end == self.length).then(|| self.end())
    }

    /// Whether it has found a difference.
    pub(crate) fn has_runs(&self) -> bool {
        self.run.0 != self.run.1
    }

    /// Whether samples of both contents differ by so much that the result will be [`Compared::Full`].
    fn is_dense(&self, old: &[u8], new: &[u8]) -> bool {
        let is_dense = |begin: usize, bytes: usize, samples: usize, elements_per_run: usize| {
            let mut sampled = Self::of(self.width, samples * bytes);
            for index in 0..samples {
                // Whole blocks, spread evenly.
                let place = begin + (self.length - bytes) / samples.max(2) * index / BLOCK * BLOCK;
                if let (Some(old), Some(new)) = (old.get(place..place + bytes), new.get(place..place + bytes))
                {
                    sampled.compare_piece(old, new);
                    sampled.at += bytes;
                }
            }
            sampled.runs * elements_per_run > sampled.at / self.width
                || sampled.values.len() > sampled.at / 8 * 5
        };
        // Where few elements change, the first sample is the only one.
        self.length >= SAMPLED_BYTES_MIN
            && is_dense(0, SAMPLE_BYTES * 8, 1, ELEMENTS_PER_RUN_MIN * 4 / 3)
            && is_dense(0, SAMPLE_BYTES, SAMPLES, ELEMENTS_PER_RUN_MIN * 5 / 6)
    }

    fn compare_piece(&mut self, old: &[u8], new: &[u8]) {
        match self.width {
            1 => self.compare::<1>(old, new),
            2 => self.compare::<2>(old, new),
            4 => self.compare::<4>(old, new),
            8 => self.compare::<8>(old, new),
            _ => self.compare::<16>(old, new),
        }
    }

    fn is_too_long(&self) -> bool {
        let elements = self.length / self.width;
        let runs_max = elements / ELEMENTS_PER_RUN_MIN + 1;
        self.runs > runs_max || self.gaps.len() + self.values.len() > self.length / 2
    }

    fn compare<const WIDTH: usize>(&mut self, old: &[u8], new: &[u8]) {
        let first = self.at / WIDTH;
        let blocks = old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate();
        for (index, (old, new)) in blocks {
            let mask = match (old.first_chunk(), new.first_chunk()) {
                (Some(old), Some(new)) => differences::<WIDTH>(old, new),
                _ => differences_of_last::<WIDTH>(old, new),
            };
            if mask != 0 {
                self.take::<WIDTH>(first + index * (BLOCK / WIDTH), mask, new);
            }
        }
    }

    /// Takes the elements of a block that begins with element `first`, of which those in `mask` differ.
    fn take<const WIDTH: usize>(&mut self, first: usize, mut mask: u64, new: &[u8]) {
        while mask != 0 {
            let begin = mask.trailing_zeros();
            let length = (mask >> begin).trailing_ones();
            mask = mask.checked_shr(begin + length).unwrap_or(0).checked_shl(begin + length).unwrap_or(0);
            let (begin, length) = (begin as usize, length as usize);
            let values = new.get(begin * WIDTH..(begin + length) * WIDTH).unwrap_or_default();
            self.values.extend_from_slice(values);
            self.extend(first + begin, length);
        }
    }

    fn extend(&mut self, begin: usize, length: usize) {
        if self.run.1 != begin || self.run.0 == self.run.1 {
            self.close_run();
            self.run.0 = begin;
        }
        self.run.1 = begin + length;
    }

    fn close_run(&mut self) {
        let (begin, end) = self.run;
        if begin == end {
            return;
        }
        self.runs += 1;
        let (gap, length) = ((begin - self.last) as u64, (end - begin) as u64);
        write_number(&mut self.gaps, gap << 1 | u64::from(length > 1));
        if length > 1 {
            write_number(&mut self.gaps, length - 2);
        }
        self.last = end;
    }

    fn end(&mut self) -> Compared {
        self.close_run();
        if self.runs == 0 {
            return Compared::Same;
        }
        let mut delta = Vec::with_capacity(self.gaps.len() + self.values.len() + 10);
        write_number(&mut delta, self.gaps.len() as u64);
        delta.append(&mut self.gaps);
        delta.append(&mut self.values);
        if delta.len() < self.length { Compared::Runs(delta) } else { Compared::Full }
    }
}

/// Which elements of a block differ, one bit each.
#[inline(always)]
fn differences<const WIDTH: usize>(old: &[u8; BLOCK], new: &[u8; BLOCK]) -> u64 {
    if old == new {
        return 0;
    }
    let mut mask = 0;
    let words = old.chunks_exact(8).zip(new.chunks_exact(8)).enumerate();
    for (index, (old, new)) in words {
        let (Some(old), Some(new)) = (old.first_chunk(), new.first_chunk()) else { continue };
        let changed = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        mask |= match WIDTH {
            16 => u64::from(changed != 0) << (index / 2),
            _ => lanes::<WIDTH>(changed) << (index * (8 / WIDTH)),
        };
    }
    mask
}

/// Which of the elements in a word are not 0, one bit each.
#[inline(always)]
fn lanes<const WIDTH: usize>(word: u64) -> u64 {
    // In each element, the sum carries into the highest bit exactly if a lower bit is set. The product gathers these bits.
    let (low, gather, bits) = match WIDTH {
        1 => (0x7f7f_7f7f_7f7f_7f7f, 0x0102_0408_1020_4080, 8),
        2 => (0x7fff_7fff_7fff_7fff, 1 << 60 | 1 << 45 | 1 << 30 | 1 << 15, 16),
        4 => (0x7fff_ffff_7fff_ffff, 1 << 62 | 1 << 31, 32),
        _ => return u64::from(word != 0),
    };
    let high = (((word & low) + low) | word) & !low;
    (high >> (bits - 1)).wrapping_mul(gather) >> (64 - 64 / bits)
}

/// As [`differences`], of the last block, which is shorter.
#[cold]
fn differences_of_last<const WIDTH: usize>(old: &[u8], new: &[u8]) -> u64 {
    let elements = old.chunks(WIDTH).zip(new.chunks(WIDTH)).enumerate();
    elements.fold(0, |mask, (index, (old, new))| mask | u64::from(old != new) << index)
}

/// The runs of a delta.
#[derive(Debug)]
pub(crate) struct Runs<'delta> {
    gaps: Reader<'delta>,
    /// Whether `gaps` has more.
    left: usize,
    values: &'delta [u8],
    width: usize,
    /// The next element, and the end of the content, in elements.
    at: u64,
    end: u64,
}

/// The bytes that a run changes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run<'delta> {
    /// The place of the first byte in the content.
    pub(crate) offset: usize,
    pub(crate) values: &'delta [u8],
}

impl Run<'_> {
    /// What of it is not before byte `begin`, if there is any.
    #[inline(always)]
    pub(crate) fn from(self, begin: usize) -> Option<Self> {
        let before = begin.saturating_sub(self.offset);
        let values = self.values.get(before..).filter(|values| !values.is_empty())?;
        Some(Self { offset: self.offset + before, values })
    }
}

impl<'delta> Runs<'delta> {
    /// Of the delta `bytes` of a peer, for a content of `metadata`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn new(bytes: &'delta [u8], metadata: &Metadata) -> Result<Self, Problem> {
        let mut reader = Reader::new(bytes);
        let left = reader.count(1)?;
        let gaps = reader.bytes(left)?;
        let values = reader.rest();
        let width = width(metadata.dtype);
        let end = metadata.byte_length / width as u64;
        Ok(Self { gaps: Reader::new(gaps), left, values, width, at: 0, end })
    }

    /// The next run; `None` after the last.
    ///
    /// # Errors
    /// What is wrong with the delta.
    pub(crate) fn read(&mut self) -> Result<Option<Run<'delta>>, Problem> {
        if self.left == 0 {
            let is_complete = self.values.is_empty();
            return if is_complete { Ok(None) } else { Err("a delta has more values than runs") };
        }
        let token = self.gaps.number()?;
        let length = if token & 1 == 0 { 1 } else { self.gaps.number()?.saturating_add(2) };
        self.left = self.gaps.left();
        let begin = self.at.saturating_add(token >> 1);
        let end = begin.saturating_add(length);
        if end > self.end {
            return Err("a run of a delta ends behind the content");
        }
        self.at = end;
        let (offset, bytes) = (begin as usize * self.width, length as usize * self.width);
        let (values, rest) =
            self.values.split_at_checked(bytes).ok_or("a delta has fewer values than runs")?;
        self.values = rest;
        Ok(Some(Run { offset, values }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tensorwire_protocol::Shape;

    use super::*;

    fn metadata(dtype: DataType, elements: usize) -> Metadata {
        Metadata::new(dtype, Shape::new([elements as u64]).unwrap()).unwrap()
    }

    fn compared(metadata: &Metadata, old: &[u8], new: &[u8]) -> Compared {
        let mut comparison = Comparison::new(metadata);
        loop {
            if let Some(compared) = comparison.go_on(old, new) {
                return compared;
            }
        }
    }

    fn applied(metadata: &Metadata, old: &[u8], delta: &[u8]) -> Result<Vec<u8>, Problem> {
        let (mut new, mut runs) = (old.to_vec(), Runs::new(delta, metadata)?);
        while let Some(run) = runs.read()? {
            new[run.offset..][..run.values.len()].copy_from_slice(run.values);
        }
        Ok(new)
    }

    const TYPES: [DataType; 5] = [DataType::U8, DataType::Bf16, DataType::F32, DataType::F64, DataType::C128];

    /// A generator of numbers for contents.
    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        }
    }

    #[test]
    fn a_hundredth_of_the_elements_of_16_bits_is_less_than_a_fortieth_of_the_bytes() {
        let elements = 1 << 20;
        let mut number = random(7);
        let old: Vec<u8> = (0..2 * elements).map(|_| number() as u8).collect();
        let mut new = old.clone();
        for element in new.chunks_exact_mut(2) {
            if number().is_multiple_of(100) {
                element[0] ^= 1;
            }
        }
        let metadata = metadata(DataType::Bf16, elements);
        let Compared::Runs(delta) = compared(&metadata, &old, &new) else { panic!("no delta") };
        assert!(delta.len() * 40 <= old.len(), "{} of {} bytes", delta.len(), old.len());
        assert_eq!(applied(&metadata, &old, &delta), Ok(new));
    }

    #[test]
    fn rows_cost_their_bytes_and_a_twentieth_at_most() {
        let (rows, row) = (1000, 128);
        let old = vec![1; rows * row * 4];
        let mut new = old.clone();
        for at in (0..rows).step_by(10) {
            new[at * row * 4..(at + 1) * row * 4].fill(2);
        }
        let metadata = metadata(DataType::F32, rows * row);
        let Compared::Runs(delta) = compared(&metadata, &old, &new) else { panic!("no delta") };
        assert!(delta.len() * 20 <= rows / 10 * row * 4 * 21, "{} bytes", delta.len());
        assert_eq!(applied(&metadata, &old, &delta), Ok(new));
    }

    #[test]
    fn equal_contents_are_same_and_very_different_ones_full() {
        let elements = 500_000;
        let metadata = metadata(DataType::F32, elements);
        let (old, mut new) = (vec![0; 4 * elements], vec![0; 4 * elements]);
        assert_eq!(compared(&metadata, &old, &new), Compared::Same);
        new.chunks_exact_mut(40).for_each(|chunk| chunk[0] = 1);
        assert_eq!(compared(&metadata, &old, &new), Compared::Full);
        assert_eq!(compared(&metadata, &old, &vec![1; 4 * elements]), Compared::Full);
        assert_eq!(compared(&metadata, &old, &old[1..]), Compared::Full);
    }

    /// Contents of 16-bit elements, of which those at which `is_changed` differ.
    fn changed(elements: usize, is_changed: impl Fn(usize) -> bool) -> (Metadata, Vec<u8>, Vec<u8>) {
        let (old, mut new) = (vec![0; 2 * elements], vec![0; 2 * elements]);
        new.chunks_exact_mut(2).enumerate().filter(|(at, _)| is_changed(*at)).for_each(|(_, new)| new[0] = 1);
        (metadata(DataType::Bf16, elements), old, new)
    }

    #[test]
    fn a_content_that_changes_everywhere_is_full_after_a_few_samples() {
        let everywhere: [fn(usize) -> bool; 3] = [|_| true, |at| at % 3 == 0, |at| at % 33 == 0];
        for is_changed in everywhere {
            let (metadata, old, new) = changed(1 << 20, is_changed);
            assert_eq!(Comparison::new(&metadata).go_on(&old, &new), Some(Compared::Full));
        }
    }

    #[test]
    fn a_content_that_changes_much_only_where_it_begins_has_a_delta() {
        let begins: [fn(usize) -> bool; 2] = [|at| at < 10_000 && at % 5 == 0, |at| at < 30_000];
        for is_changed in begins {
            let (metadata, old, new) = changed(1 << 20, is_changed);
            let Compared::Runs(delta) = compared(&metadata, &old, &new) else { panic!("no delta") };
            assert_eq!(applied(&metadata, &old, &delta), Ok(new));
        }
    }

    proptest! {
        #[test]
        fn deltas_lead_from_one_content_to_the_other(
            (kind, elements, changes) in (0..TYPES.len(), 0..3000_usize, 0..40_usize),
            (seed, long) in (any::<u64>(), 1..200_usize),
        ) {
            let metadata = metadata(TYPES[kind], elements);
            let mut number = random(seed);
            let old: Vec<u8> = (0..metadata.byte_length).map(|_| number() as u8).collect();
            let mut new = old.clone();
            for _ in 0..changes.min(elements) {
                let (begin, length) = (number() as usize % elements, number() as usize % long);
                let width = width(metadata.dtype);
                for byte in new[begin * width..].iter_mut().take(length * width) {
                    *byte = number() as u8;
                }
            }
            match compared(&metadata, &old, &new) {
                Compared::Same => prop_assert_eq!(old, new),
                Compared::Runs(delta) => {
                    prop_assert!(delta.len() < old.len());
                    prop_assert_eq!(applied(&metadata, &old, &delta), Ok(new));
                }
                Compared::Full => prop_assert!(elements == 0 || changes > 0),
            }
        }

        #[test]
        fn s5_any_bytes_are_a_delta_within_the_content_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            (kind, elements) in (0..TYPES.len(), 0..100_usize),
        ) {
            let metadata = metadata(TYPES[kind], elements);
            if let Ok(mut runs) = Runs::new(&bytes, &metadata) {
                let mut end = 0;
                while let Ok(Some(run)) = runs.read() {
                    prop_assert!(run.offset >= end);
                    end = run.offset + run.values.len();
                    prop_assert!(end as u64 <= metadata.byte_length);
                }
            }
        }
    }
}
