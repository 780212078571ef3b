//! Sending and receiving maps of values: the inputs and outputs of a step.

use std::{collections::BTreeMap, pin::pin, sync::OnceLock};

use futures::stream::{FuturesUnordered, StreamExt};
use tensorwire_protocol::{Awaiting, Key, ReceiveOptions};

use crate::{
    error::WorkerError,
    values::tensor::Tensor,
    worker::{
        metrics::Timed,
        step::{HeldTensor, Receiving, Step},
    },
};

impl Step {
    /// Sends each tensor under its key, in order, like [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send), for the first key that is refused. The tensors before it are sent.
    pub fn send_inputs(&self, inputs: impl IntoIterator<Item = (Key, Tensor)>) -> Result<(), WorkerError> {
        inputs.into_iter().try_for_each(|(key, tensor)| self.send(&key, tensor))
    }

    /// Receives the next value of each of `keys`. All are requested at once, as by [`recv_many`](Self::recv_many).
    ///
    /// If several receives fail, the returned error is an original cause. A derived error ([`WorkerError::is_derived`])
    /// is returned only when no receive is pending any more or the deadline has passed.
    ///
    /// # Errors
    /// As [`recv`](Self::recv); [`WorkerError::DeadOutput`] for a value of a branch that was not taken;
    /// [`WorkerError::BadKey`] for a key that occurs twice. Values that have arrived for other keys are not lost: the
    /// next receives of these keys get them.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv): a value that has arrived for one of the keys is not lost when the future is dropped.
    pub async fn recv_outputs(&self, keys: &[Key]) -> Result<BTreeMap<Key, Tensor>, WorkerError> {
        let mut outputs: BTreeMap<&Key, Option<HeldTensor>> = BTreeMap::new();
        for key in keys {
            if outputs.insert(key, None).is_some() {
                let problem =
                    "it is given twice, and a map has one value for each key: use recv_many".to_owned();
                return Err(WorkerError::BadKey { key: key.to_string(), problem });
            }
        }
        let derived = OnceLock::new();
        let received = {
            let all = pin!(self.receive_outputs(&mut outputs, &derived));
            let what = || format!("receiving {} outputs of step {}", keys.len(), self.id.0);
            self.worker.timed(Timed::RecvMany, self.worker.operations.defaults.limit, what, all).await
        };
        match received {
            Ok(()) => {}
            Err(late @ WorkerError::DeadlineExceeded { .. }) => {
                return Err(derived.into_inner().unwrap_or(late));
            }
            Err(error) => return Err(error),
        }
        let came = outputs.into_iter().filter_map(|(key, held)| held.map(|held| (key, held)));
        came.map(|(key, held)| Ok((key.clone(), held.into_tensor()?))).collect()
    }

    /// Receives the value of each key. The first derived error is stored in `derived`, and the other receives go on.
    async fn receive_outputs(
        &self,
        outputs: &mut BTreeMap<&Key, Option<HeldTensor>>,
        derived: &OnceLock<WorkerError>,
    ) -> Result<(), WorkerError> {
        self.connect_sources(outputs.keys().copied()).await?;
        let options =
            ReceiveOptions { sharing: self.worker.operations.defaults.sharing, awaiting: Awaiting::Together };
        let receives = outputs.iter_mut().map(|(key, place)| async move {
            let held = self.receive_held(key, Receiving::Held(options)).await?;
            if held.is_dead() {
                return Err(WorkerError::DeadOutput { key: key.to_string() });
            }
            *place = Some(held);
            Ok(())
        });
        let mut receives: FuturesUnordered<_> = receives.collect();
        while let Some(received) = receives.next().await {
            match received {
                Err(error) if error.is_derived() => drop(derived.set(error)),
                Err(error) => return Err(error),
                Ok(()) => {}
            }
        }
        derived.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}
