//! The programs in the book and in the README, compiled with the tests of documentation.

#[cfg(doctest)]
#[doc = include_str!("src/guide.md")]
mod guide {}
#[cfg(doctest)]
#[doc = include_str!("src/introduction.md")]
mod introduction {}
#[cfg(doctest)]
#[doc = include_str!("src/concepts.md")]
mod concepts {}
#[cfg(doctest)]
#[doc = include_str!("src/discovery.md")]
mod discovery {}
#[cfg(doctest)]
#[doc = include_str!("src/weights.md")]
mod weights {}
#[cfg(feature = "arrays")]
#[cfg(doctest)]
#[doc = include_str!("src/arrays.md")]
mod arrays {}
#[cfg(doctest)]
#[doc = include_str!("src/subscriptions.md")]
mod subscriptions {}
#[cfg(doctest)]
#[doc = include_str!("src/pages.md")]
mod pages {}
#[cfg(doctest)]
#[doc = include_str!("src/checksums.md")]
mod checksums {}
#[cfg(doctest)]
#[doc = include_str!("src/groups.md")]
mod groups {}
#[cfg(doctest)]
#[doc = include_str!("src/stores.md")]
mod stores {}
#[cfg(doctest)]
#[doc = include_str!("src/launchers.md")]
mod launchers {}
#[cfg(doctest)]
#[doc = include_str!("src/from-tensorflow.md")]
mod from_tensorflow {}
#[cfg(doctest)]
#[doc = include_str!("src/errors.md")]
mod errors {}
#[cfg(doctest)]
#[doc = include_str!("src/metrics.md")]
mod metrics {}
#[cfg(feature = "tls")]
#[cfg(doctest)]
#[doc = include_str!("src/security.md")]
mod security {}
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
