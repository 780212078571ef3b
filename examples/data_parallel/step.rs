//! One step of training: the backward pass on a thread, and the all-reduces of its results meanwhile.

use std::ops::Range;

use futures::{
    channel::mpsc,
    stream::{StreamExt as _, TryStreamExt as _},
};
use tensorwire::collective::{Group, GroupError};
use tensorwire_examples::training::{Model, Plan, descend};

use crate::Failure;

/// The state of training on a rank, the same on all ranks after the same step.
pub(crate) struct Trainee {
    model: Model,
    /// Weights and bias of each layer, alternating.
    pub(crate) parameters: Vec<Vec<f32>>,
    /// The last step's buckets, whose memory the next step reuses.
    buckets: Vec<Bucket>,
}

/// A layer's gradients, those of the weights first, followed by the loss.
type Bucket = Vec<f32>;

impl Trainee {
    pub(crate) fn new(plan: &Plan) -> Result<Self, Failure> {
        Ok(Self { parameters: plan.initial_parameters(), model: plan.load()?, buckets: Vec::new() })
    }

    /// Does one step together with all ranks. Returns the loss, or the error of a call, after which the parameters are unchanged.
    pub(crate) async fn step(
        mut self,
        group: &Group,
        plan: &Plan,
        step: u64,
    ) -> Result<(Self, Result<f32, GroupError>), Failure> {
        let samples = samples(plan.batch, step, group.rank() as u64, group.size() as u64);
        let share = (samples.end - samples.start) as f32 / plan.batch as f32;
        let layers = self.parameters.len() / 2;
        let (finished, computed) = mpsc::channel(layers);
        let computing = tokio::task::spawn_blocking(move || {
            self.compute(samples, share, finished);
            self
        });
        // All ranks make the calls in the same order, that of the buckets. A call is in progress while the next bucket is
        // computed.
        let reducing = computed.map(|bucket| sum_of_all(group, bucket)).buffered(layers).try_collect();
        let reduced: Result<Vec<Bucket>, GroupError> = reducing.await;
        self = computing.await?;
        let followed = reduced.map(|buckets| self.follow(buckets, plan.rate));
        Ok((self, followed))
    }

    /// Computes this rank's share of the gradient, the last layer's first.
    fn compute(&mut self, samples: Range<u64>, share: f32, mut finished: mpsc::Sender<Bucket>) {
        let mut memory = std::mem::take(&mut self.buckets).into_iter();
        let parameters = &self.parameters;
        self.model.backward(parameters, samples, |layer| {
            let [weights, bias] = [0, 1].map(|tensor| parameters[2 * layer.index + tensor].len());
            let mut bucket = memory.next().unwrap_or_default();
            bucket.resize(weights + bias + 1, 0.0);
            let (weights, rest) = bucket.split_at_mut(weights);
            let (bias, loss) = rest.split_at_mut(bias);
            layer.write(weights, bias);
            loss.fill(layer.loss);
            // With this factor the sum over all ranks is the mean of the batch, even if ranks have different numbers of
            // samples.
            bucket.iter_mut().for_each(|slope| *slope *= share);
            // The channel has room for all buckets. It is closed if a call has failed.
            let _ = finished.try_send(bucket);
        });
    }

    /// Applies the gradient of the whole batch. Returns its loss.
    fn follow(&mut self, buckets: Vec<Bucket>, rate: f32) -> f32 {
        for (layer, bucket) in self.parameters.chunks_exact_mut(2).rev().zip(&buckets) {
            let mut rest = bucket.as_slice();
            for values in layer {
                let (gradient, behind) = rest.split_at(values.len());
                descend(values, gradient, rate);
                rest = behind;
            }
        }
        self.buckets = buckets;
        self.buckets.first().and_then(|bucket| bucket.last()).copied().unwrap_or(f32::NAN)
    }
}

async fn sum_of_all(group: &Group, mut bucket: Bucket) -> Result<Bucket, GroupError> {
    group.all_reduce(&mut bucket).await?;
    Ok(bucket)
}

/// The part of a step's samples for a rank. The samples of a step do not depend on the number of ranks.
fn samples(batch: u64, step: u64, rank: u64, size: u64) -> Range<u64> {
    let begin = |rank: u64| step * batch + batch * rank / size;
    begin(rank)..begin(rank + 1)
}
