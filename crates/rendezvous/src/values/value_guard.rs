//! Values taken from a table that are not delivered yet.

use tensorwire_protocol::{Key, Status};

use crate::values::{
    arguments::{Delivered, RecvArgs, SendArgs},
    device_copy::{copy_for, copy_on_host},
    table::{TakenValue, dropped},
    tensor::Tensor,
};

/// A value taken from a table. If this is dropped before the value is delivered, the value returns to its position in
/// the queue.
#[derive(Debug)]
pub(crate) struct ValueGuard {
    taken: Option<TakenValue>,
    /// The copy in the memory that the receiver wants, if one was needed.
    copy: Option<Tensor>,
}

impl ValueGuard {
    pub(crate) fn new(taken: TakenValue) -> Self {
        Self { taken: Some(taken), copy: None }
    }

    /// Copies the value to the memory that the receiver wants, if needed.
    pub(crate) async fn bring(&mut self, key: &Key, to: &RecvArgs) -> Result<(), Status> {
        if let Some(taken) = &self.taken {
            self.copy = copy_for(key, &taken.value, to).await?;
        }
        Ok(())
    }

    /// Copies the value to host memory, if needed.
    pub(crate) async fn bring_to_host(&mut self, key: &Key) -> Result<(), Status> {
        if let Some(taken) = &self.taken {
            self.copy = copy_on_host(key, &taken.value).await?;
        }
        Ok(())
    }

    /// The tensor in the memory that the receiver wants.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        self.copy.as_ref().or_else(|| self.taken.as_ref().map(|taken| &taken.value.tensor))
    }

    /// Delivers the tensor with the sender's arguments. `None` on a second call.
    pub(crate) fn hand_out(&mut self) -> Option<(Tensor, SendArgs)> {
        let value = self.taken.take()?.value;
        Some((self.copy.take().unwrap_or(value.tensor), value.send_args))
    }

    /// Returns the value as it was taken, and the copy. `None` on a second call.
    pub(crate) fn hand_on(&mut self) -> Option<(TakenValue, Option<Tensor>)> {
        Some((self.taken.take()?, self.copy.take()))
    }
}

impl Drop for ValueGuard {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.take() {
            taken.put_back();
        }
    }
}

/// Delivers a value to a receiver in the same process.
pub(crate) async fn deliver(key: &Key, taken: TakenValue, recv_args: RecvArgs) -> Result<Delivered, Status> {
    let mut held = ValueGuard::new(taken);
    held.bring(key, &recv_args).await?;
    let (tensor, send_args) = held.hand_out().ok_or_else(dropped)?;
    Ok(Delivered { tensor, send_args, recv_args })
}
