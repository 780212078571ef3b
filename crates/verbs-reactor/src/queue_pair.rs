//! Reliable connected queue pairs of libibverbs.

use std::{
    io,
    mem::MaybeUninit,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    Endpoint, GidEntry, LinkLayer, Port, ProtectionDomain, Rdma, Timing, VerbsError,
    completion::CompletionQueue,
    doorbell::{BATCH, Direction, Doorbell, RANGES, Transfer, Work},
    error::{pointer, refused, zero},
    message::Message,
    sys,
    tag::Tag,
};

/// Writes of up to this many bytes are copied into the work request, which saves the device one read of memory.
const INLINE_BYTES: u32 = 64;

/// The sizes of a queue pair's queues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depths {
    /// Work requests in the send queue.
    pub(super) send: u32,
    /// Receives in the receive queue.
    pub(super) receive: u32,
    /// Ranges of memory in one work request of the send queue.
    pub(super) ranges: u32,
}

/// The parameters of a connection's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) port: u8,
    pub(super) pkey_index: u16,
    pub(super) gid_index: u8,
    /// Packets have a global route header. RoCE needs it. On InfiniBand only this header has room for the two settings
    /// that require it.
    pub(super) is_global: bool,
    pub(super) traffic_class: u8,
    pub(super) timing: Timing,
    /// Reads that this side's device may have under way.
    pub(super) reads_started: u8,
}

impl Way {
    /// The parameters that `settings` select, for the address `source` of `port`.
    pub(super) fn new(settings: &Rdma, port: &Port, source: &GidEntry, reads_started: u8) -> Self {
        let is_asked_for = settings.gid_index.is_some() || settings.traffic_class.is_some();
        Self {
            port: port.number,
            pkey_index: settings.pkey_index.unwrap_or(0),
            gid_index: source.index,
            is_global: port.link == LinkLayer::Ethernet || is_asked_for,
            traffic_class: settings.traffic_class.unwrap_or(0),
            timing: settings.timing(),
            reads_started,
        }
    }

    /// Reads that may be under way at `peer`.
    pub(super) fn reads_of(&self, peer: &Endpoint) -> u8 {
        self.reads_started.min(peer.reads)
    }
}

/// The device refused a batch, or the rest of one.
#[derive(Debug)]
pub(crate) struct PostRefused {
    /// How many requests it took.
    pub(crate) posted: usize,
    pub(crate) error: VerbsError,
}

/// A queue pair of the device. Dropping it ends outstanding work without completions.
pub(crate) struct RawQueuePair {
    domain: Arc<ProtectionDomain>,
    /// The completion queue of both directions, which must live as long as the queue pair.
    _completions: Arc<CompletionQueue>,
    raw: NonNull<sys::ibv_qp>,
    inline_bytes: u32,
}

// SAFETY: as for `Context`: the library's functions may be called from any thread, and it serialises posts itself.
unsafe impl Send for RawQueuePair {}
// SAFETY: as above: concurrent calls are serialised by the library.
unsafe impl Sync for RawQueuePair {}

impl std::fmt::Debug for RawQueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawQueuePair").field("number", &self.number()).finish_non_exhaustive()
    }
}

impl RawQueuePair {
    /// A queue pair with room for that many work requests in each direction.
    pub(super) fn new(
        domain: Arc<ProtectionDomain>,
        completions: Arc<CompletionQueue>,
        depths: Depths,
    ) -> Result<Self, VerbsError> {
        // SAFETY: all-zero bytes are a valid set of attributes: null pointers and numbers.
        let mut attributes: sys::ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        attributes.send_cq = completions.raw();
        attributes.recv_cq = completions.raw();
        attributes.qp_type = sys::IBV_QPT_RC;
        attributes.sq_sig_all = 0;
        attributes.cap = sys::ibv_qp_cap {
            max_send_wr: depths.send,
            max_recv_wr: depths.receive,
            max_send_sge: depths.ranges,
            max_recv_sge: 1,
            max_inline_data: INLINE_BYTES,
        };
        let context = domain.context().clone();
        // SAFETY: domain and completion queue are alive, because `Arc`s of both are held, and `attributes` is valid for
        // the call.
        let raw = unsafe { context.functions().ibv_create_qp(domain.raw(), &raw mut attributes) };
        let raw = pointer(raw, "ibv_create_qp", context.name())?;
        let inline_bytes = attributes.cap.max_inline_data.min(INLINE_BYTES);
        Ok(Self { domain, _completions: completions, raw, inline_bytes })
    }

    /// Its number within the device.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives while `self` does, and its number never changes.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// Moves from RESET to INIT: receives can be posted, and the peer will be allowed to write and read memory that is
    /// registered for that.
    pub(super) fn initialize(&self, way: &Way) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.pkey_index = way.pkey_index;
        attributes.qp_state = sys::IBV_QPS_INIT;
        attributes.port_num = way.port;
        attributes.qp_access_flags = sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_READ;
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        self.modify(attributes, mask)
    }

    /// Moves from INIT to RTR, in which the peer's packets are accepted, and on to RTS, in which this side can send.
    /// The kernel may look up the peer's link address meanwhile.
    pub(super) fn connect(&self, here: &Endpoint, way: &Way, peer: &Endpoint) -> Result<(), VerbsError> {
        self.ready_to_receive(here, way, peer)?;
        self.ready_to_send(here, way, peer)
    }

    fn ready_to_receive(&self, here: &Endpoint, way: &Way, peer: &Endpoint) -> Result<(), VerbsError> {
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify(receiving(here, way, peer), mask)
    }

    fn ready_to_send(&self, here: &Endpoint, way: &Way, peer: &Endpoint) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_RTS;
        attributes.sq_psn = here.sequence;
        attributes.timeout = way.timing.acknowledgement;
        attributes.retry_cnt = way.timing.retries;
        attributes.rnr_retry = way.timing.receiver_retries;
        attributes.max_rd_atomic = way.reads_of(peer);
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(attributes, mask)
    }

    /// Moves to ERR: everything outstanding completes as flushed, and the peer's packets are no longer accepted.
    pub(crate) fn fail(&self) -> Result<(), VerbsError> {
        let mut attributes = blank();
        attributes.qp_state = sys::IBV_QPS_ERR;
        self.modify(attributes, sys::IBV_QP_STATE)
    }

    /// Posts `count` receives without memory: writes with immediate and messages without bytes need none.
    pub(crate) fn post_receives(&self, count: usize) -> Result<(), PostRefused> {
        // Like in `post`, most calls post one.
        if count == 1 { self.post_receives_by::<1>(1) } else { self.post_receives_by::<BATCH>(count) }
    }

    /// Posts `count` receives, up to `N` in one call.
    fn post_receives_by<const N: usize>(&self, count: usize) -> Result<(), PostRefused> {
        // SAFETY: all-zero bytes are a valid work request: null pointers and numbers.
        let blank: sys::ibv_recv_wr = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut batch = [sys::ibv_recv_wr { wr_id: Tag::Receive.to_bits(), ..blank }; N];
        chain(&mut batch, |request| &mut request.next);
        let mut posted = 0;
        while posted < count {
            // The call starts at the member after which the chain is as long as the number of missing receives.
            let first = N.saturating_sub(count - posted);
            // SAFETY: `chain` has linked every member of the batch to the next, and the last to null.
            let taken = unsafe { self.post_receive_chain(&mut batch, first) };
            taken.map_err(|refused| PostRefused { posted: posted + refused.posted, ..refused })?;
            posted += N - first;
        }
        Ok(())
    }

    /// Posts the members of `batch` from `first` on.
    ///
    /// # Safety
    /// Each member of `batch` must point at the next one, and the last at null.
    unsafe fn post_receive_chain<const N: usize>(
        &self,
        batch: &mut [sys::ibv_recv_wr; N],
        first: usize,
    ) -> Result<(), PostRefused> {
        const CALL: &str = "ibv_post_recv";
        let Some(post) = self.domain.context().operations().post_recv else {
            return Err(self.unsupported(CALL));
        };
        let start = batch.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: `first` is inside the batch. The queue pair is alive while `self` is, the caller has linked the
        // batch, and the library copies the requests before it returns.
        let (result, first) = unsafe {
            let first = start.add(first.min(N - 1));
            (post(self.raw.as_ptr(), first, &raw mut bad), first)
        };
        let posted = (bad as usize).saturating_sub(first as usize) / size_of::<sys::ibv_recv_wr>();
        zero(result, CALL, self.domain.context().name()).map_err(|error| PostRefused { posted, error })
    }

    /// Posts the requests of `doorbell` in one call. Their numbers begin with `sequence`.
    ///
    /// # Safety
    /// Until a request completes or the queue pair is dropped, its local bytes must stay mapped and unchanged, and
    /// nothing else may access the local bytes of a read.
    pub(super) unsafe fn post(&self, doorbell: &Doorbell, sequence: u64) -> Result<(), PostRefused> {
        // Most calls have one request. Clearing an array for the largest doorbell would take longer than filling one
        // in.
        if doorbell.len() <= 1 && doorbell.ranges().len() <= 1 {
            // SAFETY: the doorbell has at most one request and one range; the caller guarantees the rest.
            unsafe { self.post_up_to::<1, 1>(doorbell, sequence) }
        } else {
            // SAFETY: no doorbell has more than `BATCH` requests and `RANGES` ranges; the caller guarantees the rest.
            unsafe { self.post_up_to::<BATCH, RANGES>(doorbell, sequence) }
        }
    }

    /// Posts the requests of `doorbell`, by way of arrays of `N` requests and `R` ranges.
    ///
    /// # Safety
    /// As for [`post`](Self::post). The doorbell must have at most `N` requests and `R` ranges.
    unsafe fn post_up_to<const N: usize, const R: usize>(
        &self,
        doorbell: &Doorbell,
        sequence: u64,
    ) -> Result<(), PostRefused> {
        let mut ranges = [sys::ibv_sge { addr: 0, length: 0, lkey: 0 }; R];
        for (range, raw) in doorbell.ranges().iter().zip(&mut ranges) {
            // No range is longer than a piece, whose length fits.
            let length = u32::try_from(range.length).unwrap_or(u32::MAX);
            *raw = sys::ibv_sge { addr: range.address, length, lkey: range.key };
        }
        let mut batch = [blank_send(); N];
        // Stays inside the array, because the doorbell has at most `R` ranges.
        let mut list = ranges.as_mut_ptr();
        for (((request, count), raw), tag) in doorbell.requests().zip(&mut batch).zip(sequence..) {
            match &request.work {
                Work::Transfer(transfer) => self.fill_transfer(raw, transfer),
                Work::Message(message) => fill_message(raw, *message),
            }
            if request.is_signaled {
                raw.send_flags |= sys::IBV_SEND_SIGNALED;
            }
            if count > 0 {
                (raw.sg_list, raw.num_sge) = (list, i32::try_from(count).unwrap_or(0));
                list = list.wrapping_add(count);
            }
            raw.wr_id = Tag::Send(tag).to_bits();
        }
        tensorwire_testpoints::counted!("doorbells", 1);
        tensorwire_testpoints::counted!("requests of doorbells", doorbell.len());
        tensorwire_testpoints::counted!("signalled requests of doorbells", doorbell.signals());
        // SAFETY: the requests point into `ranges`, which outlives the call. The caller guarantees the rest.
        unsafe { self.post_sends(&mut batch[..doorbell.len().min(N)]) }
    }

    fn fill_transfer(&self, raw: &mut sys::ibv_send_wr, transfer: &Transfer) {
        raw.opcode = match (transfer.direction, transfer.immediate) {
            (Direction::Write, Some(immediate)) => {
                raw.__bindgen_anon_1.imm_data = immediate.to_be();
                sys::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            // A read of no bytes is posted as a write of no bytes, because devices differ in what they do with the
            // former.
            (Direction::Read, _) if transfer.length > 0 => sys::IBV_WR_RDMA_READ,
            _ => sys::IBV_WR_RDMA_WRITE,
        };
        let fits = (1..=u64::from(self.inline_bytes)).contains(&transfer.length);
        if fits && transfer.direction == Direction::Write {
            raw.send_flags |= sys::IBV_SEND_INLINE;
        }
        raw.wr.rdma.remote_addr = transfer.remote;
        raw.wr.rdma.rkey = transfer.remote_key;
    }

    /// Links the members of `batch` and posts them.
    ///
    /// # Safety
    /// As for [`post`](Self::post). The ranges that the requests point at must be valid for the call.
    unsafe fn post_sends(&self, batch: &mut [sys::ibv_send_wr]) -> Result<(), PostRefused> {
        const CALL: &str = "ibv_post_send";
        let Some(post) = self.domain.context().operations().post_send else {
            return Err(self.unsupported(CALL));
        };
        if batch.is_empty() {
            return Ok(());
        }
        chain(batch, |request| &mut request.next);
        let first = batch.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive while `self` is, and `chain` has linked the batch. The caller guarantees the
        // rest.
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
        // SAFETY: the queue pair is alive while `self` is, and `attributes` is valid for the call.
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
        #[cfg(feature = "planted-bugs")]
        if crate::planted::is_end(crate::planted::BadEnd::Forgotten) {
            return;
        }
        let context = self.domain.context();
        // SAFETY: this value owns the queue pair, and nothing uses it after the drop.
        let result = unsafe { context.functions().ibv_destroy_qp(self.raw.as_ptr()) };
        if let Err(error) = zero(result, "ibv_destroy_qp", context.name()) {
            log!(WARN, %error, "cannot destroy a queue pair: it is leaked");
        }
        #[cfg(feature = "planted-bugs")]
        if crate::planted::is_end(crate::planted::BadEnd::ReadAfterwards) {
            std::hint::black_box(self.number());
        }
    }
}

fn blank() -> sys::ibv_qp_attr {
    // SAFETY: all-zero bytes are a valid set of attributes: numbers only.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The attributes of a queue pair that accepts the packets of `peer`.
pub(super) fn receiving(here: &Endpoint, way: &Way, peer: &Endpoint) -> sys::ibv_qp_attr {
    let mut attributes = blank();
    attributes.qp_state = sys::IBV_QPS_RTR;
    attributes.path_mtu = here.mtu.min(peer.mtu).code();
    attributes.dest_qp_num = peer.number;
    attributes.rq_psn = peer.sequence;
    attributes.max_dest_rd_atomic = here.reads;
    attributes.min_rnr_timer = way.timing.receiver_wait;
    attributes.ah_attr.port_num = way.port;
    attributes.ah_attr.sl = here.service_level;
    attributes.ah_attr.dlid = peer.local_identifier;
    if way.is_global {
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.grh.dgid.raw = peer.gid.0;
        attributes.ah_attr.grh.sgid_index = way.gid_index;
        attributes.ah_attr.grh.traffic_class = way.traffic_class;
        attributes.ah_attr.grh.hop_limit = 64;
    }
    attributes
}

fn fill_message(raw: &mut sys::ibv_send_wr, message: Message) {
    raw.opcode = sys::IBV_WR_SEND_WITH_IMM;
    raw.__bindgen_anon_1.imm_data = message.to_bits().to_be();
    if message == Message::Farewell {
        // Sent only after all reads are complete, because the peer closes when it receives this message.
        raw.send_flags |= sys::IBV_SEND_FENCE;
    }
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
impl RawQueuePair {
    /// The queue pair's attributes, read back by the library.
    pub(super) fn attributes(&self) -> sys::ibv_qp_attr {
        type Query = unsafe extern "C" fn(
            *mut sys::ibv_qp,
            *mut sys::ibv_qp_attr,
            libc::c_int,
            *mut sys::ibv_qp_init_attr,
        ) -> libc::c_int;
        const ALL: libc::c_int = 0x1F_FFFF;
        let mut attributes = blank();
        // SAFETY: all-zero bytes are valid attributes: null pointers and numbers.
        let mut initial: sys::ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: the function has this signature since its first release. The queue pair is alive while `self` is, and
        // both sets of attributes are writable.
        let result = unsafe {
            let library = libloading::Library::new("libibverbs.so.1").unwrap();
            let query: libloading::Symbol<'_, Query> = library.get(b"ibv_query_qp\0").unwrap();
            query(self.raw.as_ptr(), &raw mut attributes, ALL, &raw mut initial)
        };
        zero(result, "ibv_query_qp", self.domain.context().name()).unwrap();
        attributes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gid, GidKind, Mtu};

    /// The attributes that are passed to a queue pair with `settings`.
    fn asked(settings: &Rdma, link: LinkLayer) -> sys::ibv_ah_attr {
        let source =
            GidEntry { index: settings.gid_index.unwrap_or(0), gid: Gid([1; 16]), kind: GidKind::InfiniBand };
        let way = Way::new(settings, &Port::sample(link), &source, 1);
        let end = Endpoint::sample(link, Mtu::Bytes1024);
        receiving(&end, &way, &end).ah_attr
    }

    #[test]
    fn on_infiniband_a_gid_index_and_a_traffic_class_travel_in_a_global_route_header() {
        let plain = asked(&Rdma::default(), LinkLayer::InfiniBand);
        assert_eq!((plain.is_global, plain.grh.hop_limit), (0, 0));
        let index = asked(&Rdma { gid_index: Some(3), ..Rdma::default() }, LinkLayer::InfiniBand);
        assert_eq!((index.is_global, index.grh.sgid_index, index.grh.traffic_class), (1, 3, 0));
        let class = asked(&Rdma { traffic_class: Some(0x20), ..Rdma::default() }, LinkLayer::InfiniBand);
        assert_eq!((class.is_global, class.grh.sgid_index, class.grh.traffic_class), (1, 0, 0x20));
        assert_eq!(asked(&Rdma::default(), LinkLayer::Ethernet).is_global, 1);
    }

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
