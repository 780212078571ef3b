//! [`SimpleRendezvous`]: the rendezvous of producers and consumers that run one after the other.

use tensorwire_protocol::{Code, Status};

use crate::{
    compat::local::{LocalConfig, LocalRendezvous},
    values::{arguments::SendArgs, duplicates::DuplicatePolicy, tensor::Tensor},
};

/// Stores values by the name of their edge, for producers and consumers that run one after the other. A receive never
/// waits, and a value can be received any number of times. Cheap to clone: all clones are the same rendezvous.
///
/// ```
/// use tensorwire::memory::{Pool, PoolConfig};
/// use tensorwire::Code;
/// use tensorwire::{Tensor, tensorflow::SimpleRendezvous};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("example") })?;
/// let rendezvous = SimpleRendezvous::new();
/// rendezvous.send("weights", Tensor::from_values(&pool, &[2], &[1.0f32, 2.0])?)?;
/// assert_eq!(rendezvous.recv("weights")?.values::<f32>()?, [1.0, 2.0]);
/// assert!(rendezvous.recv("biases").is_err_and(|status| status.code == Code::NotFound));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SimpleRendezvous {
    local: LocalRendezvous,
}

impl Default for SimpleRendezvous {
    fn default() -> Self {
        let config = LocalConfig { duplicates: DuplicatePolicy::Tolerate, ..LocalConfig::default() };
        Self { local: LocalRendezvous::with_config(config) }
    }
}

impl SimpleRendezvous {
    /// An empty rendezvous.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes `tensor` available under the name of its edge ([`Key::edge`](tensorwire_protocol::Key::edge)).
    ///
    /// # Errors
    /// ABORTED if the edge already has a value; the status of [`abort`](Self::abort).
    pub fn send(&self, edge: &str, tensor: Tensor) -> Result<(), Status> {
        self.local.send_text(edge, SendArgs::default(), tensor)
    }

    /// The value of `edge`.
    ///
    /// # Errors
    /// NOT_FOUND if the edge has no value; the status of [`abort`](Self::abort).
    pub fn recv(&self, edge: &str) -> Result<Tensor, Status> {
        let taken = self.local.step().take_now(edge)?;
        taken.map(|taken| taken.value.tensor).ok_or_else(|| {
            let message =
                format!("edge `{edge}` has no value; send before receiving, or wait in a LocalRendezvous");
            Status::new(Code::NotFound, message)
        })
    }

    /// Drops all values. Later sends and receives fail with `status`. Of several calls, the status of the first is
    /// used.
    pub fn abort(&self, status: &Status) {
        self.local.abort(status);
    }
}
