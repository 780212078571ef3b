//! A search service that answers while its encoder is trained: a trainer commits each step as a version of a set, and services
//! follow it. The binary `live-search` has the trainer, a service, and a run of all of it with failures.

#![forbid(unsafe_code)]

pub mod bert;
pub mod encoder;
pub mod inputs;
pub mod model;
pub mod packages;
pub mod prepared;
pub mod run;
pub mod service;
pub mod table;
pub mod tokens;
pub mod trainer;
pub mod training;
pub mod tunable;
