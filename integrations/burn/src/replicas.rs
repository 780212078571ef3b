//! The same module in all ranks of a group, each of which trains with its part of the batches.

use std::collections::HashMap;

use burn::{
    module::Module,
    optim::{GradientsParams, ModuleOptimizer},
};
use tensorwire::{DataType, Tensor, collective::Group};

use crate::{
    error::Error,
    gradients::{self, Plan},
    optimisers, parameters,
    weights::{apply, named_tensors},
};

/// The same module in all ranks of a [`Group`], with the same optimiser: each computes the gradients of its part of a batch, and all get
/// the mean. So all have the same weights, up to the last bit.
///
/// It is of one generation of the group. After an error of a call, all ranks that are left make the next one with
/// [`Group::shrink`], and call [`align`](Self::align) again.
#[derive(Debug)]
pub struct Replicas {
    group: Group,
    plan: Plan,
}

impl Replicas {
    /// Makes the modules and the optimisers of all ranks the same: they get the weights, and the state of the optimiser, of the rank that
    /// has done the most steps, or of the lowest of several such ranks. Returns the number of that rank's steps, from which all go on. All
    /// ranks call this before the first step, and again after ranks are lost or admitted: some may have completed a step that failed on
    /// others, and newcomers have done none. `steps` is what this rank has done.
    ///
    /// Weights and state are read back from a device as by [`named_tensors`](crate::named_tensors).
    ///
    /// # Errors
    /// [`Error::OtherModule`] on all ranks if paths, element types or shapes of parameters differ, or which are trained: the module is as
    /// before, and the group can be used. [`Error::OtherOptimiser`] on the ranks whose optimiser is of another kind than that of the rank
    /// that sends. [`Error::Group`] if ranks are lost or do not call this. Other errors are of this rank alone, and the others wait for it
    /// until their limit.
    ///
    /// # Cancel safety
    /// Dropping it ends the group. Module and optimiser are changed as a whole or not at all.
    pub async fn align<M: Module>(
        group: &Group,
        steps: u64,
        module: &mut M,
        optimiser: &mut ModuleOptimizer,
    ) -> Result<(Self, u64), Error> {
        let (trained, _) = gradients::take(module, GradientsParams::new());
        let plan = Plan::new(trained)?;
        let text = described(module, &plan);
        compare(group, &text).await?;
        let mut all = vec![0; group.size()];
        if let Some(own) = all.get_mut(group.rank()) {
            *own = steps;
        }
        group.all_reduce(&mut all).await?;
        let most = all.iter().copied().max().unwrap_or(steps);
        let root = all.iter().position(|steps| *steps == most).unwrap_or(0);
        let weights = weights_of(group, root, module).await?;
        let state = optimisers::state_of(group, root, module, optimiser).await?;
        if let Some(state) = state {
            apply(module, &format!("the weights of rank {root}"), |name| weights.get(name))?;
            *optimiser = state;
        }
        Ok((Self { group: group.clone(), plan }, most))
    }

    /// The mean of the gradients of all ranks, for the optimiser. All ranks call it, in each step, with the same module. Ranks whose
    /// parts of a batch differ in size scale their loss before.
    ///
    /// A rank without a gradient of a parameter counts as one with zeros. If no rank has one, the result has none.
    ///
    /// Gradients of 256 KiB or more are averaged alone; on burn's back end Flex, in their own memory. Shorter ones are copied
    /// once into tensors of up to 1 MiB, so a call is made for many of them, and their means are parts of its result. Element types
    /// are not mixed.
    ///
    /// # Errors
    /// [`Error::Group`] if ranks are lost or do not call this: the group is over. [`Error::Changed`], [`Error::Burn`] and
    /// [`Error::Worker`] are of this rank alone; the others wait for it until their limit.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub async fn average<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, Error> {
        let (trained, taken) = gradients::take(module, gradients);
        if let Some((own, before)) = difference(trained.iter(), self.plan.trained.iter()) {
            return Err(Error::Changed { own, before });
        }
        let means = self.plan.means(&self.group, taken).await?;
        Ok(gradients::give(module, means))
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }
}

/// A line for each parameter, followed by those that are trained.
fn described<M: Module>(module: &M, plan: &Plan) -> String {
    let all = parameters::all(module).into_iter().map(|parameter| parameter.to_string());
    let trained = plan.trained.iter().map(|parameter| format!("{parameter} trained"));
    all.chain(trained).collect::<Vec<_>>().join("\n")
}

/// Compares the modules of all ranks.
async fn compare(group: &Group, own: &str) -> Result<(), Error> {
    let bytes = own.as_bytes();
    let tensor = Tensor::from_bytes(group.worker().pool(), DataType::U8, &[bytes.len() as u64], bytes)?;
    let texts = group.all_gather(tensor).await?;
    for (other, theirs) in texts.iter().enumerate() {
        let theirs = String::from_utf8_lossy(theirs.bytes());
        if let Some((own, theirs)) = difference(own.lines(), theirs.lines()) {
            // Other processes may say anything.
            let theirs = theirs.escape_debug().to_string();
            return Err(Error::OtherModule { rank: group.rank(), own, other, theirs });
        }
    }
    Ok(())
}

/// The first place at which both differ, in words.
fn difference<T: PartialEq + ToString>(
    mut own: impl Iterator<Item = T>,
    mut theirs: impl Iterator<Item = T>,
) -> Option<(String, String)> {
    let shown = |item: Option<T>| item.map_or("no further parameter".to_owned(), |item| item.to_string());
    loop {
        match (own.next(), theirs.next()) {
            (None, None) => return None,
            (own, theirs) if own == theirs => {}
            (own, theirs) => return Some((shown(own), shown(theirs))),
        }
    }
}

/// The weights that the module of `root` has; none on `root`.
async fn weights_of<M: Module>(
    group: &Group,
    root: usize,
    module: &M,
) -> Result<HashMap<String, Tensor>, Error> {
    let is_root = group.rank() == root;
    let own = if is_root { named_tensors(group.worker().pool(), module)? } else { Vec::new() };
    let (mut own, mut received) = (HashMap::<_, _>::from_iter(own), HashMap::new());
    for parameter in parameters::all(module) {
        let tensor = group.broadcast(root, own.remove(&parameter.name)).await?;
        if !is_root {
            received.insert(parameter.name, tensor);
        }
    }
    Ok(received)
}
