//! Opened devices and their ports.

use std::{
    ffi::c_int,
    mem::{self, MaybeUninit},
    os::fd::RawFd,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    Library, Paging, Setting, VerbsError,
    error::{pointer, zero},
    sys,
};

type QueryDeviceEx = unsafe extern "C" fn(
    *mut sys::ibv_context,
    *const sys::ibv_query_device_ex_input,
    *mut sys::ibv_device_attr_ex,
    usize,
) -> c_int;

/// An open device. Everything made from it keeps it open.
pub struct Context {
    library: &'static Library,
    raw: NonNull<sys::ibv_context>,
    name: String,
}

// SAFETY: libibverbs documents that its functions may be called from any thread, and its contexts belong to no thread.
unsafe impl Send for Context {}
// SAFETY: as above: the library serialises concurrent calls itself.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLimits {
    /// Ports, counted from 1.
    pub ports: u8,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests outstanding in one direction of one queue pair.
    pub work_requests: u32,
    /// Ranges of memory in one work request.
    pub segments: u32,
    /// Ranges of memory that one read is scattered to.
    pub read_segments: u32,
    /// Reads that one queue pair may have under way.
    pub reads_started: u32,
    /// Reads of the peer that one queue pair serves at once.
    pub reads_served: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Completions in one completion queue.
    pub completions: u32,
    /// Registered regions.
    pub regions: u32,
    /// Bytes in one registered region.
    pub region_bytes: u64,
}

/// The kind of network that a port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// An InfiniBand subnet: ports are found by their local identifier.
    InfiniBand,
    /// Ethernet (RoCE): ports are found by their address.
    Ethernet,
}

/// The attributes of a port at the time of the query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// Counted from 1.
    pub number: u8,
    /// `enum ibv_port_state`.
    pub state: u32,
    /// The kind of network.
    pub link: LinkLayer,
    /// The local identifier in an InfiniBand subnet, 0 on Ethernet.
    pub local_identifier: u16,
    /// The largest packet, as `enum ibv_mtu`: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// The largest packet the port could be set to, as `enum ibv_mtu`.
    pub mtu_max: u32,
    /// Entries of its address table.
    pub addresses: u32,
    /// Bytes in one message.
    pub message_bytes: u32,
}

impl Port {
    /// Whether it carries traffic.
    pub fn is_active(&self) -> bool {
        self.state == sys::IBV_PORT_ACTIVE
    }
}

impl Context {
    /// Opens the device of that name.
    ///
    /// # Errors
    /// [`VerbsError::UnknownDevice`], [`VerbsError::NoKernelSupport`], [`VerbsError::Call`].
    pub fn open(library: &'static Library, name: &str) -> Result<Arc<Self>, VerbsError> {
        let raw = library.open_device(name)?;
        Ok(Arc::new(Self { library, raw, name: name.to_owned() }))
    }

    /// The device's name, as the kernel gave it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's limits.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut answer = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: the context is open while `self` lives, and `answer` is writable and as large as the attributes.
        let result = unsafe { self.functions().ibv_query_device(self.raw(), answer.as_mut_ptr()) };
        zero(result, "ibv_query_device", &self.name)?;
        // SAFETY: all-zero bytes are valid attributes, and the call filled them in.
        let attributes = unsafe { answer.assume_init() };
        Ok(DeviceLimits {
            ports: attributes.phys_port_cnt,
            queue_pairs: limit(attributes.max_qp),
            work_requests: limit(attributes.max_qp_wr),
            segments: limit(attributes.max_sge),
            read_segments: limit(attributes.max_sge_rd),
            reads_started: limit(attributes.max_qp_init_rd_atom),
            reads_served: limit(attributes.max_qp_rd_atom),
            completion_queues: limit(attributes.max_cq),
            completions: limit(attributes.max_cqe),
            regions: limit(attributes.max_mr),
            region_bytes: attributes.max_mr_size,
        })
    }

    /// The operations that the device supports on memory that is not pinned. None, if library, driver or device do not
    /// support paging.
    pub fn paging(&self) -> Paging {
        let Some(answer) = self.extended_attributes() else { return Paging::default() };
        Paging::of(answer.odp_caps.general_caps, answer.odp_caps.per_transport_caps.rc_odp_caps)
    }

    /// The extended attributes of a device; `None` if library, driver or device have none.
    fn extended_attributes(&self) -> Option<sys::ibv_device_attr_ex> {
        let query = self.query_device_ex()?;
        let mut answer = MaybeUninit::<sys::ibv_device_attr_ex>::zeroed();
        let size = size_of::<sys::ibv_device_attr_ex>();
        // SAFETY: the context is open while `self` lives, a null input is allowed, and `answer` is writable and of the
        // size that is passed.
        let result = unsafe { query(self.raw(), ptr::null(), answer.as_mut_ptr(), size) };
        if let Err(error) = zero(result, "ibv_query_device_ex", &self.name) {
            log!(DEBUG, %error, "cannot query a device's extended attributes: they count as absent");
            return None;
        }
        // SAFETY: all-zero bytes are valid attributes, and the call filled in what it knows.
        Some(unsafe { answer.assume_init() })
    }

    /// The function that `ibv_query_device_ex` of verbs.h calls. It is found as verbs.h finds it: a library with more
    /// functions than those of `ibv_context` makes each context the last member of a larger structure, `verbs_context`,
    /// whose size it stores there.
    fn query_device_ex(&self) -> Option<QueryDeviceEx> {
        let before = mem::offset_of!(sys::verbs_context, context);
        let needed = size_of::<sys::verbs_context>() - mem::offset_of!(sys::verbs_context, query_device_ex);
        // SAFETY: the context is open while `self` lives, and the library never moves it or changes its kind. If it is
        // marked as extended, it is the last member of a `verbs_context`. The size of that lies right before it, and
        // the library sets the functions that lie within that size.
        unsafe {
            if self.raw.as_ref().abi_compat.addr() != usize::MAX {
                return None;
            }
            let extended = self.raw.as_ptr().byte_sub(before).cast::<sys::verbs_context>();
            if (&raw const (*extended).sz).read() < needed {
                return None;
            }
            (&raw const (*extended).query_device_ex).read()
        }
    }

    /// Whether the library can register memory by a dma-buf descriptor instead of an address.
    pub fn takes_dma_buf(&self) -> bool {
        self.functions().ibv_reg_dmabuf_mr.is_some()
    }

    /// Port `number`, counted from 1.
    ///
    /// # Errors
    /// [`VerbsError::Call`], also for a port that the device lacks.
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        let mut answer = MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // SAFETY: the context is open while `self` lives. The function fills the structure's leading part, which is all
        // that `_compat_ibv_port_attr` declares; the rest stays zero.
        let result =
            unsafe { self.functions().ibv_query_port(self.raw(), number, answer.as_mut_ptr().cast()) };
        zero(result, "ibv_query_port", &self.name)?;
        // SAFETY: all-zero bytes are valid attributes, and the call filled in the leading part.
        let attributes = unsafe { answer.assume_init() };
        Ok(Port {
            number,
            state: attributes.state,
            link: match u32::from(attributes.link_layer) {
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::InfiniBand,
            },
            local_identifier: attributes.lid,
            mtu: attributes.active_mtu,
            mtu_max: attributes.max_mtu,
            addresses: limit(attributes.gid_tbl_len),
            message_bytes: attributes.max_msg_sz,
        })
    }

    /// The partition key at `index` of port `number`'s table. On Ethernet there is only the default key, 0xffff.
    ///
    /// # Errors
    /// [`VerbsError::Unfit`] if the table has no such entry, or if it is empty.
    pub(super) fn partition_key(&self, number: u8, index: u16) -> Result<u16, VerbsError> {
        let mut key = 0;
        // SAFETY: the context is open while `self` lives, and `key` is writable.
        let result =
            unsafe { self.functions().ibv_query_pkey(self.raw(), number, i32::from(index), &raw mut key) };
        let key = u16::from_be(key);
        if result != 0 || key & 0x7FFF == 0 {
            let remedy = format!("the table of port {number} has no key there: 0 is its first entry");
            let (value, device) = (index.to_string(), self.name.clone());
            return Err(VerbsError::Unfit { setting: Setting::PkeyIndex, value, device, remedy });
        }
        Ok(key)
    }

    /// The descriptor that is readable when the device has an event. It stays open while the context is open.
    pub(crate) fn event_descriptor(&self) -> RawFd {
        // SAFETY: the context is open while `self` lives, and its descriptor never changes.
        unsafe { self.raw.as_ref().async_fd }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn functions(&self) -> &'static sys::Functions {
        &self.library.functions
    }

    /// The functions that verbs.h calls through pointers in the context.
    pub(crate) fn operations(&self) -> &sys::ibv_context_ops {
        // SAFETY: the context is open while `self` lives, and its table of operations never changes after that.
        unsafe { &self.raw.as_ref().ops }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context holds an `Arc` of it, so nothing uses it any more.
        let result = unsafe { self.functions().ibv_close_device(self.raw()) };
        if let Err(error) = zero(result, "ibv_close_device", &self.name) {
            log!(WARN, %error, "cannot close an RDMA device");
        }
    }
}

/// A protection domain of the device: its queue pairs may use only its registrations.
pub(crate) struct ProtectionDomain {
    context: Arc<Context>,
    raw: NonNull<sys::ibv_pd>,
}

// SAFETY: as for `Context`: the library's functions may be called from any thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Context`: the library serialises concurrent calls itself.
unsafe impl Sync for ProtectionDomain {}

impl std::fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProtectionDomain").field("context", &self.context).finish_non_exhaustive()
    }
}

impl ProtectionDomain {
    /// A new domain on `context`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub(crate) fn new(context: Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open, because an `Arc` of it is held.
        let raw = unsafe { context.functions().ibv_alloc_pd(context.raw()) };
        let raw = pointer(raw, "ibv_alloc_pd", context.name())?;
        Ok(Arc::new(Self { context, raw }))
    }

    /// The device it belongs to.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold an `Arc` of the domain, so none is left.
        let result = unsafe { self.context.functions().ibv_dealloc_pd(self.raw()) };
        if let Err(error) = zero(result, "ibv_dealloc_pd", self.context.name()) {
            log!(WARN, %error, "cannot free a protection domain: it is leaked");
        }
    }
}

fn limit(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

#[cfg(test)]
impl Port {
    /// An active port, for tests.
    pub(crate) fn sample(link: LinkLayer) -> Self {
        let (number, state, local_identifier) = (1, sys::IBV_PORT_ACTIVE, 0);
        let (mtu, mtu_max, addresses, message_bytes) = (5, 5, 16, 8 << 20);
        Self { number, state, link, local_identifier, mtu, mtu_max, addresses, message_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The extended functions are found in the context: they answer, and their answers match those of the plain ones.
    #[test]
    #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
    fn extended_attributes_begin_with_the_plain_ones() {
        let library = Library::open().unwrap();
        let names = library.device_names().unwrap();
        assert!(!names.is_empty());
        for name in names {
            let context = Context::open(library, &name).unwrap();
            let (limits, answer) = (context.limits().unwrap(), context.extended_attributes().unwrap());
            let plain = answer.orig_attr;
            assert_eq!((limit(plain.max_qp), limit(plain.max_mr)), (limits.queue_pairs, limits.regions));
            assert_eq!((plain.phys_port_cnt, limit(plain.max_sge_rd)), (limits.ports, limits.read_segments));
            assert!(context.takes_dma_buf(), "libibverbs of rdma-core 34 or newer has the function");
        }
    }
}
