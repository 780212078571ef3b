//! All-reduce of tensors. The inputs do not change, and the result is a new tensor.

use std::{fmt, future::IntoFuture, time::Duration};

use tensorwire_fabric::BoxFuture;
use tensorwire_memory::{
    Block,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

use super::{combination::Combination, reducing::Way};
use crate::{
    call::{Call, CallKind, hash_of_numbers},
    error::GroupError,
    group::{Group, calling::Calling},
    reduction::Reduction,
    schedule::Algorithm,
};

/// A call that combines tensors of all ranks, made by [`Group::all_reduce_tensors`]. It has its number, and sends nothing until
/// it is awaited.
#[must_use = "the group is over if a call is not awaited"]
pub struct ReducingTensors {
    calling: Calling,
    inputs: Vec<Tensor>,
    reduction: Reduction,
    algorithm: Option<Algorithm>,
}

impl fmt::Debug for ReducingTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReducingTensors({})", self.calling.call)
    }
}

impl Group {
    /// Combines all tensors of all ranks, element by element: all ranks get the same result, bit by bit. Each rank passes one
    /// tensor or several; all pass the same number, of one type and shape. Default: the sum.
    ///
    /// On one host the other ranks read a tensor without a copy if it is in the worker's
    /// [pool](tensorwire_rendezvous::Worker::pool). Other tensors are copied once, as [`all_reduce`](Self::all_reduce) copies its
    /// values.
    ///
    /// ```no_run
    /// use tensorwire::Tensor;
    ///
    /// # async fn example(group: tensorwire::collective::Group, first: Tensor, second: Tensor)
    /// # -> Result<(), tensorwire::collective::GroupError> {
    /// let sum: Tensor = group.all_reduce_tensors([first, second]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if there is no tensor, they differ in type or shape, or one is dead;
    /// [`GroupError::Mismatch`] if ranks make different calls; [`GroupError::Reduction`] for elements that this reduction cannot
    /// combine; other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn all_reduce_tensors(&self, inputs: impl IntoIterator<Item = Tensor>) -> ReducingTensors {
        let inputs: Vec<_> = inputs.into_iter().collect();
        let mut calling = self.call(|number| {
            let call = Call::plain(number, CallKind::AllReduceTensors);
            let elements = |tensor: &Tensor| tensor.shape().iter().product();
            Call {
                dtype: inputs.first().map(Tensor::dtype),
                elements: inputs.first().map_or(0, elements),
                parts: shape_hash(&inputs),
                ..call
            }
        });
        calling.require(check(&inputs));
        ReducingTensors { calling, inputs, reduction: Reduction::default(), algorithm: None }
    }
}

impl ReducingTensors {
    /// How elements are combined, the same on all ranks. Default: [`Reduction::Sum`].
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.calling.require(self.inputs.first().map_or(Ok(()), |first| reduction.check(first.dtype())));
        self.reduction = reduction;
        self
    }

    /// The algorithm, the same on all ranks. Default: [`Group::default_algorithm`].
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.calling.require(self.calling.check_algorithm(algorithm));
        self.algorithm = Some(algorithm);
        self
    }

    /// The time limit, counted from when the call is awaited. Default: the group's [`timeout`](crate::Group::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.calling.set_limit(limit);
        self
    }
}

impl IntoFuture for ReducingTensors {
    type Output = Result<Tensor, GroupError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { mut calling, inputs, reduction, algorithm } = self;
        let bytes = inputs.first().map_or(0, |input| input.bytes().len());
        let algorithm = algorithm.unwrap_or_else(|| calling.default_algorithm(bytes));
        calling.call.reduction = reduction.number();
        calling.call.algorithm = algorithm as u8;
        let dtype = inputs.first().map_or(DataType::U8, Tensor::dtype);
        // The default may be wrong, too.
        calling.require_late(reduction.check(dtype));
        Box::pin(async move {
            let combination = Combination::of(&reduction, dtype);
            let way = match inputs.len() > 1 && combination.rounds_once() {
                true => combination.wide().way(&calling, 2 * bytes, algorithm, &[]),
                false => combination.way(&calling, bytes, algorithm, &[]),
            };
            let is_compared = way.is_compared(&calling);
            let work = async { reduce(&calling, &combination, inputs, &way).await };
            calling.complete(is_compared, || way.peers(&calling), work).await
        })
    }
}

/// A hash of the number of tensors and of their shape.
fn shape_hash(inputs: &[Tensor]) -> u32 {
    let shape = inputs.first().map_or(&[][..], Tensor::shape);
    let numbers = [inputs.len() as u64].into_iter().chain(shape.iter().copied());
    hash_of_numbers(numbers)
}

/// Checks that all can be combined with each other. Strings pass here, and `Reduction::check` rejects them.
fn check(inputs: &[Tensor]) -> Result<(), GroupError> {
    let wrong = |value: String, remedy: &str| GroupError::Argument {
        field: "inputs",
        value,
        remedy: remedy.to_owned(),
    };
    let Some(first) = inputs.first() else {
        return Err(wrong("none".to_owned(), "give at least one tensor"));
    };
    let like_first = |input: &&Tensor| input.dtype() == first.dtype() && input.shape() == first.shape();
    match inputs.iter().find(|input| input.is_dead() || !like_first(input)) {
        Some(unlike) if unlike.is_dead() => Err(wrong(format!("{unlike:?}"), "give tensors with elements")),
        Some(unlike) => Err(wrong(format!("{first:?} and {unlike:?}"), "give tensors of one type and shape")),
        None => Ok(()),
    }
}

async fn reduce(
    calling: &Calling,
    combination: &Combination<'_>,
    inputs: Vec<Tensor>,
    way: &Way,
) -> Result<Tensor, GroupError> {
    if inputs.len() == 1 || !combination.rounds_once() {
        return reduce_in(calling, combination, inputs, way).await;
    }
    let (shape, count) = (inputs[0].shape().to_vec(), inputs[0].bytes().len() / combination.width);
    let (mut own, wide) = (calling.buffer(count * size_of::<f32>()).await?, combination.wide());
    let all = inputs.iter().map(Tensor::bytes).collect::<Vec<_>>();
    combination.reduction.widen(combination.dtype, &mut own, &all);
    let values = inputs.len() * calling.size();
    let sum = reduce_in(calling, &wide, vec![Tensor::new(own, wide.dtype, &shape)?], way).await?;
    let mut output = calling.buffer(count * combination.width).await?;
    combination.reduction.narrow(combination.dtype, &mut output, sum.bytes(), values);
    Ok(Tensor::new(output, combination.dtype, &shape)?)
}

/// As [`reduce`], in the precision of the elements.
async fn reduce_in(
    calling: &Calling,
    combination: &Combination<'_>,
    mut inputs: Vec<Tensor>,
    way: &Way,
) -> Result<Tensor, GroupError> {
    let (shape, bytes) = (inputs[0].shape().to_vec(), inputs[0].bytes().len());
    let is_shared = matches!(way, Way::Shared | Way::Views);
    // Memory that the others cannot map would be copied once for each of them.
    let is_copied = is_shared && !inputs[0].buf().block().is_some_and(Block::shareable);
    if inputs.len() > 1 || is_copied {
        let mut own = calling.buffer(bytes).await?;
        combination.fold_all(&mut own, &inputs.iter().map(Tensor::bytes).collect::<Vec<_>>())?;
        inputs = vec![Tensor::new(own, combination.dtype, &shape)?];
    }
    let own = inputs.swap_remove(0);
    if calling.size() == 1 {
        return Ok(own);
    }
    let mut output = calling.buffer(bytes).await?;
    if !is_shared {
        copy_bytes(&mut output, own.bytes(), CopyReason::Local);
    }
    combination.follow(calling, way, Some(&own), &mut output).await?;
    Ok(Tensor::new(output, combination.dtype, &shape)?)
}
