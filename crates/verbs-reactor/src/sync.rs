//! The locks of what is model-checked: `models` in the tests of `fabric` compiles the same source over loom's.

pub(crate) use std::sync::MutexGuard;

pub(crate) use tensorwire_testpoints::sync::Mutex;
