//! Offers of calls that are complete on this rank, and may not be on others.

use std::{
    iter,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tensorwire_rendezvous::Offer;

/// The last offer of each call that another rank may still have to read, at most one for each lane.
#[derive(Debug)]
pub(crate) struct LastOffers(Mutex<State>);

#[derive(Debug)]
struct State {
    /// For each lane, with the number of the call.
    offers: Vec<Option<(u64, Offer)>>,
    /// For each rank, the number below which all its calls are complete, as far as it has said.
    complete: Vec<u64>,
}

impl LastOffers {
    /// For rank `rank` of `size` ranks, whose calls have `lanes` lanes.
    pub(super) fn new(rank: usize, size: usize, lanes: usize) -> Self {
        let complete = (0..size).map(|at| if at == rank { u64::MAX } else { 0 }).collect();
        Self(Mutex::new(State { offers: iter::repeat_with(|| None).take(lanes).collect(), complete }))
    }

    /// Keeps an offer of call `number` until all other ranks have said that this call is complete. Ends that of the lane's call
    /// before: all ranks have begun this one.
    pub(crate) fn keep(&self, number: u64, offer: Offer) {
        let mut state = self.lock();
        let lane = (number % state.offers.len() as u64) as usize;
        let before = state.offers.get_mut(lane).map(|place| place.replace((number, offer)));
        drop(state);
        // Without the lock: ending an offer may wake tasks.
        drop(before);
    }

    /// All calls of `rank` below `number` are complete.
    pub(crate) fn are_complete(&self, rank: usize, number: u64) {
        let mut state = self.lock();
        let State { offers, complete } = &mut *state;
        if let Some(known) = complete.get_mut(rank) {
            *known = number.max(*known);
        }
        let below = complete.iter().copied().min().unwrap_or_default();
        let ended = offers.iter_mut().map(|place| place.take_if(|(number, _)| *number < below));
        let ended: Vec<_> = ended.flatten().collect();
        drop(state);
        drop(ended);
    }

    /// Takes out all of them.
    pub(super) fn take(&self) -> Vec<Offer> {
        let offers: Vec<_> = self.lock().offers.iter_mut().filter_map(Option::take).collect();
        offers.into_iter().map(|(_, offer)| offer).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
