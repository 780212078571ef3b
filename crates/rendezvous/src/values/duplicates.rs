//! The meaning of a second send or receive of a key.

/// What happens if a key is sent or received more than once within a step.
///
/// | | a second send, nobody waits | a second receive while one waits | a receive after the value was taken |
/// | --- | --- | --- | --- |
/// | [`Queue`](Self::Queue) | queued | queued | waits for the next send |
/// | [`Report`](Self::Report) | ABORTED | ABORTED; the first goes on waiting | ABORTED |
/// | [`Tolerate`](Self::Tolerate) | ABORTED | waits for the same value | gets the same value |
///
/// The error texts are `Duplicated send: KEY` and `Duplicated recv: KEY`. With `Report` and `Tolerate` a key has one
/// value until its step ends: a second send is a duplicate even if the first value was already received. A receive that
/// was cancelled, by dropping its future or by its token, does not count.
///
/// ```
/// use tensorwire::memory::{Pool, PoolConfig};
/// use tensorwire::{Code, Key};
/// use tensorwire::{Tensor, settings::DuplicatePolicy, tensorflow::{LocalConfig, LocalRendezvous, SendArgs}};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("example") })?;
/// let config = LocalConfig { duplicates: DuplicatePolicy::Report, ..LocalConfig::default() };
/// let rendezvous = LocalRendezvous::with_config(config);
/// let key = Key::builder().source("/CPU:0").destination("/CPU:0").edge("loss").build()?;
///
/// let loss = Tensor::from_values(&pool, &[], &[0.5f32])?;
/// rendezvous.send(&key, SendArgs::default(), loss.clone())?;
/// let refused = rendezvous.send(&key, SendArgs::default(), loss);
/// assert!(refused.is_err_and(|status| status.code == Code::Aborted));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DuplicatePolicy {
    /// Sends and receives of a key are matched in order.
    #[default]
    Queue,
    /// One send and one receive for each key. Further ones are errors, which reveal mistakes in a graph. The key is
    /// stored until the step ends, the value only until it is received.
    Report,
    /// One send for each key, received any number of times. The value is stored until the step ends, and counts towards
    /// the values that wait for receivers.
    Tolerate,
}
