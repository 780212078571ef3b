//! Memory for what is sent as one run of bytes and is none: slices, and several tensors.

use std::{fmt, sync::Arc};

use tensorwire_memory::Pool;
use tensorwire_protocol::{Code, Status};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::values::{cut::Cut, tensor::Tensor, tensor_list::PackedTensors};

fn exhausted(error: impl fmt::Display) -> Status {
    Status::new(Code::ResourceExhausted, format!("no memory for a copy of what is sent: {error}"))
}

/// How many gathered contents of one connection are in memory at a time: one is gathered while another is sent.
const GATHERED_MAX: usize = 2;

/// Gathers what one connection sends.
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
        let turn = self.turns.acquire_owned().await.map_err(exhausted)?;
        let tensor = cut.gathered(&self.pool).await.map_err(exhausted)?;
        Ok((tensor, turn))
    }

    /// The same of tensors that travel together.
    ///
    /// # Errors
    /// As [`gathered`](Self::gathered).
    pub(super) async fn packed(
        self,
        tensors: PackedTensors,
    ) -> Result<(Tensor, OwnedSemaphorePermit), Status> {
        let turn = self.turns.acquire_owned().await.map_err(exhausted)?;
        Ok((tensors.gathered(&self.pool).await.map_err(exhausted)?, turn))
    }
}
