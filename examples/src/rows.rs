//! Rows of a weight matrix by their numbers: pulled for the pixels that samples have, and pushed back with their gradients.

use std::ops::Range;

use crate::mlp::TensorSpec;

/// The rows of every weight matrix that are moved. A bias is always moved whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// Each row.
    All,
    /// Those with these numbers.
    Some(Vec<usize>),
}

impl Rows {
    /// Where the moved elements of a tensor are; `None` if the tensor has no such row.
    fn ranges(&self, spec: &TensorSpec) -> Option<Vec<Range<usize>>> {
        match (self, &spec.shape[..]) {
            (Self::Some(rows), &[height, width]) => {
                let range = |&row: &usize| (row < height).then(|| row * width..(row + 1) * width);
                rows.iter().map(range).collect()
            }
            _ => Some(std::iter::once(0..spec.elements()).collect()),
        }
    }

    /// The shape of what is moved of a tensor.
    pub fn shape(&self, spec: &TensorSpec) -> Vec<u64> {
        let mut shape: Vec<u64> = spec.shape.iter().map(|&size| size as u64).collect();
        if let (Self::Some(rows), [height, _]) = (self, &mut shape[..]) {
            *height = rows.len() as u64;
        }
        shape
    }

    /// What is moved of a tensor with these values; `None` if it has no such row.
    pub fn taken(&self, spec: &TensorSpec, values: &[f32]) -> Option<Vec<f32>> {
        let mut moved = Vec::new();
        self.ranges(spec)?.into_iter().for_each(|range| moved.extend_from_slice(&values[range]));
        Some(moved)
    }

    /// Calls `each` for every element of `values` that was moved, with its counterpart. `None`, and no call, if `moved` does not fit.
    pub fn zip(
        &self,
        spec: &TensorSpec,
        values: &mut [f32],
        moved: &[f32],
        each: impl Fn(&mut f32, f32),
    ) -> Option<()> {
        let ranges = self.ranges(spec)?;
        if ranges.iter().map(Range::len).sum::<usize>() != moved.len() {
            return None;
        }
        let mut rest = moved;
        for range in ranges {
            let (row, behind) = rest.split_at(range.len());
            values[range].iter_mut().zip(row).for_each(|(value, &moved)| each(value, moved));
            rest = behind;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::Rows;
    use crate::mlp::TensorSpec;

    fn spec(shape: &[usize]) -> TensorSpec {
        TensorSpec { name: "w".to_owned(), shape: shape.to_vec() }
    }

    #[test]
    fn rows_are_taken_and_summed_by_their_numbers() {
        let (matrix, rows) = (spec(&[3, 2]), Rows::Some(vec![0, 2]));
        let mut values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(rows.taken(&matrix, &values), Some(vec![1.0, 2.0, 5.0, 6.0]));
        assert_eq!(rows.shape(&matrix), [2, 2]);
        rows.zip(&matrix, &mut values, &[10.0, 20.0, 30.0, 40.0], |sum, slope| *sum += slope).unwrap();
        assert_eq!(values, [11.0, 22.0, 3.0, 4.0, 35.0, 46.0]);
    }

    #[test]
    fn a_bias_is_moved_whole() {
        let (bias, rows) = (spec(&[2]), Rows::Some(vec![7]));
        assert_eq!(rows.taken(&bias, &[1.0, 2.0]), Some(vec![1.0, 2.0]));
        assert_eq!((rows.shape(&bias), Rows::All.shape(&spec(&[3, 2]))), (vec![2], vec![3, 2]));
    }

    #[test]
    fn rows_that_a_matrix_does_not_have_and_wrong_lengths_are_refused() {
        let (matrix, mut values) = (spec(&[3, 2]), [0.0; 6]);
        assert_eq!(Rows::Some(vec![3]).taken(&matrix, &values), None);
        for (rows, length) in [(Rows::Some(vec![3]), 2), (Rows::Some(vec![1]), 3), (Rows::All, 5)] {
            assert_eq!(
                rows.zip(&matrix, &mut values, &vec![1.0; length], |value, moved| *value = moved),
                None
            );
        }
        assert_eq!(values, [0.0; 6]);
    }
}
