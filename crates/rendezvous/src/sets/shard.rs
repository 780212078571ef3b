//! [`Shard`]: a tensor that is part of a larger one.

use std::ops::Range;

use crate::{error::WorkerError, values::sets::sharding::Sharding, values::tensor::Tensor};

/// A tensor to [commit](crate::sets::OwnSet::commit): a whole one, or part of one of which other workers have the rest
/// ([`Tensor::shard`](crate::Tensor::shard)).
#[derive(Debug, Clone)]
pub struct Shard {
    pub(super) tensor: Tensor,
    pub(super) sharding: Option<Sharding>,
}

impl From<Tensor> for Shard {
    fn from(tensor: Tensor) -> Self {
        Self { tensor, sharding: None }
    }
}

impl Tensor {
    /// This tensor as part of a larger one, whose dimension `axis` has `length` elements: it is the concatenation of `ranges` of
    /// that dimension, which ascend. Fused tensors, such as query, key and value in one, have several ranges. The commit checks them.
    pub fn shard(self, axis: usize, length: u64, ranges: &[Range<u64>]) -> Shard {
        Shard { tensor: self, sharding: Some(Sharding { axis, length, ranges: ranges.to_vec() }) }
    }
}

impl Shard {
    pub(super) fn check(&self, name: &str) -> Result<(), WorkerError> {
        let Some(sharding) = &self.sharding else { return Ok(()) };
        let is_plain = self.tensor.dtype().is_plain();
        let checked = if is_plain {
            sharding.check(self.tensor.shape())
        } else {
            Err("its elements have no fixed size")
        };
        checked.map_err(|problem| {
            let shape = self.tensor.shape();
            let problem = format!("`{name}` of shape {shape:?} as the shard {sharding:?}: {problem}");
            WorkerError::InvalidTensor { problem }
        })
    }
}
