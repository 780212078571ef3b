//! The device below a fabric, which may be lost and come back.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{Capabilities, FabricError, Runtime};

use super::{
    CallCounters, DeviceEvent, GidEntry, Mtu, Port, Rdma, VerbsError,
    opened::{Child, Opened},
    watch,
};

/// A lost device is looked for at most this often, and only when a connection is wanted.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// One port of one device: opened, or lost and to be opened again. Everything that is made on the device has this.
#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) settings: Rdma,
    pub(super) counters: Arc<CallCounters>,
    pub(super) device: String,
    /// As they were when the device was opened first.
    pub(super) port: Port,
    pub(super) source: GidEntry,
    pub(super) mtu: Mtu,
    pub(super) on_demand: bool,
    /// Of queue pairs whose peer can do all that this side can.
    pub(super) capabilities: Capabilities,
    state: Mutex<Device>,
}

#[derive(Debug)]
enum Device {
    Open(Arc<Opened>),
    /// Lost, and when it may be looked for.
    Lost(VerbsError, Duration),
}

impl Adapter {
    /// Opens the device and port that `settings` leave.
    pub(super) fn open(runtime: Arc<dyn Runtime>, settings: &Rdma) -> Result<Arc<Self>, VerbsError> {
        let opened = Arc::new(Opened::choose(settings)?);
        let adapter = Arc::new(Self {
            runtime,
            settings: settings.clone(),
            counters: Arc::default(),
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
    /// [`VerbsError::DeviceLost`]: why it was lost; it has not come back.
    pub(super) fn opened(self: &Arc<Self>) -> Result<Arc<Opened>, VerbsError> {
        let mut state = self.lock();
        let lost = match &*state {
            Device::Open(opened) => match opened.lost() {
                None => return Ok(opened.clone()),
                Some(lost) => lost, // this moment
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

    /// Why the device is lost, if it is.
    pub(super) fn lost(&self) -> Option<VerbsError> {
        match &*self.lock() {
            Device::Open(opened) => opened.lost(),
            Device::Lost(lost, _) => Some(lost.clone()),
        }
    }

    /// Asks the device whether its port is still active and has its address, and gives it up if not. Gives why it is lost.
    pub(super) fn ask(&self) -> Option<VerbsError> {
        let opened = match &*self.lock() {
            Device::Open(opened) => opened.clone(),
            Device::Lost(lost, _) => return Some(lost.clone()),
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

/// Of queue pairs: pieces are counted by the link, which holds back what the device's queue has no room for.
fn capabilities(opened: &Opened) -> Capabilities {
    Capabilities {
        vectored: true,
        read: opened.reads_started().min(opened.reads_served()) > 0,
        ..Capabilities::WRITES
    }
}
