//! A server's part of the parameters: what it publishes, and how gradients change it.

use std::collections::VecDeque;

use tensorwire::{Tensor, Worker, WorkerError};
use tensorwire_examples::{
    sgd::{Sgd, SgdConfig},
    shards::Piece,
};

use crate::link::{at_step, latest, velocity_at_step, wire_shape};

/// Steps whose parameters stay published: the present one, and the one before it, since another server may still be
/// there.
const STEPS_KEPT: usize = 2;
/// Checkpoints that stay published, so that the chief has time to fetch one.
const CHECKPOINTS_KEPT: usize = 2;

/// The pieces of one server.
#[derive(Debug)]
pub(crate) struct Parameters {
    pieces: Vec<Piece>,
    values: Vec<Vec<f32>>,
    updated: Vec<Vec<f32>>,
    sgd: Sgd,
    /// How many updates have been made.
    step: u64,
    checkpoint_steps: u64,
    /// The last step has a checkpoint too.
    steps: u64,
    kept: VecDeque<u64>,
    checkpoints: VecDeque<u64>,
}

/// What [`Parameters`] begin with.
#[derive(Debug)]
pub(crate) struct Beginning {
    pub(crate) step: u64,
    pub(crate) values: Vec<Vec<f32>>,
    pub(crate) velocities: Vec<Vec<f32>>,
}

impl Parameters {
    /// No values yet: [`restore`](Self::restore) gives them.
    pub(crate) fn empty(pieces: Vec<Piece>, steps: u64, checkpoint_steps: u64, sgd: SgdConfig) -> Self {
        Self {
            updated: pieces.iter().map(|piece| vec![0.0; piece.elements.len()]).collect(),
            values: Vec::new(),
            pieces,
            sgd: Sgd::new(sgd),
            step: 0,
            checkpoint_steps,
            steps,
            kept: VecDeque::new(),
            checkpoints: VecDeque::new(),
        }
    }

    pub(crate) const fn step(&self) -> u64 {
        self.step
    }

    /// Begins anew.
    pub(crate) fn restore(
        &mut self,
        worker: &Worker,
        beginning: Beginning,
        sgd: SgdConfig,
    ) -> Result<(), WorkerError> {
        for step in std::mem::take(&mut self.kept) {
            self.withdraw(worker, step);
        }
        for step in std::mem::take(&mut self.checkpoints) {
            self.withdraw_checkpoint(worker, step);
        }
        self.step = beginning.step;
        self.values = beginning.values;
        self.sgd = Sgd::resume(sgd, beginning.velocities);
        self.publish(worker)
    }

    /// Takes one step along the mean of `gradients`, which are those of several workers, and publishes the result.
    pub(crate) fn apply(&mut self, worker: &Worker, gradients: &[Vec<Tensor>]) -> Result<(), WorkerError> {
        for piece in 0..self.pieces.len() {
            let gradient = mean(gradients.iter().filter_map(|gradients| gradients.get(piece)))?;
            self.sgd.update(piece, &self.values[piece], &gradient, &mut self.updated[piece]);
        }
        std::mem::swap(&mut self.values, &mut self.updated);
        self.step += 1;
        self.publish(worker)
    }

    fn publish(&mut self, worker: &Worker) -> Result<(), WorkerError> {
        let is_checkpoint = self.step.is_multiple_of(self.checkpoint_steps) || self.step == self.steps;
        for (index, piece) in self.pieces.iter().enumerate() {
            // Workers that are being served keep the tensor they asked for; its memory comes back after that.
            let tensor = |values| Tensor::from_values(worker.pool(), &wire_shape(piece), values);
            let values = tensor(&self.values[index])?;
            worker.publish(&latest(piece), values.clone())?;
            worker.publish(&at_step(piece, self.step), values)?;
            if is_checkpoint && let Some(velocities) = self.sgd.velocities().get(index) {
                worker.publish(&velocity_at_step(piece, self.step), tensor(velocities)?)?;
            }
        }
        if is_checkpoint {
            self.checkpoints.push_back(self.step);
        } else {
            self.kept.push_back(self.step);
        }
        self.withdraw_old(worker);
        Ok(())
    }

    fn withdraw_old(&mut self, worker: &Worker) {
        while self.kept.len() > STEPS_KEPT {
            let Some(step) = self.kept.pop_front() else { break };
            self.withdraw(worker, step);
        }
        while self.checkpoints.len() > CHECKPOINTS_KEPT {
            let Some(step) = self.checkpoints.pop_front() else { break };
            self.withdraw_checkpoint(worker, step);
        }
    }

    fn withdraw(&self, worker: &Worker, step: u64) {
        for piece in &self.pieces {
            worker.withdraw(&at_step(piece, step));
        }
    }

    fn withdraw_checkpoint(&self, worker: &Worker, step: u64) {
        self.withdraw(worker, step);
        for piece in &self.pieces {
            worker.withdraw(&velocity_at_step(piece, step));
        }
    }
}

/// The mean of tensors of one shape, summed in their order.
fn mean<'tensors>(tensors: impl Iterator<Item = &'tensors Tensor>) -> Result<Vec<f32>, WorkerError> {
    let (mut sum, mut count) = (Vec::new(), 0u16);
    for tensor in tensors {
        let values = tensor.values::<f32>()?;
        if count == 0 {
            sum = values;
        } else {
            sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
        }
        count += 1;
    }
    let scale = 1.0 / f32::from(count.max(1));
    sum.iter_mut().for_each(|sum| *sum *= scale);
    Ok(sum)
}
