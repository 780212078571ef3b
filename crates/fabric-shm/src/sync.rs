//! The atomics of what is model-checked: `models` in the tests of `fabric` compiles the same source over loom's.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
