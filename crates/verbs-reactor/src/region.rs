//! Memory that is registered with a device.

use std::{mem, ptr::NonNull, sync::Arc};

use tensorwire_fabric::Access;
use tensorwire_memory::Block;

use super::{
    ProtectionDomain, VerbsError,
    error::{pointer, zero},
    sys,
};

/// A memory region of the device. Dropping it deregisters the memory.
pub(crate) struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<sys::ibv_mr>,
    block: Block,
}

// SAFETY: as for `Context`: the library's functions may be called from any thread. The keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above: shared access only reads the keys.
unsafe impl Sync for MemoryRegion {}

impl std::fmt::Debug for MemoryRegion {
    /// Without the keys: they give a peer access, and are never logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegion").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl MemoryRegion {
    /// Registers all of `block`. The kernel pins it unless it is paged `on_demand`. This side can always write from it, and can read into it
    /// if this process may write it. `access` has the rights of peers.
    ///
    /// # Safety
    /// With [`Access::remote_write`], peers that know the key may write it at any time, so that no reference to it may exist while they can.
    ///
    /// # Errors
    /// [`VerbsError::Call`], typically for the limit on locked memory.
    pub(crate) unsafe fn register(
        domain: Arc<ProtectionDomain>,
        block: &Block,
        access: Access,
        on_demand: bool,
    ) -> Result<Self, VerbsError> {
        let (context, base, length) = (domain.context(), block.base(), block.length());
        let flag = |granted: bool, flag: sys::ibv_access_flags| if granted { flag } else { 0 };
        // A user's memory may be mapped read-only. The library demands local write for remote write.
        let flags = flag(block.is_writable() || access.remote_write, sys::IBV_ACCESS_LOCAL_WRITE)
            | flag(access.remote_write, sys::IBV_ACCESS_REMOTE_WRITE)
            | flag(access.remote_read, sys::IBV_ACCESS_REMOTE_READ)
            | flag(on_demand, sys::IBV_ACCESS_ON_DEMAND);
        let flags = flags.cast_signed();
        // SAFETY: the domain is alive, because an `Arc` of it is held, and the memory stays mapped while the region has the block. The
        // caller guarantees the rest.
        let raw =
            unsafe { context.functions().ibv_reg_mr(domain.raw(), base.as_ptr().cast(), length, flags) };
        let raw = pointer(raw, "ibv_reg_mr", context.name())?;
        Ok(Self { domain, raw, block: block.clone() })
    }

    /// The key of the region in this side's work requests.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region is registered while `self` lives, and the library does not change its keys.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key of the region in a peer's work requests. It gives access, so it is never logged.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region is registered while `self` lives, and the library does not change its keys.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: this value owns the region, and nothing uses it after the drop. A work request that still names its
        // key fails at the device; the slot of such a request keeps the memory alive.
        let result = unsafe { self.domain.context().functions().ibv_dereg_mr(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_dereg_mr", self.domain.context().name()) {
            log!(WARN, %error, "cannot deregister a memory region: it stays registered, and its memory is not used again");
            // Peers may still write it.
            mem::forget(self.block.clone());
        }
    }
}
