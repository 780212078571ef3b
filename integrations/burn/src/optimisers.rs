//! The state of an optimiser, sent from one rank to the others.
//!
//! burn finds a parameter's state by its id, which is random in each process. So each rank gets the ids of the rank that sends, and puts
//! its own in their place: parameters keep their ids, as the gradients and the groups of an optimiser need it.

use std::collections::HashMap;

use burn::{
    module::{Module, list_param_ids},
    optim::{ModuleOptimizer, OptimizerRecord},
    store::burn_pack::{self, Reader, Writer},
    tensor::Bytes,
};
use tensorwire::{DataType, Tensor, collective::Group};

use crate::error::Error;

/// How much of a state is sent at a time, in bytes.
const PIECE: usize = 16 << 20;

/// The state that the optimiser of `root` has; `None` on `root`, which keeps it.
pub(crate) async fn state_of<M: Module>(
    group: &Group,
    root: usize,
    module: &M,
    optimiser: &ModuleOptimizer,
) -> Result<Option<ModuleOptimizer>, Error> {
    let own: Vec<u64> = list_param_ids(module).iter().map(|id| id.val()).collect();
    let sent = (group.rank() == root).then(|| optimiser.into_bytes()).transpose().map_err(failed)?;
    let head = sent.as_ref().map(|state| {
        let head: Vec<u64> = own.iter().copied().chain([state.len() as u64]).collect();
        Tensor::from_values(group.worker().pool(), &[head.len() as u64], &head)
    });
    let head = group.broadcast(root, head.transpose()?).await?;
    let head = head.values::<u64>()?;
    let (&length, theirs) = head.split_last().unwrap_or((&0, &[]));
    let Some(state) = received(group, root, sent.as_deref(), length).await? else { return Ok(None) };
    let ids = theirs.iter().copied().zip(own).collect();
    let record = renamed(Bytes::from_bytes_vec(state), &ids).map_err(failed)?;
    let record = OptimizerRecord::from_bytes(record.into_bytes().map_err(failed)?).map_err(failed)?;
    let tensors = record.len();
    let taken = optimiser.clone().load_record(record);
    // burn leaves out the state that an optimiser of another kind has.
    if taken.to_record().len() != tensors {
        return Err(Error::OtherOptimiser { rank: group.rank(), other: root });
    }
    Ok(Some(taken))
}

/// The `length` bytes that `root` sends; `None` on `root`.
async fn received(
    group: &Group,
    root: usize,
    sent: Option<&[u8]>,
    length: u64,
) -> Result<Option<Vec<u8>>, Error> {
    let (pool, mut all) = (group.worker().pool(), Vec::new());
    for from in (0..usize::try_from(length).unwrap_or(usize::MAX)).step_by(PIECE) {
        let own = sent.and_then(|state| state.get(from..state.len().min(from + PIECE)));
        let own = own.map(|piece| Tensor::from_bytes(pool, DataType::U8, &[piece.len() as u64], piece));
        let piece = group.broadcast(root, own.transpose()?).await?;
        if sent.is_none() {
            all.extend_from_slice(piece.bytes());
        }
    }
    Ok(sent.is_none().then_some(all))
}

/// A record in which the ids of parameters are replaced: they begin the names of tensors and scalars, and are the keys of paths.
fn renamed(record: Bytes, ids: &HashMap<u64, u64>) -> Result<Writer, burn_pack::Error> {
    let own = |id: u64| ids.get(&id).copied().unwrap_or(id);
    let name = |name: &str| {
        let (id, rest) = name.split_at(name.find('.').unwrap_or(name.len()));
        id.parse().map_or_else(|_| name.to_owned(), |id| format!("{}{rest}", own(id)))
    };
    let reader = Reader::from_bytes(record)?;
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    let mut tensors = Vec::new();
    for tensor in reader.into_tensors()? {
        let (of, dtype, shape, id, bytes) = tensor.into_parts()?;
        tensors.push(burn_pack::Tensor::new(name(&of), dtype, shape, id.map(own), bytes));
    }
    let writer = Writer::new(tensors);
    let writer = scalars.iter().fold(writer, |writer, (of, value)| writer.with_scalar(&name(of), *value));
    Ok(paths.iter().fold(writer, |writer, (of, path)| writer.with_metadata(&name(of), path)))
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Burn(format!("the state of the optimiser: {error}"))
}
