//! What Gloo's own tests check, as tests of groups. Each has the name of its row in `docs/src/promises.md`, which also lists the
//! rows without tests.

mod all_reduce;
mod collectives;
mod large;
mod slots;
mod time_limits;

use tensorwire_collective::Group;
use tensorwire_rendezvous::Tensor;

use super::reductions::{input, part, sum, value};

/// Elements of a value. The primes cannot be divided evenly.
const COUNTS: [usize; 14] = [0, 1, 2, 3, 4, 5, 13, 64, 100, 127, 997, 1000, 10_000, 10_007];

/// Elements of a value of many messages.
const FEW_COUNTS: [usize; 6] = [0, 1, 4, 100, 1000, 10_007];

/// Numbers of ranks: powers of two, primes, and one more and one less than these.
const SIZES: [usize; 8] = [1, 2, 3, 4, 5, 8, 13, 16];

/// A tensor with the values of one rank.
fn tensor(group: &Group, values: &[i64]) -> Tensor {
    Tensor::from_values(group.worker().pool(), &[values.len() as u64], values).expect("a tensor")
}

fn values(tensor: &Tensor) -> Vec<i64> {
    tensor.values().expect("numbers")
}
