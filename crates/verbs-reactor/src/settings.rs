//! Settings of the choice of a device and of its connections: each setting with its names and its range.

use std::{fmt, ops::RangeInclusive};

/// Default of the work requests that a connection may have on its send queue.
const QUEUE_DEPTH: u32 = 1024;

/// Settings of the choice of a device and of its connections. A field that is `None` has its default, or is chosen
/// among the active ports of all devices: by the kind of the port's best address, then by the device's name.
///
/// ```
/// use tensorwire_verbs_reactor::{Mtu, Rdma};
///
/// let wishes = Rdma { mtu: Some(Mtu::Bytes1024), ..Rdma::default() };
/// let settings = wishes.or(Rdma::from_environment()?);
/// # Ok::<(), tensorwire_verbs_reactor::SettingError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rdma {
    /// The device's name. Default: that of the active port with the best address.
    pub device: Option<String>,
    /// Its port, counted from 1. Default: the first active one with the best address.
    pub port: Option<u8>,
    /// The entry of the port's address table with the source address of connections. Default: RoCE v2 with an IPv4
    /// address before a routable IPv6 address, link-local last.
    pub gid_index: Option<u8>,
    /// The entry of the port's table of partition keys. Default 0.
    pub pkey_index: Option<u16>,
    /// The most writes of a connection that are posted to the device at once, 4 to 65535; further ones wait. Default
    /// 1024. It is lower if the device allows less or the connection asks for less. It does not limit what a peer may
    /// send: that is the connection's own receive depth.
    pub queue_depth: Option<u32>,
    /// How long to wait for an acknowledgement, as an exponent `n` from 1 to 31: 4.096 µs · 2ⁿ. Devices may wait up to
    /// four times as long. 0, which would be for ever, is not allowed. Default 16, which is 0.27 s.
    pub timeout: Option<u8>,
    /// Retries after a timeout, 0 to 7. Default 6: with the default timeout, an operation fails 2 to 8 s after its peer
    /// is gone. 7 counts as 6, because Soft-RoCE retries for ever with 7, and a dead peer would never be noticed.
    pub retry_count: Option<u8>,
    /// Retries when the peer has no receive posted, 0 to 6; 7, which would be for ever, is not allowed. Default 6. Flow
    /// control ensures that there is always a receive.
    pub receiver_retry_count: Option<u8>,
    /// The service level of packets, 0 to 7. Default 0.
    pub service_level: Option<u8>,
    /// The largest packet, at most the port's. A connection uses the smaller one of both sides. Default: the port's.
    pub mtu: Option<Mtu>,
    /// The traffic class (DSCP and ECN bits) of packets. Default 0. On InfiniBand this and
    /// [`gid_index`](field@Self::gid_index) give packets a global route header; set them at both ends.
    pub traffic_class: Option<u8>,
    /// Whether users' own memory is pinned. Default [`OnDemandPaging::Auto`].
    pub on_demand_paging: Option<OnDemandPaging>,
}

impl Rdma {
    /// These settings, with `other` for those that are `None`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            device: self.device.or(other.device),
            port: self.port.or(other.port),
            gid_index: self.gid_index.or(other.gid_index),
            pkey_index: self.pkey_index.or(other.pkey_index),
            queue_depth: self.queue_depth.or(other.queue_depth),
            timeout: self.timeout.or(other.timeout),
            retry_count: self.retry_count.or(other.retry_count),
            receiver_retry_count: self.receiver_retry_count.or(other.receiver_retry_count),
            service_level: self.service_level.or(other.service_level),
            mtu: self.mtu.or(other.mtu),
            traffic_class: self.traffic_class.or(other.traffic_class),
            on_demand_paging: self.on_demand_paging.or(other.on_demand_paging),
        }
    }

    /// Checks that each setting is in its range. The device's own limits are checked when it is opened.
    ///
    /// # Errors
    /// [`SettingError::Invalid`].
    pub fn check(&self) -> Result<(), SettingError> {
        let numbers = [
            (Setting::Port, self.port.map(u32::from)),
            (Setting::QueueDepth, self.queue_depth),
            (Setting::Timeout, self.timeout.map(u32::from)),
            (Setting::RetryCount, self.retry_count.map(u32::from)),
            (Setting::ReceiverRetryCount, self.receiver_retry_count.map(u32::from)),
            (Setting::ServiceLevel, self.service_level.map(u32::from)),
        ];
        for (setting, value) in numbers {
            if let Some(value) = value.filter(|value| !setting.range().contains(value)) {
                return Err(setting.invalid(setting.field(), &value.to_string()));
            }
        }
        match &self.device {
            Some(name) if name.is_empty() => Err(Setting::Device.invalid(Setting::Device.field(), name)),
            _ => Ok(()),
        }
    }

    pub(super) fn queue_depth(&self) -> u32 {
        self.queue_depth.unwrap_or(QUEUE_DEPTH)
    }

    /// The settings of timeouts and retries.
    pub(super) fn timing(&self) -> Timing {
        let Timing { acknowledgement, retries, receiver_retries, .. } = Timing::default();
        Timing {
            acknowledgement: self.timeout.unwrap_or(acknowledgement).clamp(1, 31),
            retries: self.retry_count.unwrap_or(retries).min(RETRIES_MAX),
            receiver_retries: self.receiver_retry_count.unwrap_or(receiver_retries).min(RETRIES_MAX),
            ..Timing::default()
        }
    }
}

/// The most retries. InfiniBand allows 7, with which Soft-RoCE retries for ever.
const RETRIES_MAX: u8 = 6;

/// Timeouts and retries of a queue pair, in the device's units. All are finite, so that a dead peer is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Time to wait for an acknowledgement: 4.096 µs · 2ⁿ.
    pub(crate) acknowledgement: u8,
    /// Retries after a timeout.
    pub(crate) retries: u8,
    /// Retries when the peer has no receive posted. Flow control ensures that there is one.
    pub(crate) receiver_retries: u8,
    /// How long a peer waits before it retries because this side has no receive, in the code of the InfiniBand
    /// specification: 12 is 0.64 ms.
    pub(crate) receiver_wait: u8,
}

impl Default for Timing {
    fn default() -> Self {
        Self { acknowledgement: 16, retries: RETRIES_MAX, receiver_retries: RETRIES_MAX, receiver_wait: 12 }
    }
}

/// Bytes of the largest packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    const ALL: [Self; 5] =
        [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// The size with this number of bytes, if there is one.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// Bytes.
    pub fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// As `enum ibv_mtu`, 1 to 5.
    pub(crate) fn code(self) -> u32 {
        self as u32 + 1
    }

    /// The size with this value of `enum ibv_mtu`, if there is one.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// Names one setting of [`Rdma`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setting {
    /// [`Rdma::device`].
    Device,
    /// [`Rdma::port`].
    Port,
    /// [`Rdma::gid_index`].
    GidIndex,
    /// [`Rdma::pkey_index`].
    PkeyIndex,
    /// [`Rdma::queue_depth`](field@Rdma::queue_depth).
    QueueDepth,
    /// [`Rdma::timeout`].
    Timeout,
    /// [`Rdma::retry_count`].
    RetryCount,
    /// [`Rdma::receiver_retry_count`].
    ReceiverRetryCount,
    /// [`Rdma::service_level`].
    ServiceLevel,
    /// [`Rdma::mtu`].
    Mtu,
    /// [`Rdma::traffic_class`].
    TrafficClass,
    /// [`Rdma::on_demand_paging`].
    OnDemandPaging,
}

impl Setting {
    /// All settings.
    pub const ALL: [Self; 12] = [
        Self::Device,
        Self::Port,
        Self::GidIndex,
        Self::PkeyIndex,
        Self::QueueDepth,
        Self::Timeout,
        Self::RetryCount,
        Self::ReceiverRetryCount,
        Self::ServiceLevel,
        Self::Mtu,
        Self::TrafficClass,
        Self::OnDemandPaging,
    ];

    /// The field of [`Rdma`].
    pub fn field(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Port => "port",
            Self::GidIndex => "gid_index",
            Self::PkeyIndex => "pkey_index",
            Self::QueueDepth => "queue_depth",
            Self::Timeout => "timeout",
            Self::RetryCount => "retry_count",
            Self::ReceiverRetryCount => "receiver_retry_count",
            Self::ServiceLevel => "service_level",
            Self::Mtu => "mtu",
            Self::TrafficClass => "traffic_class",
            Self::OnDemandPaging => "on_demand_paging",
        }
    }

    /// The environment variable of this project.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Device => "TENSORWIRE_RDMA_DEVICE",
            Self::Port => "TENSORWIRE_RDMA_PORT",
            Self::GidIndex => "TENSORWIRE_RDMA_GID_INDEX",
            Self::PkeyIndex => "TENSORWIRE_RDMA_PKEY_INDEX",
            Self::QueueDepth => "TENSORWIRE_RDMA_QUEUE_DEPTH",
            Self::Timeout => "TENSORWIRE_RDMA_TIMEOUT",
            Self::RetryCount => "TENSORWIRE_RDMA_RETRY_COUNT",
            Self::ReceiverRetryCount => "TENSORWIRE_RDMA_RECEIVER_RETRY_COUNT",
            Self::ServiceLevel => "TENSORWIRE_RDMA_SERVICE_LEVEL",
            Self::Mtu => "TENSORWIRE_RDMA_MTU",
            Self::TrafficClass => "TENSORWIRE_RDMA_TRAFFIC_CLASS",
            Self::OnDemandPaging => "TENSORWIRE_RDMA_ON_DEMAND_PAGING",
        }
    }

    /// The environment variables of TensorFlow's verbs plugin for this setting: the one that its source reads, then the
    /// one in its README if that differs. Empty if the plugin has none.
    pub(super) fn original_variables(self) -> &'static [&'static str] {
        match self {
            Self::Device => &["RDMA_DEVICE"],
            Self::Port => &["RDMA_DEVICE_PORT"],
            Self::GidIndex => &["RDMA_GID_INDEX"],
            Self::PkeyIndex => &["RDMA_PKEY", "RDMA_QP_PKEY_INDEX"],
            Self::QueueDepth => &["RDMA_QUEUE_DEPTH", "RDMA_QP_QUEUE_DEPTH"],
            Self::Timeout => &["RDMA_TIMEOUT", "RDMA_QP_TIMEOUT"],
            Self::RetryCount => &["RDMA_RETRY_CNT", "RDMA_QP_RETRY_COUNT"],
            Self::ReceiverRetryCount | Self::OnDemandPaging => &[],
            Self::ServiceLevel => &["RDMA_SL", "RDMA_QP_SL"],
            Self::Mtu => &["RDMA_MTU", "RDMA_QP_MTU"],
            Self::TrafficClass => &["RDMA_TRAFFIC_CLASS"],
        }
    }

    /// The range of a setting that is a number. A device may allow less.
    pub(super) fn range(self) -> RangeInclusive<u32> {
        match self {
            Self::Port => 1..=254,
            Self::PkeyIndex => 0..=u32::from(u16::MAX),
            Self::QueueDepth => 4..=65_535,
            Self::Timeout => 1..=31,
            Self::RetryCount | Self::ServiceLevel => 0..=7,
            Self::ReceiverRetryCount => 0..=6,
            Self::GidIndex | Self::TrafficClass => 0..=255,
            Self::Mtu => 256..=4096,
            Self::Device | Self::OnDemandPaging => 0..=0,
        }
    }

    /// The error for `value`, found under `name`, which this setting cannot have.
    pub(super) fn invalid(self, name: &'static str, value: &str) -> SettingError {
        let allowed = match self {
            Self::Device => "a device's name, as `ibv_devices` lists it".to_owned(),
            Self::Mtu => "256, 512, 1024, 2048 or 4096".to_owned(),
            Self::OnDemandPaging => "auto, never or require".to_owned(),
            Self::Timeout => {
                "1 to 31, for 4.096 µs · 2ⁿ; 0 would be for ever, and a peer that is gone never noticed"
                    .to_owned()
            }
            _ => format!("{} to {}", self.range().start(), self.range().end()),
        };
        SettingError::Invalid { name, value: value.to_owned(), allowed }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rdma::{}, {}", self.field(), self.variable())?;
        self.original_variables().iter().try_for_each(|name| write!(f, ", {name}"))
    }
}

/// An error in a setting, independent of the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The setting cannot have this value.
    #[error("{name} is `{value}`: use {allowed}")]
    Invalid {
        /// The variable, or the field of [`Rdma`].
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that it may have.
        allowed: String,
    },
    /// Two variables of one setting differ.
    #[error(
        "{first} is `{first_value}` and {second} is `{second_value}`, and both name one setting: set one of them \
         only, or {instead}, which goes before both"
    )]
    Conflict {
        /// One variable.
        first: &'static str,
        /// Its value.
        first_value: String,
        /// The other.
        second: &'static str,
        /// Its value.
        second_value: String,
        /// The variable that overrides both.
        instead: &'static str,
    },
}

impl SettingError {
    /// The variable or field to correct.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Invalid { name, .. } => name,
            Self::Conflict { first, .. } => first,
        }
    }

    /// Its value.
    pub fn value(&self) -> &str {
        match self {
            Self::Invalid { value, .. } => value,
            Self::Conflict { first_value, .. } => first_value,
        }
    }
}

/// Whether users' own memory is registered without being pinned, if the device can page on demand.
///
/// Pinned memory is resident and counts against the limit on locked memory. Memory that is registered on demand is
/// neither resident nor counted, so a mapped file may be larger than main memory and than that limit. The device asks
/// the kernel for each page at its first use, which costs tens of microseconds a page. Memory of pools is resident
/// anyway, and always pinned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OnDemandPaging {
    /// On demand if the device supports it, otherwise pinned.
    #[default]
    Auto,
    /// Pinned.
    Never,
    /// On demand. It is an error if the device does not support it.
    Require,
}

impl OnDemandPaging {
    pub(super) const ALL: [Self; 3] = [Self::Auto, Self::Never, Self::Require];

    /// The value with this name, if there is one.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Its name in settings: `auto`, `never` or `require`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Never => "never",
            Self::Require => "require",
        }
    }
}

impl fmt::Display for OnDemandPaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_finite_whatever_is_asked_for() {
        let asked = Rdma { retry_count: Some(7), timeout: Some(31), ..Rdma::default() };
        asked.check().unwrap();
        assert_eq!(asked.timing(), Timing { acknowledgement: 31, retries: 6, ..Timing::default() });
        let unchecked = Rdma { retry_count: Some(255), timeout: Some(0), ..Rdma::default() };
        assert_eq!(unchecked.timing(), Timing { acknowledgement: 1, retries: 6, ..Timing::default() });
        assert_eq!(Rdma::default().timing(), Timing::default());
    }

    #[test]
    fn settings_of_the_builder_are_checked_as_variables_are() {
        let none = Rdma::default();
        none.check().unwrap();
        for (settings, field, value) in [
            (Rdma { port: Some(0), ..none.clone() }, "port", "0"),
            (Rdma { queue_depth: Some(3), ..none.clone() }, "queue_depth", "3"),
            (Rdma { timeout: Some(0), ..none.clone() }, "timeout", "0"),
            (Rdma { timeout: Some(32), ..none.clone() }, "timeout", "32"),
            (Rdma { retry_count: Some(8), ..none.clone() }, "retry_count", "8"),
            (Rdma { receiver_retry_count: Some(7), ..none.clone() }, "receiver_retry_count", "7"),
            (Rdma { service_level: Some(8), ..none.clone() }, "service_level", "8"),
            (Rdma { device: Some(String::new()), ..none }, "device", ""),
        ] {
            let error = settings.check().unwrap_err();
            assert_eq!((error.name(), error.value()), (field, value), "{error}");
        }
    }

    #[test]
    fn sizes_of_packets_are_told_in_bytes() {
        for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            let mtu = Mtu::from_code(code).unwrap();
            assert_eq!((mtu.bytes(), mtu.code()), (bytes, code));
            assert_eq!(Mtu::from_bytes(bytes), Some(mtu));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6), Mtu::from_bytes(1500)), (None, None, None));
    }

    #[test]
    fn no_two_settings_share_a_name() {
        let names = |setting: Setting| {
            [setting.variable()].into_iter().chain(setting.original_variables().iter().copied())
        };
        let mut all: Vec<_> = Setting::ALL.into_iter().flat_map(names).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
