//! The locks of model-checked code: `models` in the tests of `fabric` compiles the same source with loom's locks.

pub(crate) use std::sync::MutexGuard;

pub(crate) use tensorwire_testpoints::sync::Mutex;
