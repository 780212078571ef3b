//! Weights of [candle](https://docs.rs/candle-core) models as Tensorwire's [sets](tensorwire::sets): a trainer commits a `VarMap`, and
//! services build their models from a peer's set, and follow it while they serve.
//!
//! ```no_run
//! use candle_core::{DType, Device};
//! use candle_nn::{Linear, VarMap, linear, VarBuilder};
//! use tensorwire::{Peer, Worker, sets::Policy};
//! use tensorwire_candle::{Variables, named_tensors, var_builder};
//!
//! // The trainer, after each step.
//! async fn commit(worker: &Worker, weights: &VarMap, step: u64) -> Result<(), tensorwire_candle::Error> {
//!     worker.set("policy").commit(step, named_tensors(worker.pool(), weights)?).await?;
//!     Ok(())
//! }
//!
//! // A service whose model never changes.
//! async fn load(trainer: &Peer) -> Result<Linear, tensorwire_candle::Error> {
//!     let weights = trainer.set("policy").fetch().await?;
//!     Ok(linear(768, 10, var_builder(&weights, DType::F32, &Device::Cpu))?)
//! }
//!
//! // A service that follows the trainer: the task below fetches, and the model changes between two batches.
//! async fn serve(trainer: &Peer) -> Result<(), tensorwire_candle::Error> {
//!     let map = VarMap::new();
//!     let model = linear(768, 10, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
//!     let mut variables = Variables::new(map);
//!     variables.apply(&trainer.set("policy").fetch().await?)?;
//!
//!     let mut versions = trainer.set("policy").follow(Policy::Latest);
//!     let (newest, mut arrived) = tokio::sync::watch::channel(None);
//!     tokio::spawn(async move {
//!         while let Some(staged) = versions.next().await {
//!             match staged {
//!                 Ok(staged) => drop(newest.send_replace(Some(staged.apply()))),
//!                 Err(error) => eprintln!("{error}"),
//!             }
//!         }
//!     });
//!     loop {
//!         if arrived.has_changed().unwrap_or(false)
//!             && let Some(version) = &*arrived.borrow_and_update()
//!         {
//!             variables.apply(version)?;
//!         }
//!         # let _ = &model; break Ok(());
//!         // … a batch
//!     }
//! }
//! ```
//!
//! # Copies
//! candle owns the memory of its tensors, so each tensor is copied once on its way in, from the memory into which it arrived (over shared
//! memory that is the trainer's own), and once on its way out. A variable that is written again keeps its memory. Another element
//! type than the one that is asked for, or another device than the CPU, is one more copy, by candle.
//!
//! # Versions
//! Version 0.11 of this crate works with candle 0.11.

#![forbid(unsafe_code)]

mod convert;
mod error;
mod variables;
mod weights;

pub use convert::{from_candle, to_candle};
pub use error::Error;
pub use variables::Variables;
pub use weights::{named_tensors, var_builder};

/// The programs of the book's page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/candle.md")]
mod book {}
