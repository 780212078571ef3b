//! The names of [offers](crate::Offer).
//!
//! An offered tensor is published under a name that belongs to one offer at a time. A name that is free again stays published, with
//! nothing, because it has a place in the catalogue that neighbours read: so offers need few places.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The beginning of the names. Users can publish nothing under them.
const PREFIX: &str = "tensorwire offer ";

/// The name of an offer with this number.
pub(crate) fn name_of(number: u32) -> String {
    format!("{PREFIX}{number}")
}

/// Whether offers have such a name.
pub(crate) fn is_offer(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The numbers of a worker's offers.
#[derive(Debug, Default)]
pub(crate) struct OfferNumbers(Mutex<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    free: Vec<u32>,
    /// How many were ever given.
    given: u32,
}

impl OfferNumbers {
    /// The number that became free last, whose name is in the processor's cache, or a new one.
    pub(crate) fn take(&self) -> u32 {
        let mut numbers = self.lock();
        numbers.free.pop().unwrap_or_else(|| {
            numbers.given += 1;
            numbers.given - 1
        })
    }

    /// Nothing is offered under the number any more.
    pub(crate) fn give_back(&self, number: u32) {
        self.lock().free.push(number);
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
