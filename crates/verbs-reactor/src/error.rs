//! Errors of libibverbs and of devices.

use std::{ffi::c_int, fmt, io, ptr::NonNull, sync::Arc};

use tensorwire_memory::Limit;

use tensorwire_fabric::{FabricError, FabricKind, LossCause};

use super::{DeviceEvent, Setting, SettingError};

/// A failure of libibverbs, of a device, or of a setting.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library is not installed, or lacks functions.
    #[error(
        "cannot open libibverbs.so.1 ({reason}): for RDMA, install rdma-core's libraries (Debian: libibverbs1 \
         and ibverbs-providers)"
    )]
    NoLibrary {
        /// The loader's message.
        reason: Arc<str>,
    },
    /// The library is installed, but the kernel has no RDMA support loaded.
    #[error(
        "the kernel has no RDMA support loaded: load ib_uverbs and the device's driver (for Soft-RoCE: rdma_rxe)"
    )]
    NoKernelSupport,
    /// There is no device of that name, or no device at all.
    #[error("there is no RDMA device {name}; present are: {present}")]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The names of the devices that are present.
        present: Names,
    },
    /// The port is not active, so it carries no traffic.
    #[error(
        "port {port} of RDMA device {device} is not active (state {state}): check its link and its network interface"
    )]
    PortDown {
        /// The device.
        device: String,
        /// Its port, counted from 1.
        port: u8,
        /// `enum ibv_port_state`.
        state: u32,
    },
    /// An Ethernet port without a RoCE v2 address.
    #[error(
        "port {port} of RDMA device {device} has no RoCE v2 address: give its network interface an IP address"
    )]
    NoAddress {
        /// The device.
        device: String,
        /// Its port, counted from 1.
        port: u8,
    },
    /// There are several devices, and none of them can be used.
    #[error("none of the RDMA devices can be used: {reasons}", reasons = reasons.0.join("; "))]
    NoneUsable {
        /// For each device, the reason against it.
        reasons: Names,
    },
    /// A setting that no device can fulfil.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// A setting that this device cannot fulfil.
    #[error("{value} does not fit RDMA device {device}: {remedy}; it is set by {setting}")]
    Unfit {
        /// The setting.
        setting: Setting,
        /// Its value.
        value: String,
        /// The device.
        device: String,
        /// The values that the device accepts.
        remedy: String,
    },
    /// The device failed, or its port went down or was changed, while it was in use.
    #[error(
        "RDMA device {device} cannot be used through its port {port}: {event}; its connections are ended, and it is \
         opened again when the port is active"
    )]
    DeviceLost {
        /// The device.
        device: String,
        /// The port that was in use, counted from 1.
        port: u8,
        /// The event that ended its use.
        event: DeviceEvent,
    },
    /// A call of the library failed.
    #[error("{call} failed on RDMA device {device}: {source}{hint}", hint = Hint { call, source })]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        device: String,
        /// The kernel's or the library's reason.
        source: Arc<io::Error>,
    },
}

/// Device names, for a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("none") } else { f.write_str(&self.0.join(", ")) }
    }
}

/// The remedy for failures that have a usual cause.
struct Hint<'error> {
    call: &'static str,
    source: &'error io::Error,
}

impl fmt::Display for Hint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.call, self.source.raw_os_error()) {
            ("ibv_reg_mr", Some(libc::ENOMEM | libc::EAGAIN)) => {
                write!(
                    f,
                    ": the limit on locked memory is {}: raise it with ulimit -l or LimitMEMLOCK=",
                    MemoryLock::now()
                )
            }
            // If libibverbs may not open the device's file, it tries others and reports the error of those.
            ("ibv_open_device", Some(libc::ENOENT)) => {
                f.write_str(": check that /dev/infiniband/uverbs* are there, and the rights on them")
            }
            (_, Some(libc::EACCES | libc::EPERM)) => {
                f.write_str(": check the rights on /dev/infiniband/uverbs*")
            }
            _ => Ok(()),
        }
    }
}

/// The process's limit on locked memory.
struct MemoryLock(Option<u64>);

impl MemoryLock {
    fn now() -> Self {
        Self(Limit::LockedMemory.value())
    }
}

impl fmt::Display for MemoryLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "{} KiB", bytes >> 10),
            None => f.write_str("not what stands in the way here"),
        }
    }
}

/// For functions that return NULL and set `errno`.
pub(crate) fn pointer<T>(result: *mut T, call: &'static str, device: &str) -> Result<NonNull<T>, VerbsError> {
    NonNull::new(result).ok_or_else(|| refused(io::Error::last_os_error(), call, device))
}

/// For functions that return 0 or the error number.
pub(crate) fn zero(result: c_int, call: &'static str, device: &str) -> Result<(), VerbsError> {
    if result == 0 { Ok(()) } else { Err(refused(io::Error::from_raw_os_error(result.abs()), call, device)) }
}

pub(crate) fn refused(source: io::Error, call: &'static str, device: &str) -> VerbsError {
    VerbsError::Call { call, device: device.to_owned(), source: Arc::new(source) }
}

/// The error of the fabric contract for this error, with device and remedy.
pub(crate) fn fabric_error(error: &VerbsError) -> FabricError {
    match error {
        VerbsError::Call { call, device, source } => {
            let hint = Hint { call, source };
            let detail = format!("{source} on RDMA device {device}{hint}");
            FabricError::device(FabricKind::VERBS, call, io::Error::new(source.kind(), detail))
        }
        other => FabricError::device(
            FabricKind::VERBS,
            "looking for a device",
            io::Error::other(other.to_string()),
        ),
    }
}

/// The error of operations that were under way when their device was lost by `error`.
pub(crate) fn loss(error: &VerbsError) -> FabricError {
    let (kind, cause) = (FabricKind::VERBS, LossCause::DeviceLost);
    FabricError::PeerLost { kind, cause, detail: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_registration_names_the_limit_to_raise() {
        let error = zero(libc::ENOMEM, "ibv_reg_mr", "mlx5_0").unwrap_err().to_string();
        assert!(error.contains("mlx5_0") && error.contains("locked memory"), "{error}");
    }

    #[test]
    fn a_device_that_cannot_be_opened_names_its_file() {
        for errno in [libc::ENOENT, libc::EACCES] {
            let source = io::Error::from_raw_os_error(errno);
            let error = refused(source, "ibv_open_device", "mlx5_0").to_string();
            assert!(error.contains("rights on") && error.contains("/dev/infiniband/uverbs*"), "{error}");
        }
    }

    #[test]
    fn the_remedy_survives_as_a_fabric_error() {
        let error = fabric_error(&zero(libc::ENOMEM, "ibv_reg_mr", "mlx5_0").unwrap_err()).to_string();
        assert!(error.starts_with("verbs: ibv_reg_mr failed:") && error.contains("locked memory"), "{error}");
        assert!(error.contains("mlx5_0"), "{error}");
    }

    #[test]
    fn an_unknown_device_is_told_which_there_are() {
        let present = Names(vec!["rxe0".into(), "rxe1".into()]);
        let error = VerbsError::UnknownDevice { name: "mlx5_0".into(), present }.to_string();
        assert_eq!(error, "there is no RDMA device mlx5_0; present are: rxe0, rxe1");
    }
}
