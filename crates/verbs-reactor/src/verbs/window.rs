//! Memory windows of type 2: each lets the peer of one queue pair write one range.

use std::{
    collections::BTreeMap,
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    FabricError, FabricKind, QueuePairCore, RegionId, RemoteRegion, SlotKey, WindowBinding, WorkRequest,
};

use super::{
    ProtectionDomain, VerbsError,
    error::{fabric_error, pointer, zero},
    pending::{Direction, LocalRange, Pending},
    region::MemoryRegion,
    registrations::Registrations,
    sys,
};

/// Of a window's key, the part that changes from bind to bind; the rest names the window.
const CHANGING: u32 = 0xFF;

/// Something of the library's that a work request points at.
pub(super) struct Handle<T>(NonNull<T>);

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for Handle<T> {}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: it is an address only; whoever uses it argues that what is there is alive.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    pub(super) fn new(at: NonNull<T>) -> Self {
        Self(at)
    }

    pub(super) fn as_ptr(self) -> *mut T {
        self.0.as_ptr()
    }
}

/// What a bind needs besides the range's address and the window's new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bind {
    pub(super) window: Handle<sys::ibv_mw>,
    /// Where the range is registered.
    pub(super) region: Handle<sys::ibv_mr>,
    pub(super) length: u64,
}

/// A window of the device, bound or not. Dropping it ends what it allows.
struct MemoryWindow {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<sys::ibv_mw>,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    fn new(domain: Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_alloc_mw";
        let context = domain.context();
        let raw = match context.operations().alloc_mw {
            // SAFETY: the domain is alive.
            Some(allocate) => unsafe { allocate(domain.raw(), sys::IBV_MW_TYPE_2) },
            None => std::ptr::null_mut(),
        };
        let raw = pointer(raw, CALL, context.name())?;
        Ok(Self { domain, raw })
    }

    /// Its latest key.
    fn key(&self) -> u32 {
        // SAFETY: the window lives while `self` does, and only `set_key` changes it.
        unsafe { self.raw.as_ref().rkey }
    }

    /// Notes the key that it was bound with last, which the next bind must name.
    fn set_key(&mut self, key: u32) {
        // SAFETY: as in `key`; the library reads it while a bind is posted, and none is: the window is free.
        unsafe { self.raw.as_mut().rkey = key };
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        let context = self.domain.context();
        let Some(free) = context.operations().dealloc_mw else { return };
        // SAFETY: the window is ours. It is free, or its queue pair takes no more work, so no request that is still to
        // be posted points at it.
        let result = unsafe { free(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_dealloc_mw", context.name()) {
            tracing::warn!(%error, "a memory window is leaked");
        }
    }
}

/// In this order: a window goes before the region that it is over, and that before its memory is unmapped.
struct Bound {
    window: MemoryWindow,
    region: Arc<MemoryRegion>,
    binding: WindowBinding,
    key: u32,
}

/// The windows of one queue pair. They must be gone before it is destroyed.
#[derive(Default)]
pub(super) struct Windows {
    state: Mutex<State>,
    /// How many are bound.
    bound: AtomicUsize,
}

#[derive(Default)]
struct State {
    bound: BTreeMap<RegionId, Bound>,
    /// Kept for the next bind: making one takes a system call.
    free: Vec<MemoryWindow>,
    /// Binds so far.
    count: u32,
    is_over: bool,
}

impl std::fmt::Debug for Windows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Windows").field("bound", &self.bound).finish_non_exhaustive()
    }
}

impl Windows {
    /// What to post for `request`, if that is about a window.
    pub(super) fn pending(
        &self,
        slot: SlotKey,
        request: &WorkRequest,
        domain: &Registrations,
    ) -> Option<Result<Pending, FabricError>> {
        match request {
            WorkRequest::Bind { window } => Some(self.bind(slot, window, domain)),
            WorkRequest::Unbind { window } => Some(self.unbind(slot, window)),
            _ => None,
        }
    }

    fn bind(
        &self,
        slot: SlotKey,
        binding: &WindowBinding,
        domain: &Registrations,
    ) -> Result<Pending, FabricError> {
        let (kind, block) = (FabricKind::Verbs, binding.block().id().get());
        let (protection, region) =
            domain.bindable(binding.block()).ok_or(FabricError::NotBindable { kind, block })?;
        let mut state = self.lock();
        if state.is_over {
            return Err(FabricError::Closed);
        }
        let window = match state.free.pop() {
            Some(window) => window,
            None => MemoryWindow::new(protection).map_err(|error| fabric_error(&error))?,
        };
        let key = next_key(window.key(), domain.random());
        let base = binding.block().base().as_ptr() as u64 + binding.offset();
        let (id, generation) = (WindowBinding::region_id(state.count), domain.generation());
        state.count = state.count.wrapping_add(1);
        binding.set_region(RemoteRegion { region: id, generation, base, length: binding.length(), key });
        let bind =
            Bind { window: Handle::new(window.raw), region: region.handle(), length: binding.length() };
        state.bound.insert(id, Bound { window, region, binding: binding.clone(), key });
        self.bound.store(state.bound.len(), Ordering::Relaxed);
        Ok(work_request(slot, Direction::Bind(bind), base, key))
    }

    fn unbind(&self, slot: SlotKey, binding: &WindowBinding) -> Result<Pending, FabricError> {
        let key = binding.region().and_then(|region| Some(self.lock().bound.get(&region.region)?.key));
        Ok(work_request(slot, Direction::Unbind, 0, key.ok_or(FabricError::Closed)?))
    }

    /// The operation in `slot` is done: if it was the end of a window, that is free now.
    pub(super) fn done(&self, core: &QueuePairCore, slot: SlotKey) {
        // Before looking: most queue pairs have none.
        if self.bound.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Some(WorkRequest::Unbind { window }) = core.slots().request(slot) else { return };
        let Some(region) = window.region() else { return };
        let mut state = self.lock();
        let ended = state.bound.remove(&region.region);
        let Some(Bound { mut window, region, binding, key }) = ended else { return };
        self.bound.store(state.bound.len(), Ordering::Relaxed);
        window.set_key(key);
        state.free.push(window);
        drop(state);
        // Without the lock, and in this order: they may be the last uses of both.
        drop(region);
        drop(binding);
    }

    /// The queue pair takes no more work: all windows go.
    pub(super) fn end_all(&self) {
        let (bound, free) = {
            let mut state = self.lock();
            state.is_over = true;
            self.bound.store(0, Ordering::Relaxed);
            (std::mem::take(&mut state.bound), std::mem::take(&mut state.free))
        };
        drop(bound);
        drop(free);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A work request without bytes.
fn work_request(key: SlotKey, direction: Direction, remote: u64, remote_key: u32) -> Pending {
    Pending {
        key,
        direction,
        local: LocalRange { address: 0, length: 0, key: 0 },
        gathered: Vec::new(),
        remote,
        remote_key,
        length: 0,
        immediate: None,
        earlier: 0,
        is_last: true,
        posted: 0,
    }
}

/// Another key of the same window.
fn next_key(key: u32, random: u64) -> u32 {
    // 1 to 255 further on.
    let step = (random % u64::from(CHANGING)) as u32 + 1;
    (key & !CHANGING) | (key.wrapping_add(step) & CHANGING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_key_is_another_of_the_same_window() {
        for key in [0, 0xFF, 0x1234_5678, u32::MAX] {
            let mut next: Vec<u32> = (0..1000).map(|random| next_key(key, random)).collect();
            next.sort_unstable();
            next.dedup();
            assert_eq!(next.len(), 255);
            assert!(next.iter().all(|next| next >> 8 == key >> 8 && *next != key));
        }
    }
}
