//! The fabric on an RDMA device.

use std::sync::Arc;

use crate::{Capabilities, Domain, Fabric, FabricError, FabricKind, Runtime, Wait, wait::Spinner};

use super::{
    Context, Counters, DeviceLimits, GidEntry, Library, LinkLayer, Names, Port, VerbsCounts, VerbsError,
    domain::VerbsDomain, error::fabric_error,
};

/// Logical writes are split into pieces of at most this many bytes, or of what the port takes if that is less.
const PIECE_BYTES_MAX: u32 = 1 << 30;

/// Of queue pairs: pieces are counted by the link, which holds back what the device's queue has no room for.
pub(super) const CAPABILITIES: Capabilities = Capabilities { vectored: true, ..Capabilities::WRITES };

/// How a device retries, in its own units. All of it is finite: a peer that is gone is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Time to wait for an acknowledgement: 4.096 µs · 2ⁿ; devices may wait up to four times as long. Default 16,
    /// which is 0.27 s.
    pub acknowledgement: u8,
    /// Retries after that, at most 6: InfiniBand allows 7, but Soft-RoCE takes 7 for ever. Default 6: with the
    /// acknowledgement's default, a peer that is gone fails an operation after 2 to 8 seconds.
    pub retries: u8,
    /// Retries when the peer has no receive posted, at most 6 (7 would be for ever). Default 6; with right
    /// flow control there are none.
    pub receiver_retries: u8,
    /// What a peer without a receive is told to wait for, in the code of the InfiniBand specification. Default 12,
    /// which is 0.64 ms.
    pub receiver_wait: u8,
}

impl Default for Timing {
    fn default() -> Self {
        Self { acknowledgement: 16, retries: 6, receiver_retries: 6, receiver_wait: 12 }
    }
}

impl Timing {
    /// Within the fields of the queue pair, and finite.
    fn clamped(self) -> Self {
        Self {
            acknowledgement: self.acknowledgement.clamp(1, 31), // 0 would be for ever
            retries: self.retries.min(6),
            receiver_retries: self.receiver_retries.min(6),
            receiver_wait: self.receiver_wait.min(31),
        }
    }
}

/// How a device is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerbsSettings {
    /// The device's name; by default the first with an active port.
    pub device: Option<String>,
    /// How it retries.
    pub timing: Timing,
}

/// RDMA on one port of one device. Connections are made on a tokio runtime with its I/O driver enabled.
#[derive(Debug)]
pub struct VerbsFabric {
    shared: Arc<Shared>,
}

/// What everything made on the device needs.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) context: Arc<Context>,
    pub(super) limits: DeviceLimits,
    pub(super) port: Port,
    pub(super) source: GidEntry,
    pub(super) timing: Timing,
    pub(super) spinner: Arc<Spinner>,
    pub(super) counters: Arc<Counters>,
}

impl VerbsFabric {
    /// Opens the device that `settings` name.
    ///
    /// # Errors
    /// Every [`VerbsError`]; each says what is missing.
    pub fn open(runtime: Arc<dyn Runtime>, settings: &VerbsSettings) -> Result<Self, VerbsError> {
        let library = Library::open()?;
        let (context, port) = match &settings.device {
            Some(name) => usable(library, name)?,
            None => first_usable(library)?,
        };
        let (limits, source) = (context.limits()?, context.source_address(&port)?);
        let timing = settings.timing.clamped();
        let (spinner, counters) = (Spinner::new(Wait::default()), Arc::default());
        let shared = Shared { runtime, context, limits, port, source, timing, spinner, counters };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// How drivers wait, for domains opened after this. At most one driver of this fabric spins at a time; spinning
    /// polls the completion queue.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.shared = Arc::new(Shared { spinner: Spinner::new(wait), ..Shared::clone(&self.shared) });
        self
    }

    /// What its queue pairs have asked of the device so far.
    pub fn counts(&self) -> VerbsCounts {
        self.shared.counters.read()
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.shared.context.name()
    }

    /// The port that connections use, as it was when the device was opened.
    pub fn port(&self) -> Port {
        self.shared.port
    }

    /// The address that connections come from.
    pub fn source(&self) -> GidEntry {
        self.shared.source
    }
}

fn usable(library: &'static Library, name: &str) -> Result<(Arc<Context>, Port), VerbsError> {
    let context = Context::open(library, name)?;
    let port = context.active_port()?;
    Ok((context, port))
}

/// The first device with an active port, or the reason against the last.
fn first_usable(library: &'static Library) -> Result<(Arc<Context>, Port), VerbsError> {
    let mut reason = VerbsError::UnknownDevice { name: "with an active port".into(), present: Names(vec![]) };
    for name in library.device_names()? {
        match usable(library, &name) {
            Ok(found) => return Ok(found),
            Err(error) => reason = error,
        }
    }
    Err(reason)
}

impl Shared {
    pub(super) fn piece_bytes(&self) -> u32 {
        self.port.message_bytes.clamp(1, PIECE_BYTES_MAX)
    }

    /// Reads of a peer that a queue pair serves at once.
    pub(super) fn reads_served(&self) -> u8 {
        u8::try_from(self.limits.reads_served).unwrap_or(u8::MAX)
    }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { piece_bytes_max: u64::from(self.shared.piece_bytes()), ..CAPABILITIES }
    }

    /// The kind of network, for InfiniBand with its subnet. Whether two RoCE ports reach each other only a
    /// connection tells.
    fn reach(&self) -> Vec<u8> {
        match self.shared.port.link {
            LinkLayer::Ethernet => b"roce-v2".to_vec(),
            LinkLayer::InfiniBand => [b"infiniband-", &self.shared.source.gid.0[..8]].concat(),
        }
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let domain = VerbsDomain::new(self.shared.clone()).map_err(|error| fabric_error(&error))?;
        Ok(Arc::new(domain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_finite_whatever_is_asked_for() {
        let asked = Timing { acknowledgement: 0, retries: 255, receiver_retries: 7, receiver_wait: 40 };
        let expected = Timing { acknowledgement: 1, retries: 6, receiver_retries: 6, receiver_wait: 31 };
        assert_eq!(asked.clamped(), expected);
        assert_eq!(Timing::default().clamped(), Timing::default());
    }
}
