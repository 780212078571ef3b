//! A buffer in parts, each with an owner of its own.

use std::sync::Arc;

use super::BufMut;
use crate::block::Allocation;

/// A buffer that was [divided](BufMut::divide). Its memory returns to the pool when this value and all parts are dropped.
#[derive(Debug)]
pub struct Divided {
    whole: Arc<Allocation>,
}

impl BufMut {
    /// Divides the buffer at `cuts`, which ascend. The parts are in order, and together all of the buffer: one more than there are cuts.
    /// Each can be granted to another peer. `None` if the cuts do not ascend or are not inside of the buffer, which is dropped then.
    pub fn divide(self, cuts: &[usize]) -> Option<(Divided, Vec<Self>)> {
        let ends = cuts.iter().copied().chain([self.len()]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ranges: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
        if ranges.iter().any(|range| range.start > range.end) {
            return None;
        }
        let mut whole = self.allocation;
        whole.set_divided(true);
        let whole = Arc::new(whole);
        let part = |range| Self::from_allocation(Allocation::part(whole.clone(), range));
        let parts = ranges.into_iter().map(part).collect();
        Some((Divided { whole }, parts))
    }
}

impl Divided {
    /// The buffer, with what was written to its parts.
    ///
    /// # Errors
    /// This value, while there are parts: a peer may still write them.
    pub fn joined(self) -> Result<BufMut, Self> {
        match Arc::try_unwrap(self.whole) {
            Ok(mut whole) => {
                whole.set_divided(false);
                Ok(BufMut::from_allocation(whole))
            }
            Err(whole) => Err(Self { whole }),
        }
    }
}
