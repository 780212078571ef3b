//! A value of this worker's or process's own, between its queue and whoever receives it.

use tensorwire_protocol::{Key, Status};

use crate::values::{
    arguments::{Delivered, RecvArgs, SendArgs},
    device_copy::{copy_for, copy_on_host},
    table::{TakenValue, dropped},
    tensor::Tensor,
};

/// A value that goes back to its place in the table when this is dropped before it is handed out.
#[derive(Debug)]
pub(crate) struct ValueGuard {
    taken: Option<TakenValue>,
    /// Where the receiver wants it, if it had to be copied there.
    copy: Option<Tensor>,
}

impl ValueGuard {
    pub(crate) fn new(taken: TakenValue) -> Self {
        Self { taken: Some(taken), copy: None }
    }

    /// Copies it to where its receiver wants it, if it isn't there.
    pub(crate) async fn bring(&mut self, key: &Key, to: &RecvArgs) -> Result<(), Status> {
        if let Some(taken) = &self.taken {
            self.copy = copy_for(key, &taken.value, to).await?;
        }
        Ok(())
    }

    /// Copies it to host memory, if it isn't there.
    pub(crate) async fn bring_to_host(&mut self, key: &Key) -> Result<(), Status> {
        if let Some(taken) = &self.taken {
            self.copy = copy_on_host(key, &taken.value).await?;
        }
        Ok(())
    }

    /// The tensor, where its receiver wants it.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        self.copy.as_ref().or_else(|| self.taken.as_ref().map(|taken| &taken.value.tensor))
    }

    /// Hands it out, with what its sender said; once.
    pub(crate) fn hand_out(&mut self) -> Option<(Tensor, SendArgs)> {
        let value = self.taken.take()?.value;
        Some((self.copy.take().unwrap_or(value.tensor), value.send_args))
    }

    /// Hands it on as it was taken, beside the copy; once.
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

/// What a receiver in the same process gets.
pub(crate) async fn deliver(key: &Key, taken: TakenValue, recv_args: RecvArgs) -> Result<Delivered, Status> {
    let mut held = ValueGuard::new(taken);
    held.bring(key, &recv_args).await?;
    let (tensor, send_args) = held.hand_out().ok_or_else(dropped)?;
    Ok(Delivered { tensor, send_args, recv_args })
}
