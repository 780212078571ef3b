//! The tensors that a worker [offers](crate::Offer).
//!
//! An offer has a cell, which the next one has again, and an edition, which no other has. Neighbours read the cell in the catalogue by
//! its number; other peers request it.

use std::sync::{Arc, MutexGuard, PoisonError};

use tensorwire_fabric::Catalogue;
use tensorwire_protocol::Offered;
use tensorwire_testpoints::sync::Mutex;

use crate::values::{
    catalogue::{Listing, OwnCatalogue},
    published::Edition,
    tensor::Tensor,
};

/// The offers of a worker.
#[derive(Debug)]
pub(crate) struct Offers {
    /// The incarnation of the worker.
    incarnation: u64,
    /// Written with `cells` locked.
    catalogue: OwnCatalogue,
    cells: Mutex<Cells>,
}

#[derive(Debug, Default)]
struct Cells {
    offered: Vec<Option<Edition>>,
    /// The cells without an offer. The last one was used last, so that it is in the processor's cache.
    free: Vec<u32>,
    editions: u64,
}

impl Cells {
    fn edition(&mut self, cell: u32) -> Option<&mut Option<Edition>> {
        self.offered.get_mut(cell as usize)
    }

    fn free_cell(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.offered.push(None);
            (self.offered.len() - 1) as u32
        })
    }
}

impl Offers {
    pub(crate) fn new(incarnation: u64) -> Self {
        Self { incarnation, catalogue: OwnCatalogue::default(), cells: Mutex::default() }
    }

    /// Offers `tensor`, until [`end`](Self::end).
    pub(crate) fn begin(&self, tensor: Tensor) -> Offered {
        let mut cells = self.lock();
        let cell = cells.free_cell();
        cells.editions += 1;
        let mut edition = Edition::unnamed(cells.editions, tensor, Listing::Unlisted);
        let offered = Offered { incarnation: self.incarnation, edition: edition.version, cell };
        let unlisted = self.catalogue.get().map(|own| edition.enter(own, own.nameless_cell(cell)));
        if let Some(place) = cells.edition(cell) {
            *place = Some(edition);
        }
        drop(cells);
        drop(unlisted);
        offered
    }

    /// Ends the offer in `cell`.
    pub(crate) fn end(&self, cell: u32) {
        let mut cells = self.lock();
        let Some(edition) = cells.edition(cell).and_then(Option::take) else { return };
        let unlisted = edition.listing.cell().map(|place| self.catalogue.write(place, None));
        cells.free.push(cell);
        drop(cells);
        // Without the lock: the last drop of a tensor frees memory of a pool, which may wake tasks.
        drop((edition, unlisted));
    }

    /// The offer, until it ends. Any numbers may be asked for.
    pub(crate) fn get(&self, offered: Offered) -> Option<Edition> {
        let edition = self.lock().edition(offered.cell)?.clone()?;
        (offered.incarnation == self.incarnation && offered.edition == edition.version).then_some(edition)
    }

    /// Lists what is offered in `cell` in the catalogue that neighbours read, if it has room and `catalogue` is that one. Later offers
    /// are listed when they begin.
    pub(crate) fn list(&self, cell: u32, catalogue: &Arc<dyn Catalogue>) {
        let mut cells = self.lock();
        let Some(own) = self.catalogue.get_or_set(catalogue) else { return };
        let Some(edition) = cells.edition(cell).and_then(Option::as_mut) else { return };
        if edition.listing != Listing::Unlisted {
            return;
        }
        let unlisted = edition.enter(own, own.nameless_cell(cell));
        drop(cells);
        drop(unlisted);
    }

    fn lock(&self) -> MutexGuard<'_, Cells> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
