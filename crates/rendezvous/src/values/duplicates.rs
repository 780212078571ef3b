//! What a second send or receive of one key means.

/// What happens when a key of a step is sent or received more than once.
///
/// | | a second send, nobody waits | a second receive while one waits | a receive after the value was taken |
/// | --- | --- | --- | --- |
/// | [`Queue`](Self::Queue) | queued | queued | waits for the next send |
/// | [`Report`](Self::Report) | ABORTED | ABORTED; the first goes on waiting | ABORTED |
/// | [`Tolerate`](Self::Tolerate) | ABORTED | waits for the same value | gets the same value |
///
/// The texts are `Duplicated send: KEY` and `Duplicated recv: KEY`. Under the last two a key has one value for the life
/// of its step, and a send is a second one also when the first was received long ago. A receive that was given up, by
/// dropping its future or by its token, doesn't count.
///
/// ```
/// use tensorwire_memory::{Pool, PoolConfig};
/// use tensorwire_protocol::{Code, Key};
/// use tensorwire_rendezvous::{DuplicatePolicy, LocalConfig, LocalRendezvous, SendArgs, Tensor};
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
    /// One send and one receive for each key: more are errors, which find mistakes in a graph. What is kept for the
    /// life of the step is the key, not the value.
    Report,
    /// One send for each key, received any number of times. The value is kept for the life of the step, and counts as
    /// long among those that wait for a receiver.
    Tolerate,
}
