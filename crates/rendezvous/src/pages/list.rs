//! Lists of pages.

use std::{ops::Range, sync::Arc};

/// Numbers of pages, in order, made once and used for any number of transfers. Cheap to clone.
///
/// ```
/// use tensorwire::pages::Pages;
///
/// let listed = Pages::from([5, 91, 3]);
/// let range = Pages::from(8..16);
/// // Page 2 of each group of 10, three times.
/// assert_eq!(Pages::strided(2, 10, 3), Pages::from([2, 12, 22]));
/// assert_eq!((listed.len(), range.len()), (3, 8));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pages(Arc<[u32]>);

impl Pages {
    /// `count` pages from `first` on, each `stride` behind the one before. Numbers end at `u32::MAX`, which no arena has.
    pub fn strided(first: u32, stride: u32, count: u32) -> Self {
        (0..count).map(|number| first.saturating_add(stride.saturating_mul(number))).collect()
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers.
    pub fn numbers(&self) -> &[u32] {
        &self.0
    }
}

impl FromIterator<u32> for Pages {
    fn from_iter<T: IntoIterator<Item = u32>>(pages: T) -> Self {
        Self(pages.into_iter().collect())
    }
}

impl From<&[u32]> for Pages {
    fn from(pages: &[u32]) -> Self {
        Self(pages.into())
    }
}

impl From<Vec<u32>> for Pages {
    fn from(pages: Vec<u32>) -> Self {
        Self(pages.into())
    }
}

impl<const N: usize> From<[u32; N]> for Pages {
    fn from(pages: [u32; N]) -> Self {
        Self(pages.into())
    }
}

impl From<Range<u32>> for Pages {
    fn from(pages: Range<u32>) -> Self {
        pages.collect()
    }
}
