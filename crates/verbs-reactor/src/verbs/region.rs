//! Registered memory.

use std::{ptr::NonNull, sync::Arc};

use crate::Access;

use super::{
    ProtectionDomain, VerbsError,
    error::{pointer, zero},
    sys,
};

/// Memory the device may use, until this is dropped.
pub(crate) struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<sys::ibv_mr>,
}

// SAFETY: as for `Context`; the keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl std::fmt::Debug for MemoryRegion {
    /// Without the keys: they let a peer in.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegion").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl MemoryRegion {
    /// Registers `length` bytes from `base`. The kernel pins them, unless they are to be paged `on_demand`. The device may
    /// always read them for this side, and write what this side reads of a peer into them if they are `writable`. Peers
    /// may do what `access` says.
    ///
    /// # Safety
    /// The range must stay mapped while the region lives. With [`Access::remote_write`], peers that know the key write
    /// it at any time: nobody here may hold a reference that says otherwise.
    ///
    /// # Errors
    /// [`VerbsError::Call`], typically for the limit on locked memory.
    pub(crate) unsafe fn register(
        domain: Arc<ProtectionDomain>,
        base: NonNull<u8>,
        length: usize,
        access: Access,
        writable: bool,
        on_demand: bool,
    ) -> Result<Self, VerbsError> {
        let context = domain.context();
        let flag = |granted: bool, flag: sys::ibv_access_flags| if granted { flag } else { 0 };
        // Writes by peers demand that the device may write at all.
        let flags = flag(writable || access.remote_write, sys::IBV_ACCESS_LOCAL_WRITE)
            | flag(access.remote_write, sys::IBV_ACCESS_REMOTE_WRITE)
            | flag(access.remote_read, sys::IBV_ACCESS_REMOTE_READ)
            | flag(on_demand, sys::IBV_ACCESS_ON_DEMAND);
        let flags = flags.cast_signed();
        // SAFETY: the domain is alive, and the caller vouches for the range.
        let raw =
            unsafe { context.functions().ibv_reg_mr(domain.raw(), base.as_ptr().cast(), length, flags) };
        let raw = pointer(raw, "ibv_reg_mr", context.name())?;
        Ok(Self { domain, raw })
    }

    /// Names the region in this side's work requests.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region is registered while `self` lives, and the library does not change its keys.
        unsafe { self.raw.as_ref().lkey }
    }

    /// Names the region in a peer's work requests. Worth keeping from logs.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: as in `local_key`.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is ours, and work requests that use it are over: their slots keep it.
        let result = unsafe { self.domain.context().functions().ibv_dereg_mr(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_dereg_mr", self.domain.context().name()) {
            log!(WARN, %error, "cannot deregister a memory region: it stays registered");
        }
    }
}
