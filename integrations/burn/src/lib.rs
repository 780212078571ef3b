//! [burn](https://docs.rs/burn) modules as Tensorwire's [sets](tensorwire::sets) and as replicas in its
//! [groups](tensorwire::collective): a trainer commits its module, services load it and follow it while they serve, and several processes
//! train one module together.
//!
//! # Sets
//!
//! ```no_run
//! use burn::{module::Module, nn::{Linear, LinearConfig}, store::ModuleSnapshot, tensor::Device};
//! use tensorwire::{Peer, Worker, sets::Policy};
//! use tensorwire_burn::{Error, SnapshotStore, named_tensors};
//!
//! // The trainer, after each step.
//! async fn commit<M: Module>(worker: &Worker, module: &M, step: u64) -> Result<(), Error> {
//!     worker.set("policy").commit(step, named_tensors(worker.pool(), module)?).await?;
//!     Ok(())
//! }
//!
//! // A service whose module never changes.
//! async fn load(trainer: &Peer) -> Result<Linear, Error> {
//!     let mut model = LinearConfig::new(768, 10).init(&Device::flex());
//!     let weights = trainer.set("policy").fetch().await?;
//!     model.load_from(&mut SnapshotStore::new(&weights))?;
//!     Ok(model)
//! }
//!
//! // A service that follows the trainer: the task below fetches, and the module changes between two batches.
//! async fn serve(trainer: &Peer) -> Result<(), Error> {
//!     let mut model = load(trainer).await?;
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
//!             model.load_from(&mut SnapshotStore::new(version))?;
//!         }
//!         # break Ok(());
//!         // … a batch
//!     }
//! }
//! ```
//!
//! # Gradients of several processes
//!
//! burn averages gradients over the devices of one process. [`Replicas`] average those of the ranks of a group, many short ones in one
//! call, and go on without ranks that are lost:
//!
//! ```no_run
//! use burn::{nn::Linear, optim::{AdamConfig, GradientsParams}, tensor::Tensor};
//! use tensorwire::collective::Group;
//! use tensorwire_burn::{Error, Replicas};
//!
//! async fn train(group: Group, mut model: Linear, batches: Vec<Tensor<2>>) -> Result<Linear, Error> {
//!     let mut optimiser = AdamConfig::new().init();
//!     let (mut replicas, mut step) = Replicas::align(&group, 0, &mut model, &mut optimiser).await?;
//!     while let Some(own) = batches.get(step as usize) {
//!         let loss = model.forward(own.clone()).powi_scalar(2).mean();
//!         let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!         match replicas.average(&model, gradients).await {
//!             Ok(mean) => {
//!                 model = optimiser.step(1e-3, model, mean);
//!                 step += 1;
//!             }
//!             // All ranks that are left come here.
//!             Err(Error::Group(_)) => {
//!                 let group = replicas.group().shrink().await?;
//!                 (replicas, step) = Replicas::align(&group, step, &mut model, &mut optimiser).await?;
//!             }
//!             Err(error) => return Err(error),
//!         }
//!     }
//!     Ok(model)
//! }
//! ```
//!
//! # Copies
//! On the back end Flex (`Device::flex()`), a module has the memory into which its weights arrived; over shared memory that is the
//! trainer's own, which stays lent while a parameter has it. burn never writes into it: the first step of an optimiser puts a parameter
//! into other memory. On its way out each parameter is copied once, into the worker's pool. Gradients are averaged where they are, except
//! short ones, which are copied together. Other back ends copy to and from their devices, and of a parameter on the way out burn makes
//! another copy.
//!
//! The feature `flex`, on by default, turns burn's back end of that name on. A program for another back end leaves it out.
//!
//! # Versions
//! Version 0.22 of this crate works with burn 0.22.

#![forbid(unsafe_code)]

mod convert;
mod error;
mod gradients;
mod memory_of;
mod optimisers;
mod parameters;
mod replicas;
mod weights;

pub use error::Error;
pub use replicas::Replicas;
pub use weights::{SnapshotStore, named_tensors};
