//! An open device, and everything that was made from it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

use tensorwire_fabric::FabricError;

use super::{
    Context, DeviceEvent, DeviceLimits, GidEntry, Library, Mtu, Names, Port, Rdma, Setting, VerbsError,
    doorbell::RANGES_OF_REQUEST,
    error::loss,
    paging::UserPages,
    pending::RequestLimits,
    selection::{Candidate, Seen, select},
};

/// Logical writes are split into pieces of at most this many bytes; fewer if the port's messages are shorter.
const PIECE_BYTES_MAX: u32 = 1 << 30;

/// Reads under way at once on one queue pair, in each direction; further ones wait inside the device. 16 is what
/// hardware supports.
const READS_MAX: u32 = 16;

/// An object that was made from an open device. When the device is lost, the object drops everything that keeps the
/// device open.
pub(super) trait Child: Send + Sync {
    /// Ends operations under way with `failure`, and destroys the object's parts of the device. Never waits.
    fn device_lost(&self, failure: &FabricError);

    /// Ends with `failure` if `event` is about this object.
    fn concerns(&self, _event: DeviceEvent, _failure: &FabricError) {}
}

/// An open device, one of its ports and one of that port's addresses.
pub(super) struct Opened {
    pub(super) context: Arc<Context>,
    pub(super) limits: DeviceLimits,
    pub(super) port: Port,
    pub(super) source: GidEntry,
    pub(super) partition_key: u16,
    pub(super) mtu: Mtu,
    /// How users' memory is registered.
    pub(super) user_pages: UserPages,
    /// The objects that were made from the device; once the device is lost, the cause.
    children: Mutex<Result<Vec<Weak<dyn Child>>, VerbsError>>,
    /// Notified when this is dropped.
    pub(super) closing: Arc<Notify>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("context", &self.context).finish_non_exhaustive()
    }
}

impl Opened {
    /// Opens the best of the devices and ports that `settings` allow, and logs the choice.
    pub(super) fn choose(settings: &Rdma) -> Result<Self, VerbsError> {
        settings.check()?;
        let library = Library::open()?;
        let names = match &settings.device {
            Some(name) => vec![name.clone()],
            None => library.device_names()?,
        };
        // All devices are open until one is chosen.
        let contexts: Vec<_> = names.into_iter().map(|name| look(library, name)).collect();
        let seen: Vec<Seen> = contexts.iter().map(|(seen, _)| seen.clone()).collect();
        let selection = select(&seen, settings)?;
        let Candidate { device, port, source } = selection.chosen.clone();
        let context =
            contexts.into_iter().find_map(|(seen, context)| context.filter(|_| seen.device == device));
        let context =
            context.ok_or(VerbsError::UnknownDevice { name: device.clone(), present: Names(vec![]) })?;
        let opened = Self::new(context, port, source, settings)?;
        log!(
            INFO,
            device, port = port.number, gid_index = source.index, address = %source.gid, mtu = %opened.mtu,
            on_demand_paging = opened.user_pages.on_demand(), others = %selection.others(),
            "RDMA port chosen; name another with TENSORWIRE_RDMA_DEVICE, _PORT and _GID_INDEX"
        );
        Ok(opened)
    }

    fn new(context: Arc<Context>, port: Port, source: GidEntry, settings: &Rdma) -> Result<Self, VerbsError> {
        let limits = context.limits()?;
        let mtu = packet_size(context.name(), &port, settings)?;
        let partition_key = context.partition_key(port.number, settings.pkey_index.unwrap_or(0))?;
        let user_pages =
            settings.on_demand_paging.unwrap_or_default().on(context.name(), context.paging())?;
        let (children, closing) = (Mutex::new(Ok(Vec::new())), Arc::default());
        Ok(Self { context, limits, port, source, partition_key, mtu, user_pages, children, closing })
    }

    /// Bytes of the pieces that this side splits logical writes into.
    pub(super) fn piece_bytes(&self) -> u32 {
        piece_bytes(&self.port)
    }

    /// The limits of one work request.
    pub(super) fn request_limits(&self) -> RequestLimits {
        let ranges = (self.limits.segments as usize).clamp(1, RANGES_OF_REQUEST);
        let read_ranges = (self.limits.read_segments as usize).clamp(1, ranges);
        RequestLimits { piece_bytes: self.piece_bytes(), ranges, read_ranges }
    }

    /// Reads of a peer that one queue pair serves at once.
    pub(super) fn reads_served(&self) -> u8 {
        self.limits.reads_served.min(READS_MAX) as u8
    }

    /// Reads that one queue pair may have under way.
    pub(super) fn reads_started(&self) -> u8 {
        self.limits.reads_started.min(READS_MAX) as u8
    }

    /// Registers `child`, so that it is ended when the device is lost.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`] if it is lost already.
    pub(super) fn adopt(&self, child: Weak<dyn Child>) -> Result<(), VerbsError> {
        let mut children = self.children();
        let alive = children.as_mut().map_err(|lost| lost.clone())?;
        if alive.len() == alive.capacity() {
            alive.retain(|child| child.strong_count() > 0);
        }
        alive.push(child);
        Ok(())
    }

    /// The cause if the device is lost.
    pub(super) fn lost(&self) -> Option<VerbsError> {
        self.children().as_ref().err().cloned()
    }

    /// Marks the device as lost by `event`, and ends every object that was made from it. Only the first call does that.
    pub(super) fn lose(&self, event: DeviceEvent) -> VerbsError {
        let device = self.context.name().to_owned();
        let error = VerbsError::DeviceLost { device, port: self.port.number, event };
        let children = {
            let mut children = self.children();
            match &mut *children {
                Err(earlier) => return earlier.clone(),
                Ok(alive) => {
                    let alive = std::mem::take(alive);
                    *children = Err(error.clone());
                    alive
                }
            }
        };
        log!(ERROR, %error, "an RDMA device is lost");
        let failure = loss(&error);
        // In reverse: queue pairs were made after the registrations that they use, and are destroyed before them.
        for child in children.iter().rev().filter_map(Weak::upgrade) {
            child.device_lost(&failure);
        }
        error
    }

    /// Ends the connection that `event` is about.
    pub(super) fn tell(&self, event: DeviceEvent) {
        let device = self.context.name().to_owned();
        let failure = loss(&VerbsError::DeviceLost { device, port: self.port.number, event });
        let children = self.children().as_ref().map(Clone::clone).unwrap_or_default();
        for child in children.iter().filter_map(Weak::upgrade) {
            child.concerns(event, &failure);
        }
    }

    /// Compares port and address with those that are in use. If they changed, returns the event with which to end the
    /// connections: `event`, or a worse one.
    pub(super) fn look_again(&self, event: DeviceEvent) -> Option<DeviceEvent> {
        let number = self.port.number;
        let Ok(port) = self.context.port(number) else { return Some(DeviceEvent::DeviceFatal) };
        if !port.is_active() {
            return Some(DeviceEvent::PortDown { port: number });
        }
        let addresses = self.context.addresses(&port).unwrap_or_default();
        let same = addresses.contains(&self.source) && port.local_identifier == self.port.local_identifier;
        (!same).then_some(event)
    }

    fn children(&self) -> MutexGuard<'_, Result<Vec<Weak<dyn Child>>, VerbsError>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.closing.notify_one();
    }
}

pub(super) fn piece_bytes(port: &Port) -> u32 {
    port.message_bytes.clamp(1, PIECE_BYTES_MAX)
}

/// The ports of the device of that name, and the device itself if it can be opened.
fn look(library: &'static Library, name: String) -> (Seen, Option<Arc<Context>>) {
    match Context::open(library, &name) {
        Ok(context) => (Seen { device: name, ports: ports(&context) }, Some(context)),
        Err(error) => (Seen { device: name, ports: Err(error) }, None),
    }
}

fn ports(context: &Context) -> Result<Vec<(Port, Vec<GidEntry>)>, VerbsError> {
    let with_addresses = |number| {
        let port = context.port(number)?;
        Ok((port, context.addresses(&port)?))
    };
    (1..=context.limits()?.ports).map(with_addresses).collect()
}

/// The largest packet: the one in `settings`, which must not exceed the port's, or else the port's.
fn packet_size(device: &str, port: &Port, settings: &Rdma) -> Result<Mtu, VerbsError> {
    let active = Mtu::from_code(port.mtu).unwrap_or(Mtu::Bytes256);
    match settings.mtu {
        Some(wanted) if wanted > active => {
            let remedy = format!(
                "packets on port {} have at most {active} bytes: use that or less, or raise the MTU of its network",
                port.number
            );
            let (value, device) = (wanted.to_string(), device.to_owned());
            Err(VerbsError::Unfit { setting: Setting::Mtu, value, device, remedy })
        }
        Some(wanted) => Ok(wanted),
        None => Ok(active),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LinkLayer;

    #[test]
    fn packets_may_be_as_large_as_the_port_has_them() {
        let port = Port { mtu: 3, ..Port::sample(LinkLayer::Ethernet) };
        let with = |mtu| packet_size("rxe0", &port, &Rdma { mtu, ..Rdma::default() });
        assert_eq!(with(None).unwrap(), Mtu::Bytes1024);
        assert_eq!(with(Some(Mtu::Bytes1024)).unwrap(), Mtu::Bytes1024);
        assert_eq!(with(Some(Mtu::Bytes256)).unwrap(), Mtu::Bytes256);
        let error = with(Some(Mtu::Bytes2048)).unwrap_err().to_string();
        for part in ["2048", "rxe0", "1024", "RDMA_MTU", "RDMA_QP_MTU"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
    }
}
