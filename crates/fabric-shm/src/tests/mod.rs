//! Tests of internals: layouts, imports, and neighbours that break every rule they can.

mod driving;
mod gathering;
mod helping;
mod hostile;
mod lending;
mod page_set;
mod parts;
mod posting;
mod reading;

use std::os::fd::OwnedFd;

use tensorwire_fabric::{FabricError, Look, Patience, Spinner, Wait};

use super::rig::{IMPORTED_BYTES_MAX, LEASES, Rig, memfd_of_sevens, on_a_runtime, sealed_block};

impl Rig {
    fn patience(&self, wait: Wait) -> Patience {
        Patience::new(Spinner::new(wait), self.runtime.clone())
    }

    /// The reason of the end of the connection, which must be over.
    fn failure(&self) -> FabricError {
        assert_eq!(self.settle(), Look::Over);
        assert_ne!(self.sees.closed(), 0, "the attacker is not told");
        self.victim.failure().expect("the connection has failed")
    }
}

/// How often an eventfd was rung since the last call.
fn rings(bell: &OwnedFd) -> u64 {
    use std::os::fd::AsRawFd;
    let mut count = [0; 8];
    // SAFETY: `count` is writable for its length.
    let read = unsafe { libc::read(bell.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
    if read == 8 { u64::from_ne_bytes(count) } else { 0 }
}
