//! The channel of a device's asynchronous events.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use super::{Context, DeviceEvent, VerbsError, completion::set_nonblocking, error::refused, sys};

/// The channel of an open device's asynchronous events. Its descriptor is readable when there is one. Keeps the device
/// open.
#[derive(Debug)]
pub(super) struct EventChannel(Arc<Context>);

impl EventChannel {
    /// The events of `context`. Makes the descriptor non-blocking.
    pub(super) fn new(context: Arc<Context>) -> Result<Self, VerbsError> {
        set_nonblocking(context.event_descriptor())
            .map_err(|error| refused(error, "fcntl", context.name()))?;
        Ok(Self(context))
    }

    /// Takes the next event, if there is one. Acknowledges it at once, so that the object that it is about can be
    /// destroyed.
    pub(super) fn take(&self) -> Result<Option<DeviceEvent>, VerbsError> {
        let mut raw = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is open while `self` lives, and `raw` is writable and as large as an event.
        let result = unsafe { self.0.functions().ibv_get_async_event(self.0.raw(), raw.as_mut_ptr()) };
        if result != 0 {
            let error = io::Error::last_os_error(); // the function returns -1 and sets errno
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(refused(error, "ibv_get_async_event", self.0.name())),
            };
        }
        // SAFETY: all-zero bytes are a valid event, and the call filled it in.
        let mut raw = unsafe { raw.assume_init() };
        // SAFETY: the library has set the member of the event's type. A queue pair exists until the event about it is
        // acknowledged, which is below.
        let event = unsafe { DeviceEvent::parse(&raw) };
        // SAFETY: the event was taken above, and is acknowledged only here.
        unsafe { self.0.functions().ibv_ack_async_event(&raw mut raw) };
        Ok(Some(event))
    }
}

impl AsRawFd for EventChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.event_descriptor()
    }
}
