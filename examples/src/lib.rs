//! What the runnable examples share: two models with their data, the optimiser, and the rules of training on many
//! processes.
//!
//! Nothing here knows about tensorwire. [`model`] says what can be trained: [`mlp`] reads [`digits`], [`linear`] finds a
//! line; [`sgd`] is the update rule and [`training`] the loop that a single process runs. The `parameter_server`
//! example spreads that loop over processes: [`shards`] divides the parameters among servers, [`barrier`] makes steps
//! of many workers synchronous, [`tickets`] bounds how far apart asynchronous ones drift, and [`checkpoint`] keeps what
//! has been learnt.
#![forbid(unsafe_code)]

pub mod barrier;
pub mod checkpoint;
pub mod digits;
pub mod linear;
pub mod mlp;
pub mod model;
pub mod random;
pub mod sgd;
pub mod shards;
pub mod tickets;
pub mod training;

/// Compiles the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
