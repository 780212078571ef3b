//! The task that handles the events of an open device.

use std::{
    io,
    pin::pin,
    sync::{Arc, Weak},
};

use futures::future::{Either, select};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use tensorwire_fabric::Runtime;

use super::{DeviceEvent, VerbsError, error::refused, event_channel::EventChannel, opened::Opened};

/// The reaction to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reaction {
    Nothing,
    /// End one connection.
    Connection,
    /// Check whether port and address are still the same.
    LookAgain,
    /// End all connections and close the device.
    Lose,
}

/// The reaction to `event` on a device whose port `ours` is in use.
fn reaction(event: DeviceEvent, ours: u8) -> Reaction {
    match event {
        DeviceEvent::DeviceFatal => Reaction::Lose,
        DeviceEvent::PortDown { port } if port == ours => Reaction::Lose,
        DeviceEvent::AddressChange { port }
        | DeviceEvent::LocalIdentifierChange { port }
        | DeviceEvent::PartitionKeyChange { port }
        | DeviceEvent::ClientReregister { port }
            if port == ours =>
        {
            Reaction::LookAgain
        }
        DeviceEvent::QueuePairFatal { .. }
        | DeviceEvent::QueuePairRequest { .. }
        | DeviceEvent::QueuePairAccess { .. }
        | DeviceEvent::CompletionQueue { .. } => Reaction::Connection,
        _ => Reaction::Nothing,
    }
}

/// Spawns the task. It ends when the device is lost or nothing uses it any more.
pub(super) fn spawn(runtime: &dyn Runtime, opened: &Arc<Opened>) -> Result<(), VerbsError> {
    let channel = EventChannel::new(opened.context.clone())?;
    let (opened, closing) = (Arc::downgrade(opened), opened.closing.clone());
    let task = async move {
        if let Err(error) = listen(channel, &opened, &closing).await {
            log!(WARN, %error, "cannot watch device events; a lost port will show only when operations fail");
        }
    };
    runtime.spawn("verbs device events", Box::pin(task));
    Ok(())
}

async fn listen(channel: EventChannel, opened: &Weak<Opened>, closing: &Notify) -> Result<(), VerbsError> {
    let failed = |source| refused(source, "epoll_ctl", "events");
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(failed(io::Error::other("device events can be watched on a tokio runtime only")));
    }
    // SAFETY: the descriptor belongs to the context, which `channel` keeps open, and never changes.
    let channel = unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) };
    let channel = channel.map_err(|error| failed(error.into_parts().1))?;
    loop {
        let mut ready = match select(pin!(channel.readable()), pin!(closing.notified())).await {
            Either::Left((ready, _)) => ready.map_err(failed)?,
            Either::Right(_) => return Ok(()),
        };
        let Some(opened) = opened.upgrade() else { return Ok(()) };
        match channel.get_ref().take()? {
            Some(event) => {
                if handle(&opened, event) {
                    return Ok(());
                }
            }
            None => ready.clear_ready(),
        }
    }
}

/// Handles `event`, and returns whether the device is lost.
fn handle(opened: &Opened, event: DeviceEvent) -> bool {
    let device = opened.context.name();
    let cause = match reaction(event, opened.port.number) {
        Reaction::Nothing => {
            log!(DEBUG, device, %event, "an event of an RDMA device");
            None
        }
        Reaction::Connection => {
            log!(WARN, device, %event, "a queue pair or completion queue of an RDMA device failed");
            opened.tell(event);
            None
        }
        Reaction::LookAgain => {
            log!(DEBUG, device, %event, "an event of an RDMA device");
            opened.look_again(event)
        }
        Reaction::Lose => Some(event),
    };
    if let Some(cause) = cause {
        drop(opened.lose(cause));
    }
    cause.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_events_of_the_own_port_end_its_connections() {
        assert_eq!(reaction(DeviceEvent::PortDown { port: 1 }, 1), Reaction::Lose);
        assert_eq!(reaction(DeviceEvent::PortDown { port: 2 }, 1), Reaction::Nothing);
        assert_eq!(reaction(DeviceEvent::AddressChange { port: 1 }, 1), Reaction::LookAgain);
        assert_eq!(reaction(DeviceEvent::AddressChange { port: 2 }, 1), Reaction::Nothing);
        assert_eq!(reaction(DeviceEvent::DeviceFatal, 1), Reaction::Lose);
    }

    #[test]
    fn an_event_of_a_queue_ends_its_connection_alone() {
        for event in [
            DeviceEvent::QueuePairFatal { number: 7 },
            DeviceEvent::QueuePairAccess { number: 7 },
            DeviceEvent::CompletionQueue { queue: 7 },
        ] {
            assert_eq!(reaction(event, 1), Reaction::Connection);
        }
        for event in [DeviceEvent::PortActive { port: 1 }, DeviceEvent::Other(4)] {
            assert_eq!(reaction(event, 1), Reaction::Nothing);
        }
    }
}
