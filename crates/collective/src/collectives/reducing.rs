//! Reductions: elements of all ranks, combined in place.

use std::{
    collections::BTreeSet,
    fmt, mem,
    pin::Pin,
    slice,
    task::{Context, Poll},
    time::Duration,
};

use futures::future::try_join_all;
use smallvec::SmallVec;
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Element;
use zerocopy::{FromBytes, IntoBytes as _};

use super::{
    broadcast::check_root,
    combination::Combination,
    running::{exchange, in_order_of_ranks, replace, run},
    views,
};
use crate::{
    call::{Call, CallKind, hash_of_numbers},
    error::GroupError,
    group::{
        Group, barrier,
        calling::{Arrived, Calling, Ranks},
    },
    reduction::Reduction,
    schedule::{self, Algorithm, Plan, Turn},
};

/// The longest values that are exchanged at once if the other ranks make the call at the same time.
const SHORTEST_BYTES_MAX: usize = 64;

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
            && bytes.len() <= SHORTEST_BYTES_MAX;
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
                    combination.follow(&calling, &way, bytes),
                )
                .await
        })
    }
}

/// How the values of a call travel.
pub(super) enum Way {
    /// This is the only rank.
    Alone,
    /// Directly between all ranks, in one step.
    Exchange,
    /// In place, where all ranks read them.
    Views,
    /// By [doubling](schedule::rounds).
    Doubling,
    /// By a plan.
    Plan(Plan),
    /// By the plans of [`combine_and_collect`](schedule::hierarchical::combine_and_collect).
    OverHosts([Plan; 2]),
}

impl Way {
    /// Whether its first messages compare the call. The plans of an all-reduce of two ranks have messages both ways.
    pub(super) fn is_compared(&self, calling: &Calling) -> bool {
        let is_for_all = matches!(calling.call.kind, CallKind::AllReduce | CallKind::AllReduceTensors);
        !matches!(self, Self::Plan(_) | Self::OverHosts(_)) || is_for_all && calling.size() == 2
    }

    /// The ranks with which this one has messages.
    pub(super) fn peers(&self, calling: &Calling) -> Ranks {
        let of_plans = |plans: &[Plan]| {
            plans.iter().flat_map(Plan::peers).collect::<BTreeSet<_>>().into_iter().collect()
        };
        match self {
            Self::Alone => Ranks::new(),
            Self::Exchange | Self::Views => calling.others().collect(),
            Self::Doubling => barrier::peers(calling),
            Self::Plan(plan) => of_plans(slice::from_ref(plan)),
            Self::OverHosts(plans) => of_plans(plans),
        }
    }
}

impl Combination<'_> {
    /// The way of the values of a call, which have `bytes` bytes.
    pub(super) fn way(&self, calling: &Calling, bytes: usize, algorithm: Algorithm, counts: &[usize]) -> Way {
        let (rank, size, count) = (calling.rank(), calling.size(), bytes / self.width.max(1));
        let segment = schedule::SEGMENT_BYTES / self.width.max(1);
        let plan = match calling.call.kind {
            // Wrong arguments make no plan.
            _ if size == 1 || calling.is_refused() => return Way::Alone,
            CallKind::Reduce => {
                schedule::reduce_plan(rank, size, count, self.width, calling.root(), self.rounds_once())
            }
            CallKind::ReduceScatter if self.rounds_once() => {
                schedule::direct::reduce_scatter(rank, size, counts, segment)
            }
            CallKind::ReduceScatter => schedule::ring::reduce_scatter(rank, size, counts),
            _ => match algorithm {
                Algorithm::Exchange => return Way::Exchange,
                Algorithm::Views => return Way::Views,
                Algorithm::Doubling => return Way::Doubling,
                Algorithm::Hierarchical if self.rounds_once() => {
                    let segment = schedule::SEGMENT_BYTES / size_of::<f32>();
                    let hosts = calling.hosts();
                    return Way::OverHosts(schedule::hierarchical::combine_and_collect(
                        rank, hosts, count, segment,
                    ));
                }
                _ => {
                    let hosts = calling.hosts();
                    let plan = schedule::plan(algorithm, rank, hosts, count, self.width, self.rounds_once());
                    plan.unwrap_or_default()
                }
            },
        };
        Way::Plan(plan)
    }

    /// Combines `bytes` of all ranks in place.
    pub(super) async fn follow(
        &self,
        calling: &Calling,
        way: &Way,
        bytes: &mut [u8],
    ) -> Result<(), GroupError> {
        match way {
            Way::Alone => {
                self.reduction.finish(self.dtype, bytes, 1);
                Ok(())
            }
            Way::Exchange if calling.is_short(bytes.len()) => self.exchange_short(calling, bytes).await,
            // Boxed: moving a future large enough for these would take longer than a short call.
            Way::Exchange => Box::pin(self.exchange_long(calling, bytes)).await,
            Way::Views => Box::pin(views::all_reduce(calling, self, bytes)).await,
            Way::Doubling => Box::pin(self.double(calling, bytes)).await,
            Way::Plan(plan) => Box::pin(self.by_plan(calling, plan, bytes)).await,
            Way::OverHosts(plans) => Box::pin(self.over_hosts(calling, plans, bytes)).await,
        }
    }

    async fn exchange_long(&self, calling: &Calling, bytes: &mut [u8]) -> Result<(), GroupError> {
        if calling.is_on_one_host() {
            let own = calling.message(bytes).await?;
            return views::exchange(calling, self, own, bytes).await;
        }
        exchange(calling, self, None, bytes).await
    }

    async fn by_plan(&self, calling: &Calling, plan: &Plan, bytes: &mut [u8]) -> Result<(), GroupError> {
        run(calling, self, plan, bytes).await?;
        // Those that are rounded once were divided before.
        if !self.rounds_once() {
            self.reduction.finish(self.dtype, bytes, calling.size());
        }
        Ok(())
    }

    /// [`Algorithm::Hierarchical`] for elements that are rounded once: 32-bit floats until all are combined.
    async fn over_hosts(
        &self,
        calling: &Calling,
        [combine, collect]: &[Plan; 2],
        bytes: &mut [u8],
    ) -> Result<(), GroupError> {
        let count = bytes.len() / self.width;
        let (mut wide, combination) = (calling.buffer(count * size_of::<f32>()).await?, self.wide());
        self.reduction.widen(self.dtype, &mut wide, &[bytes]);
        run(calling, &combination, combine, &mut wide).await?;
        self.reduction.narrow(self.dtype, bytes, &wide, calling.size());
        run(calling, self, collect, bytes).await
    }

    /// Combines by [doubling](schedule::rounds). Elements that are rounded once are 32-bit floats until all are combined.
    async fn double(&self, calling: &Calling, bytes: &mut [u8]) -> Result<(), GroupError> {
        if !self.rounds_once() {
            self.double_in(calling, bytes).await?;
            self.reduction.finish(self.dtype, bytes, calling.size());
            return Ok(());
        }
        let mut wide = SmallVec::<[u8; 256]>::from_elem(0, bytes.len() / self.width * size_of::<f32>());
        self.reduction.widen(self.dtype, &mut wide, &[bytes]);
        self.wide().double_in(calling, &mut wide).await?;
        self.reduction.narrow(self.dtype, bytes, &wide, calling.size());
        Ok(())
    }

    /// As [`double`](Self::double), in the precision of the elements, and without the division of a mean.
    async fn double_in(&self, calling: &Calling, bytes: &mut [u8]) -> Result<(), GroupError> {
        for round in calling.rounds() {
            if round.sends() {
                calling.send(round.with, bytes).await?;
            }
            if round.turn == Turn::Send {
                continue;
            }
            let arrived = calling.receive(round.with, bytes.len()).await?;
            match round.turn {
                Turn::ExchangeHigher => self.reduction.fold(self.dtype, bytes, arrived.bytes())?,
                Turn::ReceiveResult => replace(true, bytes, arrived.bytes()),
                _ => {
                    let own: SmallVec<[u8; 256]> = SmallVec::from_slice(bytes);
                    self.reduction.fold_into(self.dtype, bytes, arrived.bytes(), &own)?;
                }
            }
        }
        Ok(())
    }

    /// As [`exchange`], with the elements in the message of the call header.
    async fn exchange_short(&self, calling: &Calling, bytes: &mut [u8]) -> Result<(), GroupError> {
        for to in calling.others() {
            calling.send_short(to, bytes).await?;
        }
        if calling.size() == 2 {
            let arrived = calling.receive_short(1 - calling.rank(), bytes.len()).await?;
            return self.combine(calling, bytes, &[arrived]);
        }
        let receives = calling.others().map(|from| calling.receive_short(from, bytes.len()));
        let arrived = try_join_all(receives).await?;
        self.combine(calling, bytes, &arrived)
    }

    /// Combines the own elements with those that have `arrived` from the others, in the order of the ranks.
    fn combine(&self, calling: &Calling, bytes: &mut [u8], arrived: &[Arrived]) -> Result<(), GroupError> {
        let own: SmallVec<[u8; 64]> = SmallVec::from_slice(bytes);
        let inputs = in_order_of_ranks(calling, &own, arrived, 0..own.len());
        self.fold_all(bytes, &inputs)
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
