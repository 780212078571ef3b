//! The fabric on an RDMA device.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{Capabilities, Domain, Fabric, FabricError, FabricKind, Runtime, Wait, wait::Spinner};

use super::{
    Counters, DeviceEvent, GidEntry, GidKind, LinkLayer, Mtu, Port, Rdma, VerbsCounts, VerbsError,
    domain::VerbsDomain,
    error::fabric_error,
    opened::{Child, Opened, piece_bytes},
    watch,
};

/// Of queue pairs: pieces are counted by the link, which holds back what the device's queue has no room for.
fn capabilities(opened: &Opened) -> Capabilities {
    Capabilities {
        vectored: true,
        read: opened.reads_started().min(opened.reads_served()) > 0,
        ..Capabilities::WRITES
    }
}

/// A device that is lost is looked for at most this often, and only when somebody wants to connect.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// RDMA on one port of one device. Connections are made on a tokio runtime with its I/O driver enabled.
///
/// When the port goes down or the device fails, all its connections end with
/// [`LossCause::DeviceLost`](crate::LossCause::DeviceLost), all memory is deregistered and the device closed, so
/// that it can be removed. Until the port is active again, which is looked after whenever somebody wants to connect,
/// new connections are refused with [`VerbsError::DeviceLost`]; then the device is opened again, and memory
/// registered anew.
#[derive(Debug)]
pub struct VerbsFabric {
    shared: Arc<Shared>,
    spinner: Arc<Spinner>,
}

/// What everything made on the device needs.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) settings: Rdma,
    pub(super) counters: Arc<Counters>,
    pub(super) device: String,
    /// As they were when the device was opened first.
    pub(super) port: Port,
    source: GidEntry,
    mtu: Mtu,
    on_demand: bool,
    /// Of queue pairs whose peer can do all that this side can.
    pub(super) capabilities: Capabilities,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Open(Arc<Opened>),
    /// Lost, and when it may be looked for.
    Lost(VerbsError, Duration),
}

impl VerbsFabric {
    /// Opens the device that `settings` name. What they leave open is chosen among the active ports of all devices:
    ///
    /// 1. by the kind of the port's best address: RoCE v2 with an IPv4 address or InfiniBand's own, then RoCE v2 with
    ///    a routable IPv6 address, then RoCE v2 with a link-local one (RoCE v1 only if it is named);
    /// 2. by the device's name, in alphabetical order;
    /// 3. by the port's number, then the address's index.
    ///
    /// What was chosen, among what, is logged at info.
    ///
    /// # Errors
    /// Every [`VerbsError`]; each says what is missing.
    pub fn open(runtime: Arc<dyn Runtime>, settings: &Rdma) -> Result<Self, VerbsError> {
        let opened = Arc::new(Opened::choose(settings)?);
        let shared = Arc::new(Shared {
            runtime,
            settings: settings.clone(),
            counters: Arc::default(),
            device: opened.context.name().to_owned(),
            port: opened.port,
            source: opened.source,
            mtu: opened.mtu,
            on_demand: opened.user_pages.on_demand(),
            capabilities: capabilities(&opened),
            state: Mutex::new(State::Open(opened.clone())),
        });
        shared.look_after(&opened)?;
        Ok(Self { shared, spinner: Spinner::new(Wait::default()) })
    }

    /// How drivers wait, for domains opened after this. At most one driver of this fabric spins at a time; spinning
    /// polls the completion queue.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.spinner = Spinner::new(wait);
        self
    }

    /// What its queue pairs have asked of the device so far.
    pub fn counts(&self) -> VerbsCounts {
        self.shared.counters.read()
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.shared.device
    }

    /// The port that connections use, as it was when the device was opened.
    pub fn port(&self) -> Port {
        self.shared.port
    }

    /// The address that connections come from, as it was when the device was opened.
    pub fn source(&self) -> GidEntry {
        self.shared.source
    }

    /// Whether users' own memory is registered without being pinned (see [`OnDemandPaging`](super::OnDemandPaging)), as
    /// it was when the device was opened.
    pub fn pages_on_demand(&self) -> bool {
        self.shared.on_demand
    }

    /// The largest packet on this side, as it was when the device was opened.
    pub fn mtu(&self) -> Mtu {
        self.shared.mtu
    }
}

impl Shared {
    /// The device, opened again if it was lost and its port is active.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`]: why it was lost; it has not come back.
    pub(super) fn opened(self: &Arc<Self>) -> Result<Arc<Opened>, VerbsError> {
        let mut state = self.lock();
        let lost = match &*state {
            State::Open(opened) => match opened.lost() {
                None => return Ok(opened.clone()),
                Some(lost) => lost, // this moment
            },
            State::Lost(lost, next) if self.runtime.now() < *next => return Err(lost.clone()),
            State::Lost(lost, _) => lost.clone(),
        };
        match self.open_again() {
            Ok(opened) => {
                *state = State::Open(opened.clone());
                drop(state);
                self.look_after(&opened)?;
                Ok(opened)
            }
            Err(reason) => {
                log!(DEBUG, %reason, "an RDMA device is not back yet");
                *state = State::Lost(lost.clone(), self.runtime.now() + PROBE_INTERVAL);
                Err(lost)
            }
        }
    }

    /// Why the device is lost, if it is.
    pub(super) fn lost(&self) -> Option<VerbsError> {
        match &*self.lock() {
            State::Open(opened) => opened.lost(),
            State::Lost(lost, _) => Some(lost.clone()),
        }
    }

    /// Asks the device whether its port is still active and has its address, and gives it up if not. Gives why it is lost.
    pub(super) fn ask(&self) -> Option<VerbsError> {
        let opened = match &*self.lock() {
            State::Open(opened) => opened.clone(),
            State::Lost(lost, _) => return Some(lost.clone()),
        };
        let event = opened.look_again(DeviceEvent::AddressChange { port: opened.port.number });
        opened.lost().or_else(|| Some(opened.lose(event?)))
    }

    /// The same port; its address may be another.
    fn open_again(&self) -> Result<Arc<Opened>, VerbsError> {
        let (device, port) = (Some(self.device.clone()), Some(self.port.number));
        Ok(Arc::new(Opened::choose(&Rdma { device, port, ..self.settings.clone() })?))
    }

    fn look_after(self: &Arc<Self>, opened: &Arc<Opened>) -> Result<(), VerbsError> {
        let me = Arc::downgrade(self);
        opened.adopt(me)?;
        watch::spawn(&*self.runtime, opened)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Child for Shared {
    fn device_lost(&self, _failure: &FabricError) {
        let mut state = self.lock();
        let State::Open(opened) = &*state else { return };
        let Some(lost) = opened.lost() else { return };
        let before = mem::replace(&mut *state, State::Lost(lost, self.runtime.now()));
        drop(state);
        drop(before);
    }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::VERBS
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { piece_bytes_max: piece_bytes(&self.shared.port).into(), ..self.shared.capabilities }
    }

    /// The kind of network, for InfiniBand with its subnet. Whether two RoCE ports reach each other only a
    /// connection tells.
    fn reach(&self) -> Vec<u8> {
        match (self.shared.port.link, self.shared.source.kind) {
            (LinkLayer::InfiniBand, _) => [b"infiniband-", &self.shared.source.gid.0[..8]].concat(),
            (_, GidKind::RoceV1) => b"roce-v1".to_vec(),
            _ => b"roce-v2".to_vec(),
        }
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let domain = VerbsDomain::new(self.shared.clone(), self.spinner.clone())
            .map_err(|error| fabric_error(&error))?;
        Ok(Arc::new(domain))
    }
}
