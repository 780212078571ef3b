//! Asynchronous events of a device, its ports, queue pairs and completion queues.

use std::fmt;

use super::sys;

/// An asynchronous event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceEvent {
    /// The device failed: nothing on it works any more.
    DeviceFatal,
    /// The port lost its link.
    PortDown {
        /// Counted from 1.
        port: u8,
    },
    /// The port got its link.
    PortActive {
        /// Counted from 1.
        port: u8,
    },
    /// The port's addresses changed.
    AddressChange {
        /// Counted from 1.
        port: u8,
    },
    /// The port's local identifier changed.
    LocalIdentifierChange {
        /// Counted from 1.
        port: u8,
    },
    /// The port's partition keys changed.
    PartitionKeyChange {
        /// Counted from 1.
        port: u8,
    },
    /// The subnet manager asks to repeat all subscriptions and registrations with it.
    ClientReregister {
        /// Counted from 1.
        port: u8,
    },
    /// The port's subnet has another manager.
    SubnetManagerChange {
        /// Counted from 1.
        port: u8,
    },
    /// A queue pair failed.
    QueuePairFatal {
        /// Its number.
        number: u32,
    },
    /// A queue pair refused a request of the peer's.
    QueuePairRequest {
        /// Its number.
        number: u32,
    },
    /// A queue pair refused an access of the peer's.
    QueuePairAccess {
        /// Its number.
        number: u32,
    },
    /// A completion queue overflowed, or failed for another reason.
    CompletionQueue {
        /// The address of the library's structure, which identifies the queue.
        queue: usize,
    },
    /// Another event (`enum ibv_event_type`), which this crate ignores.
    Other(u32),
}

impl DeviceEvent {
    /// Parses an event of the library.
    ///
    /// # Safety
    /// The member of `raw.element` that belongs to `raw.event_type` must be set. If the event is about a queue pair,
    /// that queue pair must exist.
    pub(super) unsafe fn parse(raw: &sys::ibv_async_event) -> Self {
        // SAFETY: called for the types below only, to which this member belongs, so that it is set.
        let port = || u8::try_from(unsafe { raw.element.port_num }).unwrap_or(0);
        // SAFETY: called for the types below only, to which this member belongs, so that it is set and the queue pair
        // exists.
        let number = || unsafe { (*raw.element.qp).qp_num };
        match raw.event_type {
            sys::IBV_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            sys::IBV_EVENT_PORT_ERR => Self::PortDown { port: port() },
            sys::IBV_EVENT_PORT_ACTIVE => Self::PortActive { port: port() },
            sys::IBV_EVENT_GID_CHANGE => Self::AddressChange { port: port() },
            sys::IBV_EVENT_LID_CHANGE => Self::LocalIdentifierChange { port: port() },
            sys::IBV_EVENT_PKEY_CHANGE => Self::PartitionKeyChange { port: port() },
            sys::IBV_EVENT_CLIENT_REREGISTER => Self::ClientReregister { port: port() },
            sys::IBV_EVENT_SM_CHANGE => Self::SubnetManagerChange { port: port() },
            sys::IBV_EVENT_QP_FATAL => Self::QueuePairFatal { number: number() },
            sys::IBV_EVENT_QP_REQ_ERR => Self::QueuePairRequest { number: number() },
            sys::IBV_EVENT_QP_ACCESS_ERR => Self::QueuePairAccess { number: number() },
            // SAFETY: this member belongs to this type, so that it is set; the pointer is compared, not followed.
            sys::IBV_EVENT_CQ_ERR => Self::CompletionQueue { queue: unsafe { raw.element.cq } as usize },
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for DeviceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeviceFatal => f.write_str("the device failed (DEVICE_FATAL)"),
            Self::PortDown { port } => write!(f, "port {port} went down (PORT_ERR)"),
            Self::PortActive { port } => write!(f, "port {port} became active (PORT_ACTIVE)"),
            Self::AddressChange { port } => write!(f, "the addresses of port {port} changed (GID_CHANGE)"),
            Self::LocalIdentifierChange { port } => {
                write!(f, "the local identifier of port {port} changed (LID_CHANGE)")
            }
            Self::PartitionKeyChange { port } => {
                write!(f, "the partition keys of port {port} changed (PKEY_CHANGE)")
            }
            Self::ClientReregister { port } => {
                write!(f, "the subnet manager of port {port} wants registrations again (CLIENT_REREGISTER)")
            }
            Self::SubnetManagerChange { port } => {
                write!(f, "port {port} has another subnet manager (SM_CHANGE)")
            }
            Self::QueuePairFatal { number } => write!(f, "queue pair {number} failed (QP_FATAL)"),
            Self::QueuePairRequest { number } => {
                write!(f, "queue pair {number} refused a request of the peer (QP_REQ_ERR)")
            }
            Self::QueuePairAccess { number } => {
                write!(f, "queue pair {number} refused an access of the peer (QP_ACCESS_ERR)")
            }
            Self::CompletionQueue { .. } => f.write_str("a completion queue failed (CQ_ERR)"),
            Self::Other(number) => write!(f, "event {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_port(event_type: u32) -> DeviceEvent {
        let element = sys::ibv_async_event__bindgen_ty_1 { port_num: 2 };
        // SAFETY: the member is set, and none of the events is about a queue pair.
        unsafe { DeviceEvent::parse(&sys::ibv_async_event { element, event_type }) }
    }

    #[test]
    fn events_of_ports_name_the_port() {
        for (raw, parsed) in [
            (sys::IBV_EVENT_PORT_ERR, DeviceEvent::PortDown { port: 2 }),
            (sys::IBV_EVENT_PORT_ACTIVE, DeviceEvent::PortActive { port: 2 }),
            (sys::IBV_EVENT_GID_CHANGE, DeviceEvent::AddressChange { port: 2 }),
            (sys::IBV_EVENT_LID_CHANGE, DeviceEvent::LocalIdentifierChange { port: 2 }),
            (sys::IBV_EVENT_PKEY_CHANGE, DeviceEvent::PartitionKeyChange { port: 2 }),
            (sys::IBV_EVENT_CLIENT_REREGISTER, DeviceEvent::ClientReregister { port: 2 }),
            (sys::IBV_EVENT_SM_CHANGE, DeviceEvent::SubnetManagerChange { port: 2 }),
        ] {
            assert_eq!(of_port(raw), parsed);
            assert!(parsed.to_string().contains("port 2"), "{parsed}");
        }
    }

    #[test]
    fn unknown_events_are_kept_as_they_are() {
        for raw in [sys::IBV_EVENT_COMM_EST, sys::IBV_EVENT_SQ_DRAINED, 4711] {
            assert_eq!(of_port(raw), DeviceEvent::Other(raw));
        }
        assert_eq!(of_port(sys::IBV_EVENT_DEVICE_FATAL), DeviceEvent::DeviceFatal);
    }
}
