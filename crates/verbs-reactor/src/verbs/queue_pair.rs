//! Reliable connected queue pairs, as libibverbs has them.

use std::{
    io,
    mem::MaybeUninit,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    Counters, Endpoint, LinkLayer, ProtectionDomain, Timing, VerbsError,
    completion::CompletionQueue,
    error::{pointer, refused, zero},
    message::Message,
    sys,
    tag::Tag,
};

/// Work requests handed over in one call.
pub(crate) const BATCH: usize = 16;

/// Up to this many bytes travel inside the work request, which saves the device one read of memory.
const INLINE_BYTES: u32 = 64;

/// One one-sided write. The device splits it into packets, nobody splits it further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Write {
    /// First byte here.
    pub(crate) local: u64,
    pub(crate) local_key: u32,
    pub(crate) length: u32,
    /// First byte there.
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
    pub(crate) immediate: Option<u32>,
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Write(Write),
    /// A message of no bytes, told from a write with immediate by how it arrives.
    Message(Message),
}

/// A work request and whom its completion belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) tag: Tag,
    pub(super) work: Work,
}

/// Not all of a batch was taken.
#[derive(Debug)]
pub(crate) struct PostRefused {
    /// How many were.
    pub(crate) posted: usize,
    pub(crate) error: VerbsError,
}

/// A queue pair of the device. Dropping it ends whatever is outstanding, without completions.
pub(crate) struct RawQueuePair {
    domain: Arc<ProtectionDomain>,
    /// Keeps the queue that both directions complete into.
    _completions: Arc<CompletionQueue>,
    raw: NonNull<sys::ibv_qp>,
    inline_bytes: u32,
    counters: Arc<Counters>,
}

// SAFETY: as for `Context`; posting from several threads is the library's to serialise.
unsafe impl Send for RawQueuePair {}
// SAFETY: as above.
unsafe impl Sync for RawQueuePair {}

impl std::fmt::Debug for RawQueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawQueuePair").field("number", &self.number()).finish_non_exhaustive()
    }
}

impl RawQueuePair {
    /// A queue pair with room for that many work requests in each direction.
    pub(crate) fn new(
        domain: Arc<ProtectionDomain>,
        completions: Arc<CompletionQueue>,
        send_depth: u32,
        receive_depth: u32,
        counters: Arc<Counters>,
    ) -> Result<Self, VerbsError> {
        // SAFETY: all-zero bytes are a valid set of attributes: null pointers and numbers.
        let mut attributes: sys::ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        attributes.send_cq = completions.raw();
        attributes.recv_cq = completions.raw();
        attributes.qp_type = sys::IBV_QPT_RC;
        attributes.sq_sig_all = 1;
        attributes.cap = sys::ibv_qp_cap {
            max_send_wr: send_depth,
            max_recv_wr: receive_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE_BYTES,
        };
        let context = domain.context().clone();
        // SAFETY: domain and queue are alive, and `attributes` is valid for the call.
        let raw = unsafe { context.functions().ibv_create_qp(domain.raw(), &raw mut attributes) };
        let raw = pointer(raw, "ibv_create_qp", context.name())?;
        let inline_bytes = attributes.cap.max_inline_data.min(INLINE_BYTES);
        Ok(Self { domain, _completions: completions, raw, inline_bytes, counters })
    }

    /// Its number within the device.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives while `self` does, and its number never changes.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// RESET to INIT: receives may be posted, and peers may write.
    pub(crate) fn initialize(&self, port: u8) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_INIT;
        attributes.port_num = port;
        attributes.qp_access_flags = sys::IBV_ACCESS_REMOTE_WRITE;
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        self.modify(attributes, mask)
    }

    /// INIT to RTR (the peer's packets are taken) to RTS (ours may go). The kernel may look up the peer's link
    /// address meanwhile.
    pub(crate) fn connect(
        &self,
        here: &Endpoint,
        gid_index: u8,
        port: u8,
        peer: &Endpoint,
        timing: &Timing,
    ) -> Result<(), VerbsError> {
        self.ready_to_receive(here, gid_index, port, peer, timing)?;
        self.ready_to_send(here, timing)
    }

    fn ready_to_receive(
        &self,
        here: &Endpoint,
        gid_index: u8,
        port: u8,
        peer: &Endpoint,
        timing: &Timing,
    ) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_RTR;
        attributes.path_mtu = here.mtu.min(peer.mtu);
        attributes.dest_qp_num = peer.number;
        attributes.rq_psn = peer.sequence;
        attributes.max_dest_rd_atomic = 1;
        attributes.min_rnr_timer = timing.receiver_wait;
        attributes.ah_attr.port_num = port;
        attributes.ah_attr.dlid = peer.local_identifier;
        if here.link == LinkLayer::Ethernet {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid.raw = peer.gid.0;
            attributes.ah_attr.grh.sgid_index = gid_index;
            attributes.ah_attr.grh.hop_limit = 64;
        }
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify(attributes, mask)
    }

    fn ready_to_send(&self, here: &Endpoint, timing: &Timing) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_RTS;
        attributes.sq_psn = here.sequence;
        attributes.timeout = timing.acknowledgement;
        attributes.retry_cnt = timing.retries;
        attributes.rnr_retry = timing.receiver_retries;
        attributes.max_rd_atomic = 1;
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(attributes, mask)
    }

    /// To ERR: everything outstanding completes as flushed, and nothing of the peer is taken any more.
    pub(crate) fn fail(&self) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_ERR;
        self.modify(attributes, sys::IBV_QP_STATE)
    }

    /// Posts `count` receives without room for bytes: writes with immediate, and signals, take nothing else.
    pub(crate) fn post_receives(&self, count: usize) -> Result<(), PostRefused> {
        // SAFETY: all-zero bytes are a valid work request: null pointers and numbers.
        let blank: sys::ibv_recv_wr = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut batch = [sys::ibv_recv_wr { wr_id: Tag::Receive.to_bits(), ..blank }; BATCH];
        chain(&mut batch, |request| &mut request.next);
        let mut posted = 0;
        while posted < count {
            // The chain is entered so that just as many as are still missing follow.
            let first = BATCH.saturating_sub(count - posted);
            // SAFETY: the chain is valid from each of its members to its end, for the call.
            let taken = unsafe { self.post_receive_chain(&mut batch, first) };
            taken.map_err(|refused| PostRefused { posted: posted + refused.posted, ..refused })?;
            posted += BATCH - first;
        }
        Ok(())
    }

    /// # Safety
    /// `batch` is chained to its end.
    unsafe fn post_receive_chain(
        &self,
        batch: &mut [sys::ibv_recv_wr; BATCH],
        first: usize,
    ) -> Result<(), PostRefused> {
        const CALL: &str = "ibv_post_recv";
        let Some(post) = self.domain.context().operations().post_recv else {
            return Err(self.unsupported(CALL));
        };
        self.counters.posted_receives();
        let start = batch.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: `first` is inside the batch; the queue pair is alive, and the library copies the requests.
        let (result, first) = unsafe {
            let first = start.add(first.min(BATCH - 1));
            (post(self.raw.as_ptr(), first, &raw mut bad), first)
        };
        let posted = (bad as usize).saturating_sub(first as usize) / size_of::<sys::ibv_recv_wr>();
        zero(result, CALL, self.domain.context().name()).map_err(|error| PostRefused { posted, error })
    }

    /// Posts `requests`, at most [`BATCH`], with one doorbell.
    ///
    /// # Safety
    /// The local bytes of each must stay as they are until it completes, or the queue pair is dropped.
    pub(crate) unsafe fn post(&self, requests: &[Request]) -> Result<(), PostRefused> {
        let requests = &requests[..requests.len().min(BATCH)];
        let mut ranges = [sys::ibv_sge { addr: 0, length: 0, lkey: 0 }; BATCH];
        let mut batch = [blank_send(); BATCH];
        for ((request, range), raw) in requests.iter().zip(&mut ranges).zip(&mut batch) {
            match request.work {
                Work::Write(write) => self.fill_write(raw, &write, range),
                Work::Message(message) => {
                    raw.opcode = sys::IBV_WR_SEND_WITH_IMM;
                    raw.__bindgen_anon_1.imm_data = message.to_bits().to_be();
                }
            }
            raw.wr_id = request.tag.to_bits();
        }
        // SAFETY: the requests point at `ranges` and, chained, at each other; both outlive the call. The caller
        // keeps the bytes.
        unsafe { self.post_sends(&mut batch[..requests.len()]) }
    }

    fn fill_write(&self, raw: &mut sys::ibv_send_wr, write: &Write, range: &mut sys::ibv_sge) {
        raw.opcode = sys::IBV_WR_RDMA_WRITE;
        if write.length > 0 {
            *range = sys::ibv_sge { addr: write.local, length: write.length, lkey: write.local_key };
            raw.sg_list = range;
            raw.num_sge = 1;
        }
        if write.length > 0 && write.length <= self.inline_bytes {
            raw.send_flags = sys::IBV_SEND_INLINE;
        }
        if let Some(immediate) = write.immediate {
            raw.opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
            raw.__bindgen_anon_1.imm_data = immediate.to_be();
        }
        raw.wr.rdma.remote_addr = write.remote;
        raw.wr.rdma.rkey = write.remote_key;
    }

    /// Chains and posts.
    ///
    /// # Safety
    /// As for [`post`](Self::post); what the requests point at must be valid for the call.
    unsafe fn post_sends(&self, batch: &mut [sys::ibv_send_wr]) -> Result<(), PostRefused> {
        const CALL: &str = "ibv_post_send";
        let Some(post) = self.domain.context().operations().post_send else {
            return Err(self.unsupported(CALL));
        };
        if batch.is_empty() {
            return Ok(());
        }
        chain(batch, |request| &mut request.next);
        self.counters.posted(batch.len(), batch.len());
        let first = batch.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive and the chain valid for the call; the caller vouches for the rest.
        let result = unsafe { post(self.raw.as_ptr(), first, &raw mut bad) };
        let posted = (bad as usize).saturating_sub(first as usize) / size_of::<sys::ibv_send_wr>();
        zero(result, CALL, self.domain.context().name()).map_err(|error| PostRefused { posted, error })
    }

    fn modify(
        &self,
        mut attributes: sys::ibv_qp_attr,
        mask: sys::ibv_qp_attr_mask,
    ) -> Result<(), VerbsError> {
        let context = self.domain.context();
        // SAFETY: the queue pair is alive, and `attributes` is valid for the call.
        let result = unsafe {
            context.functions().ibv_modify_qp(self.raw.as_ptr(), &raw mut attributes, mask.cast_signed())
        };
        zero(result, "ibv_modify_qp", context.name())
    }

    fn unsupported(&self, call: &'static str) -> PostRefused {
        let error =
            refused(io::Error::from_raw_os_error(libc::EOPNOTSUPP), call, self.domain.context().name());
        PostRefused { posted: 0, error }
    }
}

impl Drop for RawQueuePair {
    fn drop(&mut self) {
        let context = self.domain.context();
        // SAFETY: the queue pair is ours, and nothing of ours uses it after this.
        let result = unsafe { context.functions().ibv_destroy_qp(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_destroy_qp", context.name()) {
            tracing::warn!(%error, "a queue pair is leaked");
        }
    }
}

fn blank() -> sys::ibv_qp_attr {
    // SAFETY: all-zero bytes are a valid set of attributes: numbers only.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn blank_send() -> sys::ibv_send_wr {
    // SAFETY: all-zero bytes are a valid work request: null pointers and numbers.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Makes each member of `batch` point at the one after it.
fn chain<T>(batch: &mut [T], next: impl Fn(&mut T) -> &mut *mut T) {
    let mut after = ptr::null_mut();
    for request in batch.iter_mut().rev() {
        *next(request) = after;
        after = request;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_ends_with_its_last_member() {
        let mut batch = [blank_send(), blank_send(), blank_send()];
        chain(&mut batch, |request| &mut request.next);
        let addresses = [&raw const batch[0], &raw const batch[1], &raw const batch[2]];
        assert_eq!(batch[0].next.cast_const(), addresses[1]);
        assert_eq!(batch[1].next.cast_const(), addresses[2]);
        assert!(batch[2].next.is_null());
    }
}
