//! The atomics of the model-checked modules, which `models` in the tests of `fabric` compiles over loom's.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
