//! Places in the code where tests interfere or listen. The macros are the constant `false`, or nothing, unless a feature
//! says otherwise, so a normal build has none of them.
//!
//! - [`chance!`]`("name")` stands where a rare branch begins that is always allowed: a queue that counts as full, a
//!   wake-up without a reason. The simulator answers it by its seed. Whatever the answer, every promise must be kept.
//! - [`mark!`]`("name")` stands in a branch that a simulated world must have reached.
//! - [`planted!`]`("name")` stands where a mistake begins, of a kind that has been made before. A test plants one at a
//!   time, to see that the simulator finds it without looking for it.
//!
//! Names are unique: a point that is reached is reported by its name, and a test holds the names in the source against
//! those that were reached.

#![forbid(unsafe_code)]

#[cfg(feature = "simulation")]
mod chance;
#[cfg(feature = "planted-bugs")]
mod planted;

#[cfg(feature = "simulation")]
pub use chance::{Entered, World, decide, enter, reached};
#[cfg(feature = "planted-bugs")]
pub use planted::{Planted, is_planted, plant};

/// Whether the rare branch with this name is to be taken here. `false`, as a constant, outside simulation.
///
/// ```
/// let is_full = false;
/// assert!(!(is_full || testpoints::chance!("the example's queue counts as full")));
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

/// Tells the world that runs on this thread that the branch with this name was taken. Nothing outside simulation.
#[cfg(not(feature = "simulation"))]
#[macro_export]
macro_rules! mark {
    ($name:literal) => {};
}

/// Tells the world that runs on this thread that the branch with this name was taken.
#[cfg(feature = "simulation")]
#[macro_export]
macro_rules! mark {
    ($name:literal) => {
        $crate::reached($name)
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
