//! How long to look for work before sleeping.

/// What a fabric's drivers do when there is nothing to do (DESIGN §3). Set where a fabric is made, for all its
/// queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wait {
    /// Sleeps at once: no CPU time is spent waiting, and each wake-up costs a system call at both ends.
    Sleep,
    /// Looks again for some microseconds, first with pauses, then giving the core away; the budget grows while
    /// that pays off and is zero after an idle gap. At most one task per fabric and runtime does so.
    #[default]
    Adaptive,
    /// Never sleeps. For a core of its own.
    Busy,
}

/// A text that names no way of waiting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("way of waiting `{0}` is unknown: use one of sleep, adaptive, busy")]
pub struct UnknownWait(pub String);

impl std::str::FromStr for Wait {
    type Err = UnknownWait;

    fn from_str(text: &str) -> Result<Self, UnknownWait> {
        match text {
            "sleep" => Ok(Self::Sleep),
            "adaptive" => Ok(Self::Adaptive),
            "busy" => Ok(Self::Busy),
            other => Err(UnknownWait(other.to_owned())),
        }
    }
}
