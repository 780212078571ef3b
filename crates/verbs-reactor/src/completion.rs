//! Completion queues and completions.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{
    Context, VerbsError,
    error::{pointer, refused, zero},
    sys,
    tag::Tag,
};

/// Events are acknowledged in groups of this many, because each acknowledgement takes a lock.
const ACKNOWLEDGE_AT: u32 = 256;

/// A finished work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkCompletion {
    /// The work request.
    pub(crate) tag: Tag,
    /// Its result.
    pub(crate) completion: Completion,
}

/// The result of a work request. After a failure, the device defines only the fields that [`Failed`](Self::Failed) has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// It was executed.
    Ok {
        /// The operation that was executed.
        done: Done,
    },
    /// It failed, and the queue pair takes no more work.
    Failed {
        /// The reason.
        status: Status,
        /// The device's own code.
        vendor: u32,
    },
}

/// The operation of a successful completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Done {
    /// A write, with or without immediate, was executed: the local bytes may be reused.
    Write,
    /// A message of this side was delivered.
    Send,
    /// The peer wrote with immediate.
    Written {
        /// Bytes of the work request that carried the immediate.
        bytes: u32,
        /// The immediate, in this machine's byte order.
        immediate: u32,
    },
    /// The peer sent a message with this immediate, or 0 if it had none.
    Message(u32),
    /// An opcode (`enum ibv_wc_opcode`) that this crate never posts.
    Other(u32),
}

/// Why a work request failed (`enum ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Status {
    /// The queue pair had failed before. The first status other than this one is the cause.
    Flushed,
    /// This side's request or memory was wrong.
    Local(u32),
    /// The peer refused the address, the key or the right.
    RemoteAccess,
    /// The peer refused the request for another reason.
    RemoteRefused(u32),
    /// The peer did not answer.
    RetryExceeded,
    /// The peer had no receive posted for an immediate.
    ReceiverNotReady,
    /// Anything else.
    Other(u32),
}

impl Status {
    fn parse(status: sys::ibv_wc_status) -> Self {
        match status {
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            sys::IBV_WC_LOC_LEN_ERR
            | sys::IBV_WC_LOC_QP_OP_ERR
            | sys::IBV_WC_LOC_PROT_ERR
            | sys::IBV_WC_LOC_ACCESS_ERR
            | sys::IBV_WC_MW_BIND_ERR => Self::Local(status),
            sys::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_OP_ERR | sys::IBV_WC_REM_ABORT_ERR => {
                Self::RemoteRefused(status)
            }
            sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => Self::RetryExceeded,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            _ => Self::Other(status),
        }
    }
}

impl WorkCompletion {
    fn parse(raw: &sys::ibv_wc) -> Self {
        let completion = if raw.status == sys::IBV_WC_SUCCESS {
            Completion::Ok { done: Done::parse(raw) }
        } else {
            Completion::Failed { status: Status::parse(raw.status), vendor: raw.vendor_err }
        };
        Self { tag: Tag::from_bits(raw.wr_id), completion }
    }
}

impl Done {
    /// Called only for a completion with status success: the opcode is undefined after a failure.
    fn parse(raw: &sys::ibv_wc) -> Self {
        match raw.opcode {
            sys::IBV_WC_RDMA_WRITE => Self::Write,
            sys::IBV_WC_SEND => Self::Send,
            sys::IBV_WC_RECV_RDMA_WITH_IMM => {
                Self::Written { bytes: raw.byte_len, immediate: immediate(raw).unwrap_or(0) }
            }
            sys::IBV_WC_RECV => Self::Message(immediate(raw).unwrap_or(0)),
            other => Self::Other(other),
        }
    }
}

fn immediate(raw: &sys::ibv_wc) -> Option<u32> {
    // SAFETY: both members of the union are 32 plain bits.
    let value = u32::from_be(unsafe { raw.__bindgen_anon_1.imm_data });
    (raw.wc_flags & sys::IBV_WC_WITH_IMM != 0).then_some(value)
}

/// Up to [`Batch::SIZE`] completions, in the order in which the work ended.
pub(crate) struct Batch {
    raw: [MaybeUninit<sys::ibv_wc>; Batch::SIZE],
    count: usize,
}

impl Batch {
    /// The most completions that it holds.
    pub(crate) const SIZE: usize = 16;

    pub(crate) fn new() -> Self {
        Self { raw: [const { MaybeUninit::uninit() }; Self::SIZE], count: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = WorkCompletion> {
        // SAFETY: `CompletionQueue::poll` sets `count` to the number of entries that the library filled. Fields that it
        // leaves unset after a failure are not read by `parse`.
        let filled = self.raw.iter().take(self.count).map(|raw| unsafe { raw.assume_init_ref() });
        filled.map(WorkCompletion::parse)
    }
}

/// A completion queue with a channel of its own. After [`arm`](Self::arm), the channel's descriptor becomes readable
/// when there is a completion. No other queue uses the channel, so that it has at most one event.
///
/// To sleep without losing a wake-up: poll; arm; poll again; only then wait for the descriptor, and after that
/// call [`take_event`](Self::take_event).
pub(crate) struct CompletionQueue {
    context: Arc<Context>,
    channel: NonNull<sys::ibv_comp_channel>,
    raw: NonNull<sys::ibv_cq>,
    unacknowledged: AtomicU32,
}

// SAFETY: as for `Context`: the library's functions may be called from any thread, and it serialises polls itself.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above: concurrent calls are serialised by the library.
unsafe impl Sync for CompletionQueue {}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").field("context", &self.context).finish_non_exhaustive()
    }
}

impl CompletionQueue {
    /// A queue for at least `depth` completions.
    ///
    /// # Errors
    /// [`VerbsError::Call`], also when `depth` is over the device's limit.
    pub(crate) fn new(context: Arc<Context>, depth: u32) -> Result<Arc<Self>, VerbsError> {
        let channel = Channel::new(&context)?;
        let wanted = i32::try_from(depth).unwrap_or(i32::MAX);
        // SAFETY: context and channel are open, because both are borrowed here; no other pointer is passed.
        let raw = unsafe {
            context.functions().ibv_create_cq(context.raw(), wanted, ptr::null_mut(), channel.raw.as_ptr(), 0)
        };
        let raw = pointer(raw, "ibv_create_cq", context.name())?;
        let channel = channel.into_raw();
        Ok(Arc::new(Self { context, channel, raw, unacknowledged: AtomicU32::new(0) }))
    }

    /// Takes completions out of the queue, in order, as many as `batch` has room for. Its earlier content is dropped.
    ///
    /// # Errors
    /// [`VerbsError::Call`]: the queue is broken, typically because it overflowed.
    pub(crate) fn poll(&self, batch: &mut Batch) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_poll_cq";
        batch.count = 0;
        let Some(poll) = self.context.operations().poll_cq else {
            return Err(self.unsupported(CALL));
        };
        // SAFETY: the queue is alive while `self` is, and `batch` has room for `SIZE` completions.
        let count = unsafe { poll(self.raw(), Batch::SIZE as i32, batch.raw.as_mut_ptr().cast()) };
        batch.count = usize::try_from(count).map_err(|_| {
            refused(io::Error::from_raw_os_error(count.saturating_abs()), CALL, self.context.name())
        })?;
        tensorwire_testpoints::counted!("polls of completion queues", 1);
        Ok(())
    }

    /// Asks for one event at the next completion. The caller polls again after this, because a completion that arrived
    /// before the call makes no event.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub(crate) fn arm(&self) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_req_notify_cq";
        let Some(arm) = self.context.operations().req_notify_cq else {
            return Err(self.unsupported(CALL));
        };
        // SAFETY: the queue is alive while `self` is. 0: for every completion, not only for solicited ones.
        zero(unsafe { arm(self.raw(), 0) }, CALL, self.context.name())
    }

    /// Takes the event out of the channel, and returns whether there was one. After an event the queue is no longer
    /// armed.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub(crate) fn take_event(&self) -> Result<bool, VerbsError> {
        let (mut queue, mut user) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is alive while `self` is, its descriptor is non-blocking, and both pointers are writable.
        let result = unsafe {
            self.context.functions().ibv_get_cq_event(self.channel.as_ptr(), &raw mut queue, &raw mut user)
        };
        if result != 0 {
            let error = io::Error::last_os_error(); // unlike the others, this function returns -1 and sets errno
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
                _ => Err(refused(error, "ibv_get_cq_event", self.context.name())),
            };
        }
        if self.unacknowledged.fetch_add(1, Ordering::Relaxed) + 1 >= ACKNOWLEDGE_AT {
            self.acknowledge();
        }
        Ok(true)
    }

    /// The channel's descriptor, readable when there is an event. Closed when the queue is dropped.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor stays open while the channel lives, which is as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw.as_ptr()
    }

    fn acknowledge(&self) {
        let events = self.unacknowledged.swap(0, Ordering::Relaxed);
        if events > 0 {
            // SAFETY: that many events were taken from the channel for this queue and not yet acknowledged.
            unsafe { self.context.functions().ibv_ack_cq_events(self.raw(), events) };
        }
    }

    fn unsupported(&self, call: &'static str) -> VerbsError {
        refused(io::Error::from_raw_os_error(libc::EOPNOTSUPP), call, self.context.name())
    }
}

impl AsRawFd for CompletionQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().as_raw_fd()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.acknowledge(); // else the next call would wait for ever for the acknowledgement of these events
        // SAFETY: queue pairs hold an `Arc` of their completion queue, so none is left.
        let result = unsafe { self.context.functions().ibv_destroy_cq(self.raw()) };
        if let Err(error) = zero(result, "ibv_destroy_cq", self.context.name()) {
            log!(WARN, %error, "cannot destroy a completion queue: it is leaked");
        } else {
            drop(Channel { context: &self.context, raw: self.channel });
        }
    }
}

/// Destroys a channel on drop: if making its queue fails, or after its queue is destroyed.
struct Channel<'context> {
    context: &'context Context,
    raw: NonNull<sys::ibv_comp_channel>,
}

impl<'context> Channel<'context> {
    fn new(context: &'context Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open while it is borrowed.
        let raw = unsafe { context.functions().ibv_create_comp_channel(context.raw()) };
        let channel = Self { context, raw: pointer(raw, "ibv_create_comp_channel", context.name())? };
        // SAFETY: the channel was just made, and `channel` owns it.
        set_nonblocking(unsafe { channel.raw.as_ref().fd })
            .map_err(|error| refused(error, "fcntl", context.name()))?;
        Ok(channel)
    }

    fn into_raw(self) -> NonNull<sys::ibv_comp_channel> {
        let raw = self.raw;
        std::mem::forget(self);
        raw
    }
}

impl Drop for Channel<'_> {
    fn drop(&mut self) {
        // SAFETY: this value owns the channel, and no queue uses it: its queue was never made, or is destroyed.
        let result = unsafe { self.context.functions().ibv_destroy_comp_channel(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_destroy_comp_channel", self.context.name()) {
            log!(WARN, %error, "cannot destroy a completion channel: it is leaked");
        }
    }
}

pub(super) fn set_nonblocking(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: no pointers are involved.
    let done = unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFL);
        flags >= 0 && libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(status: sys::ibv_wc_status, opcode: sys::ibv_wc_opcode) -> sys::ibv_wc {
        sys::ibv_wc {
            wr_id: Tag::Receive.to_bits(),
            status,
            opcode,
            vendor_err: 129,
            byte_len: 64,
            __bindgen_anon_1: sys::ibv_wc__bindgen_ty_1 { imm_data: 0xFFFF_FFFE_u32.to_be() },
            qp_num: 17,
            src_qp: 0,
            wc_flags: sys::IBV_WC_WITH_IMM,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        }
    }

    #[test]
    fn an_arrival_carries_the_immediate_in_host_order() {
        let completion = WorkCompletion::parse(&raw(sys::IBV_WC_SUCCESS, sys::IBV_WC_RECV_RDMA_WITH_IMM));
        let done = Done::Written { bytes: 64, immediate: 0xFFFF_FFFE };
        assert_eq!(completion.completion, Completion::Ok { done });
        assert_eq!(completion.tag, Tag::Receive);
    }

    #[test]
    fn a_message_is_told_from_a_write() {
        let completion = WorkCompletion::parse(&raw(sys::IBV_WC_SUCCESS, sys::IBV_WC_RECV));
        assert_eq!(completion.completion, Completion::Ok { done: Done::Message(0xFFFF_FFFE) });
    }

    #[test]
    fn a_failure_says_nothing_of_the_operation() {
        for opcode in [sys::IBV_WC_RECV_RDMA_WITH_IMM, sys::IBV_WC_RDMA_WRITE, 0xDEAD] {
            let completion = WorkCompletion::parse(&raw(sys::IBV_WC_WR_FLUSH_ERR, opcode));
            assert_eq!(completion.completion, Completion::Failed { status: Status::Flushed, vendor: 129 });
        }
    }

    #[test]
    fn causes_of_failure_are_told_apart() {
        for (raw, parsed) in [
            (sys::IBV_WC_RETRY_EXC_ERR, Status::RetryExceeded),
            (sys::IBV_WC_RNR_RETRY_EXC_ERR, Status::ReceiverNotReady),
            (sys::IBV_WC_REM_ACCESS_ERR, Status::RemoteAccess),
            (sys::IBV_WC_REM_OP_ERR, Status::RemoteRefused(sys::IBV_WC_REM_OP_ERR)),
            (sys::IBV_WC_LOC_PROT_ERR, Status::Local(sys::IBV_WC_LOC_PROT_ERR)),
            (sys::IBV_WC_FATAL_ERR, Status::Other(sys::IBV_WC_FATAL_ERR)),
            (0xFFFF, Status::Other(0xFFFF)),
        ] {
            assert_eq!(Status::parse(raw), parsed);
        }
    }
}
