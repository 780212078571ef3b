//! Points in the code at which tests interfere or observe. Without a feature the macros are the constant `false`, or
//! nothing, so a normal build has none of them.
//!
//! - [`chance!`]`("name")` marks the beginning of a rare branch that is always allowed: a queue that counts as full, a
//!   wake-up without a reason. The simulator decides it by its seed. Every promise must hold either way.
//! - [`mark!`]`("name")` marks a branch that a simulated world must reach.
//! - [`counted!`]`("name", amount)` adds to a count that tests read by its name.
//! - [`planted!`]`("name")` marks the beginning of a mistake of a kind that has occurred before. A test switches on one at a
//!   time, to show that the simulator's general checks find it.
//!
//! Names are unique: a reached point is reported by its name, and a test compares the names in the source with those
//! that were reached.

#![forbid(unsafe_code)]

#[cfg(feature = "simulation")]
mod chance;
#[cfg(feature = "counts")]
mod counts;
#[cfg(feature = "planted-bugs")]
mod planted;

#[cfg(feature = "simulation")]
pub use chance::{Entered, World, decide, enter, reached};
#[cfg(feature = "counts")]
pub use counts::{add, counted, locks_taken};
#[cfg(feature = "planted-bugs")]
pub use planted::{Planted, is_planted, plant};

/// The locks in the path of a transfer: the standard library's, which a test can count.
pub mod sync {
    #[cfg(feature = "counts")]
    pub use crate::counts::{Mutex, RwLock};
    #[cfg(not(feature = "counts"))]
    pub use std::sync::{Mutex, RwLock};
}

/// Whether the rare branch with this name is to be taken here. `false`, as a constant, outside simulation.
///
/// ```
/// let is_full = false;
/// assert!(!(is_full || tensorwire_testpoints::chance!("the example's queue counts as full")));
/// ```
#[cfg(not(feature = "simulation"))]
#[macro_export]
macro_rules! chance {
    ($name:literal) => {
        false
    };
}

/// Whether the rare branch with this name is to be taken here, by the world that runs on this thread.
#[cfg(feature = "simulation")]
#[macro_export]
macro_rules! chance {
    ($name:literal) => {
        $crate::decide($name)
    };
}

/// Reports to the world that runs on this thread that the branch with this name was taken. Nothing outside simulation.
#[cfg(not(feature = "simulation"))]
#[macro_export]
macro_rules! mark {
    ($name:literal) => {};
}

/// Reports to the world that runs on this thread that the branch with this name was taken.
#[cfg(feature = "simulation")]
#[macro_export]
macro_rules! mark {
    ($name:literal) => {
        $crate::reached($name)
    };
}

/// Counts this amount under a name. Nothing unless a test reads counts.
#[cfg(not(feature = "counts"))]
#[macro_export]
macro_rules! counted {
    ($name:literal, $amount:expr) => {
        if false {
            let _: usize = $amount;
        }
    };
}

/// Counts this amount under a name, which [`counted`](counted()) reads.
#[cfg(feature = "counts")]
#[macro_export]
macro_rules! counted {
    ($name:literal, $amount:expr) => {
        $crate::add($name, $amount)
    };
}

/// Whether the mistake with this name is to be made here. `false`, as a constant, unless bugs are planted.
#[cfg(not(feature = "planted-bugs"))]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        false
    };
}

/// Whether the mistake with this name is to be made here.
#[cfg(feature = "planted-bugs")]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        $crate::is_planted($name)
    };
}
