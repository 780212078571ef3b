//! What the runnable examples share: a real data set, a small network and its optimiser.
//!
//! Nothing here knows about tensorwire. [`digits`] is 1,797 handwritten digits compiled into the program, [`mlp`]
//! a multilayer perceptron with hand-written gradients, [`sgd`] the update rule and [`training`] the loop that a
//! single process runs. The `parameter_server` example spreads that loop over processes.
#![forbid(unsafe_code)]

pub mod digits;
pub mod mlp;
pub mod random;
pub mod sgd;
pub mod training;

/// Compiles the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
