//! Offers of calls that are complete on this rank, and may not be on others.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tensorwire_rendezvous::Offer;

/// The last offer of each call that another rank may still have to read.
#[derive(Debug)]
pub(crate) struct KeptOffers(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    /// With the number of the call.
    offers: Vec<(u64, Offer)>,
    /// For each rank, the number below which all its calls are complete, as far as it has said.
    complete: Vec<u64>,
}

impl KeptOffers {
    /// For rank `rank` of `size` ranks.
    pub(super) fn new(rank: usize, size: usize) -> Self {
        let complete = (0..size).map(|at| if at == rank { u64::MAX } else { 0 }).collect();
        Self(Mutex::new(Kept { offers: Vec::new(), complete }))
    }

    /// Keeps an offer until all other ranks have said that call `number` is complete.
    pub(crate) fn keep(&self, number: u64, offer: Offer) {
        self.lock().offers.push((number, offer));
    }

    /// All calls of `rank` below `number` are complete.
    pub(crate) fn are_complete(&self, rank: usize, number: u64) {
        let mut kept = self.lock();
        let Kept { offers, complete } = &mut *kept;
        if let Some(known) = complete.get_mut(rank) {
            *known = number.max(*known);
        }
        let below = complete.iter().copied().min().unwrap_or_default();
        // Calls may be completed in any order.
        let ended: Vec<_> = offers.extract_if(.., |(number, _)| *number < below).collect();
        drop(kept);
        // Without the lock: ending an offer may wake tasks.
        drop(ended);
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
