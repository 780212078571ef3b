//! Reductions: elements of all ranks, combined in place.

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Element, Tensor};
use zerocopy::{FromBytes, IntoBytes as _};

use super::{broadcast::check_root, combination::Combination, running::run, views};
use crate::{
    call::{Call, CallKind, hash_of_numbers},
    error::GroupError,
    group::{
        Group,
        calling::{Calling, Ranks},
    },
    reduction::Reduction,
    schedule::{self, Algorithm, Plan, Plans},
};

/// A call that combines elements of all ranks in place, made by [`Group::all_reduce`], [`Group::reduce`] and
/// [`Group::reduce_scatter`]. It has its number, and sends nothing until it is awaited. Only before that can it be changed.
#[must_use = "the group is over if a call is not awaited"]
pub struct Reducing<'a>(State<'a>);

// A call that is complete at once is not boxed: that would take as long as the rest of it.
#[allow(clippy::large_enum_variant)]
enum State<'a> {
    Requested(Request<'a>),
    UnderWay(BoxFuture<'a, Result<(), GroupError>>),
    Done,
}

struct Request<'a> {
    calling: Calling,
    bytes: &'a mut [u8],
    dtype: DataType,
    reduction: Reduction,
    algorithm: Option<Algorithm>,
    /// The number of elements of each rank's part, for `reduce_scatter`.
    counts: Vec<usize>,
}

impl fmt::Debug for Reducing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Requested(request) => write!(f, "Reducing({})", request.calling.call),
            State::UnderWay(_) | State::Done => f.write_str("Reducing"),
        }
    }
}

impl Group {
    /// Combines the values of all ranks, element by element, in place: all ranks get the same result, bit by bit. All ranks pass
    /// the same number of values, of one type. Default: the sum.
    ///
    /// No peer reads or writes `values`, so the future may borrow them.
    ///
    /// ```no_run
    /// use tensorwire::collective::Reduction;
    ///
    /// # async fn example(group: tensorwire::collective::Group, mut gradient: Vec<f32>)
    /// # -> Result<(), tensorwire::collective::GroupError> {
    /// group.all_reduce(&mut gradient).reduction(Reduction::Mean).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Mismatch`] if ranks make different calls; [`GroupError::Reduction`] for elements that
    /// this reduction cannot combine; other [`GroupError`]s. After an error, `values` are undefined.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn all_reduce<'a, T: Element + FromBytes>(&self, values: &'a mut [T]) -> Reducing<'a> {
        self.reducing(CallKind::AllReduce, None, values)
    }

    /// As [`all_reduce`](Self::all_reduce), for `root` alone. On the other ranks `values` are undefined afterwards.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`GroupError::Argument`] if there is no such root.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn reduce<'a, T: Element + FromBytes>(&self, root: usize, values: &'a mut [T]) -> Reducing<'a> {
        let reducing = self.reducing(CallKind::Reduce, Some(root), values);
        reducing.changed(|request| request.calling.require(check_root(self, root)))
    }

    /// As [`all_reduce`](Self::all_reduce), but each rank gets only its part of the result. `counts` has the number of elements
    /// of each rank's part, in the order of the ranks, the same on all ranks. A rank's part of `values` has the result; the rest
    /// is undefined afterwards.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`GroupError::Argument`] unless there is one count for each rank and they add up
    /// to the number of values.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn reduce_scatter<'a, T: Element + FromBytes>(
        &self,
        values: &'a mut [T],
        counts: &[usize],
    ) -> Reducing<'a> {
        let elements = values.len();
        let reducing = self.reducing(CallKind::ReduceScatter, None, values);
        reducing.changed(|request| {
            request.calling.require(check_counts(self.size(), elements, counts));
            request.counts = counts.to_vec();
        })
    }

    fn reducing<'a, T: Element + FromBytes>(
        &self,
        kind: CallKind,
        root: Option<usize>,
        values: &'a mut [T],
    ) -> Reducing<'a> {
        let call = |number| {
            let call =
                root.map_or_else(|| Call::plain(number, kind), |root| Call::rooted(number, kind, root));
            Call { dtype: Some(T::DTYPE), elements: values.len() as u64, ..call }
        };
        let calling = self.call(call);
        let bytes = values.as_mut_bytes();
        Reducing(State::Requested(Request {
            calling,
            bytes,
            dtype: T::DTYPE,
            reduction: Reduction::default(),
            algorithm: None,
            counts: Vec::new(),
        }))
    }
}

impl<'a> Reducing<'a> {
    /// How elements are combined, the same on all ranks. Default: [`Reduction::Sum`].
    pub fn reduction(self, reduction: Reduction) -> Self {
        self.changed(|request| {
            request.calling.require(reduction.check(request.dtype));
            request.reduction = reduction;
        })
    }

    /// The algorithm of an all-reduce, the same on all ranks; other calls ignore it. Default:
    /// [`Group::default_algorithm`].
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        self.changed(|request| {
            if request.calling.call.kind == CallKind::AllReduce {
                request.calling.require(request.calling.check_algorithm(algorithm));
            }
            request.algorithm = Some(algorithm);
        })
    }

    /// The time limit, counted from when the call is awaited. Default: the group's [`timeout`](crate::Group::timeout).
    pub fn timeout(self, limit: Duration) -> Self {
        self.changed(|request| request.calling.set_limit(limit))
    }

    fn changed(mut self, change: impl FnOnce(&mut Request<'a>)) -> Self {
        if let State::Requested(request) = &mut self.0 {
            change(request);
        }
        self
    }
}

impl Future for Reducing<'_> {
    type Output = Result<(), GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::Requested(request) = &mut self.0 {
            if request.calling.other_tasks_are_due() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            request.choose();
            let span = request.calling.span().clone();
            if let Some(done) = span.in_scope(|| request.at_once()) {
                self.0 = State::Done;
                return Poll::Ready(done);
            }
            if let State::Requested(request) = mem::replace(&mut self.0, State::Done) {
                self.0 = State::UnderWay(request.under_way());
            }
        }
        match &mut self.0 {
            State::UnderWay(future) => future.as_mut().poll(context),
            State::Requested(_) | State::Done => Poll::Pending,
        }
    }
}

impl<'a> Request<'a> {
    /// Sets what the call header says.
    fn choose(&mut self) {
        let Self { calling, bytes, reduction, algorithm, counts, .. } = self;
        let chosen = algorithm.unwrap_or_else(|| calling.default_algorithm(bytes.len()));
        *algorithm = Some(chosen);
        calling.call.reduction = reduction.number();
        calling.call.algorithm = if calling.call.kind == CallKind::AllReduce { chosen as u8 } else { 0 };
        if !counts.is_empty() {
            calling.call.parts = hash_of_numbers(counts.iter().map(|count| *count as u64));
        }
    }

    /// Completes a short all-reduce, if the notes of the others come while this side looks: that takes no timer.
    fn at_once(&mut self) -> Option<Result<(), GroupError>> {
        let Self { calling, bytes, dtype, reduction, algorithm, .. } = self;
        let is_short = calling.call.kind == CallKind::AllReduce
            && *algorithm == Some(Algorithm::Exchange)
            && calling.is_short(bytes.len());
        if !is_short || calling.is_refused() {
            return None;
        }
        calling.exchange_at_once(bytes, |into, inputs| Ok(reduction.fold_all(*dtype, into, inputs)?))
    }

    fn under_way(self) -> BoxFuture<'a, Result<(), GroupError>> {
        let Self { calling, bytes, dtype, reduction, algorithm, counts } = self;
        let algorithm = algorithm.unwrap_or_else(|| calling.default_algorithm(bytes.len()));
        Box::pin(async move {
            let combination = Combination::of(&reduction, dtype);
            let way = combination.way(&calling, bytes.len(), algorithm, &counts);
            calling
                .complete(
                    way.is_compared(&calling),
                    || way.peers(&calling),
                    combination.follow(&calling, &way, None, bytes),
                )
                .await
        })
    }
}

/// How the values of a call travel.
pub(super) enum Way {
    /// This is the only rank.
    Alone,
    /// In place, where each rank reads all values of the others.
    Shared,
    /// In place, where each rank reads its part of all values, and then the results of the others.
    Views,
    /// By messages.
    Plans(Plans),
}

impl Way {
    /// Whether its first messages compare the call. The plans of an all-reduce of two ranks have messages both ways.
    pub(super) fn is_compared(&self, calling: &Calling) -> bool {
        let is_for_all = matches!(calling.call.kind, CallKind::AllReduce | CallKind::AllReduceTensors);
        let algorithm = Algorithm::of_number(calling.call.algorithm);
        let compares = matches!(algorithm, Some(Algorithm::Exchange | Algorithm::Doubling));
        !matches!(self, Self::Plans(_)) || is_for_all && (compares || calling.size() == 2)
    }

    /// The ranks with which this one has messages.
    pub(super) fn peers(&self, calling: &Calling) -> Ranks {
        match self {
            Self::Alone => Ranks::new(),
            Self::Shared | Self::Views => calling.others().collect(),
            Self::Plans(Plans { wide, plan }) => {
                let mut peers: Ranks = wide.iter().chain([plan]).flat_map(Plan::peers).collect();
                peers.sort_unstable();
                peers.dedup();
                peers
            }
        }
    }
}

impl Combination<'_> {
    /// The way of the values of a call, which have `bytes` bytes.
    pub(super) fn way(&self, calling: &Calling, bytes: usize, algorithm: Algorithm, counts: &[usize]) -> Way {
        let (rank, size, width) = (calling.rank(), calling.size(), self.width.max(1));
        let (count, rounds_once) = (bytes / width, self.rounds_once());
        Way::Plans(match calling.call.kind {
            // Wrong arguments make no plan.
            _ if size == 1 || calling.is_refused() => return Way::Alone,
            CallKind::Reduce => {
                schedule::reduce_plan(rank, size, count, width, calling.root(), rounds_once).into()
            }
            CallKind::ReduceScatter if rounds_once => {
                schedule::direct::reduce_scatter(rank, size, counts, schedule::SEGMENT_BYTES / width).into()
            }
            CallKind::ReduceScatter => schedule::ring::reduce_scatter(rank, size, counts).into(),
            _ if algorithm == Algorithm::Views => return Way::Views,
            _ if algorithm == Algorithm::Exchange && calling.is_on_one_host() && !calling.is_short(bytes) => {
                return Way::Shared;
            }
            _ => schedule::plans(algorithm, rank, calling.hosts(), count, width, rounds_once),
        })
    }

    /// Combines `bytes` of all ranks in place. They are those of `own`, if that is a message.
    pub(super) async fn follow(
        &self,
        calling: &Calling,
        way: &Way,
        own: Option<&Tensor>,
        bytes: &mut [u8],
    ) -> Result<(), GroupError> {
        // Boxed: moving a future large enough for these would take longer than a short call.
        match way {
            Way::Alone => {
                self.reduction.finish(self.dtype, bytes, 1);
                Ok(())
            }
            Way::Shared => {
                let own = match own {
                    Some(own) => own.clone(),
                    None => calling.message(bytes).await?,
                };
                Box::pin(views::exchange(calling, self, own, bytes)).await
            }
            Way::Views => Box::pin(views::all_reduce(calling, self, own, bytes)).await,
            Way::Plans(plans) => self.run(calling, plans, own, bytes).await,
        }
    }

    async fn run(
        &self,
        calling: &Calling,
        Plans { wide, plan }: &Plans,
        own: Option<&Tensor>,
        bytes: &mut [u8],
    ) -> Result<(), GroupError> {
        let Some(first) = wide else {
            run(calling, self, plan, own, bytes).await?;
            if !plan.combines_all_at_once() {
                self.reduction.finish(self.dtype, bytes, calling.size());
            }
            return Ok(());
        };
        let count = bytes.len() / self.width;
        let mut wide = calling.buffer(count * size_of::<f32>()).await?;
        self.reduction.widen(self.dtype, &mut wide, &[bytes]);
        run(calling, &self.wide(), first, None, &mut wide).await?;
        self.reduction.narrow(self.dtype, bytes, &wide, calling.size());
        run(calling, self, plan, None, bytes).await
    }
}

/// Checks that there is a count for each rank, and that they add up to the number of elements.
fn check_counts(size: usize, elements: usize, counts: &[usize]) -> Result<(), GroupError> {
    let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    if counts.len() == size && sum == Some(elements) {
        return Ok(());
    }
    Err(GroupError::Argument {
        field: "counts",
        value: format!("{counts:?}"),
        remedy: format!("give {size} counts that add up to {elements}"),
    })
}
