//! The models of the parameter server example, its samples, checkpoints, child processes, flags and output.
//!
//! Nothing here knows about tensorwire. [`training`] has the model with its samples and the loop that a single process
//! runs, [`mlp`] the network, [`data`] the samples. The `parameter_server` example spreads that loop over
//! [`processes`]; [`command_line`] has its flags, and [`report`] prints the result.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod command_line;
pub mod data;
pub mod digits;
pub mod fashion_mnist;
pub mod mlp;
pub mod processes;
pub mod random;
pub mod report;
pub mod rows;
pub mod samples;
pub mod training;

/// Compiles the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
