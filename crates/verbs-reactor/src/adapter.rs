//! The device that a fabric uses. It can be lost and opened again.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tensorwire_fabric::{Capabilities, FabricError, Runtime};

use super::{
    DeviceEvent, GidEntry, Mtu, Port, Rdma, VerbsError,
    opened::{Child, Opened},
    watch,
};

/// A lost device is opened again at most this often, and only for a connection attempt.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// One port of one device, which is open or lost. Every object that is made on the device refers to this.
#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) settings: Rdma,
    pub(super) device: String,
    /// The port at the first opening of the device; so are the next three.
    pub(super) port: Port,
    pub(super) source: GidEntry,
    pub(super) mtu: Mtu,
    pub(super) on_demand: bool,
    /// Capabilities of a queue pair whose peer has the same capabilities.
    pub(super) capabilities: Capabilities,
    state: Mutex<Device>,
}

#[derive(Debug)]
enum Device {
    Open(Arc<Opened>),
    /// The cause of the loss, and the time from which the device may be opened again.
    Lost(VerbsError, Duration),
}

impl Adapter {
    /// Opens the device and port that `settings` select.
    pub(super) fn open(runtime: Arc<dyn Runtime>, settings: &Rdma) -> Result<Arc<Self>, VerbsError> {
        let opened = Arc::new(Opened::choose(settings)?);
        let adapter = Arc::new(Self {
            runtime,
            settings: settings.clone(),
            device: opened.context.name().to_owned(),
            port: opened.port,
            source: opened.source,
            mtu: opened.mtu,
            on_demand: opened.user_pages.on_demand(),
            capabilities: capabilities(&opened),
            state: Mutex::new(Device::Open(opened.clone())),
        });
        adapter.look_after(&opened)?;
        Ok(adapter)
    }

    /// The device, opened again if it was lost and its port is active.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`]: the device is lost and could not be opened again.
    pub(super) fn opened(self: &Arc<Self>) -> Result<Arc<Opened>, VerbsError> {
        let mut state = self.lock();
        let lost = match &*state {
            Device::Open(opened) => match opened.lost() {
                None => return Ok(opened.clone()),
                Some(lost) => lost, // lost, and `device_lost` was not called yet
            },
            Device::Lost(lost, next) if self.runtime.now() < *next => return Err(lost.clone()),
            Device::Lost(lost, _) => lost.clone(),
        };
        match self.open_again() {
            Ok(opened) => {
                *state = Device::Open(opened.clone());
                drop(state);
                self.look_after(&opened)?;
                Ok(opened)
            }
            Err(reason) => {
                log!(DEBUG, %reason, "a lost RDMA device cannot be opened again yet");
                *state = Device::Lost(lost.clone(), self.runtime.now() + PROBE_INTERVAL);
                Err(lost)
            }
        }
    }

    /// The cause if the device is lost.
    pub(super) fn lost(&self) -> Option<VerbsError> {
        match &*self.lock() {
            Device::Open(opened) => opened.lost(),
            Device::Lost(lost, _) => Some(lost.clone()),
        }
    }

    /// Asks the device whether its port is still active and has its address; if not, the device is lost. Returns the
    /// cause if it is lost.
    pub(super) fn ask(&self) -> Option<VerbsError> {
        let opened = match &*self.lock() {
            Device::Open(opened) => opened.clone(),
            Device::Lost(lost, _) => return Some(lost.clone()),
        };
        let event = opened.look_again(DeviceEvent::AddressChange { port: opened.port.number });
        opened.lost().or_else(|| Some(opened.lose(event?)))
    }

    /// Opens the same port of the same device. Its address may have changed.
    fn open_again(&self) -> Result<Arc<Opened>, VerbsError> {
        let (device, port) = (Some(self.device.clone()), Some(self.port.number));
        Ok(Arc::new(Opened::choose(&Rdma { device, port, ..self.settings.clone() })?))
    }

    fn look_after(self: &Arc<Self>, opened: &Arc<Opened>) -> Result<(), VerbsError> {
        let me = Arc::downgrade(self);
        opened.adopt(me)?;
        watch::spawn(&*self.runtime, opened)
    }

    fn lock(&self) -> MutexGuard<'_, Device> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Child for Adapter {
    fn device_lost(&self, _failure: &FabricError) {
        let mut state = self.lock();
        let Device::Open(opened) = &*state else { return };
        let Some(lost) = opened.lost() else { return };
        let before = mem::replace(&mut *state, Device::Lost(lost, self.runtime.now()));
        drop(state);
        drop(before);
    }
}

/// The capabilities of queue pairs on the device. They name no piece size: the link splits writes itself, and holds
/// back what the device's queue has no room for.
fn capabilities(opened: &Opened) -> Capabilities {
    let mut capabilities = Capabilities::WRITES;
    capabilities.vectored = true;
    capabilities.read = opened.reads_started().min(opened.reads_served()) > 0;
    capabilities
}
