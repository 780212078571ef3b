//! Memory for slices that are not one run of bytes.

use std::sync::Arc;

use tensorwire_memory::Pool;
use tensorwire_protocol::{Code, Status};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::values::{cut::Cut, tensor::Tensor};

/// Slices of one connection that are in memory of their own at a time: one is gathered while another is sent.
const GATHERED_MAX: usize = 2;

/// Gathers slices of one connection.
#[derive(Debug, Clone)]
pub(crate) struct Gathering {
    pool: Pool,
    turns: Arc<Semaphore>,
}

impl Gathering {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, turns: Arc::new(Semaphore::new(GATHERED_MAX)) }
    }

    /// The slice in memory of its own, after its turn has come and the pool has room. The turn ends when the permit is dropped.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if the pool can never have so much room.
    pub(super) async fn gathered(self, cut: Cut) -> Result<(Tensor, OwnedSemaphorePermit), Status> {
        let exhausted =
            |text: String| Status::new(Code::ResourceExhausted, format!("no memory for a slice: {text}"));
        let turn = self.turns.acquire_owned().await.map_err(|error| exhausted(error.to_string()))?;
        let tensor = cut.gathered(&self.pool).await.map_err(|error| exhausted(error.to_string()))?;
        Ok((tensor, turn))
    }
}
