//! How a device is chosen and how connections on it behave: each setting, its names and its range.

use std::{fmt, ops::RangeInclusive};

/// Default of the work requests that a connection may have on its send queue.
const QUEUE_DEPTH: u32 = 1024;

/// How a device is chosen, and how connections on it behave. What is `None` is chosen: see
/// [`VerbsFabric::open`](super::VerbsFabric::open) and the fields.
///
/// ```
/// use tensorwire_verbs_reactor::verbs::{Mtu, Rdma};
///
/// let wishes = Rdma { mtu: Some(Mtu::Bytes1024), ..Rdma::default() };
/// let settings = wishes.or(Rdma::from_environment()?);
/// # Ok::<(), tensorwire_verbs_reactor::verbs::SettingError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rdma {
    /// The device's name. Default: see [`VerbsFabric::open`](super::VerbsFabric::open).
    pub device: Option<String>,
    /// Its port, counted from 1. Default: the first active one with the best address.
    pub port: Option<u8>,
    /// The entry of the port's address table that connections come from. Default: RoCE v2 with an IPv4 address before
    /// a routable IPv6 address, link-local last.
    pub gid_index: Option<u8>,
    /// The entry of the port's table of partition keys. Default 0.
    pub pkey_index: Option<u16>,
    /// Writes of a connection that are posted to the device at once, 4 to 65535; further ones wait. Default 1024. Less
    /// where the device allows less, or where the connection asks for less. How much a peer may send at once is the
    /// connection's own depth: each of its credits has a receive.
    pub queue_depth: Option<u32>,
    /// How long to wait for an acknowledgement, 1 to 31: 4.096 µs · 2ⁿ; devices may wait up to four times as long.
    /// 0 would be for ever. Default 16, which is 0.27 s.
    pub timeout: Option<u8>,
    /// Retries after that, 0 to 7. Default 6: with the timeout's default a peer that is gone fails an operation after
    /// 2 to 8 s. 7 is taken as 6: Soft-RoCE takes 7 for *for ever*, and a dead peer would never be noticed.
    pub retry_count: Option<u8>,
    /// Retries when the peer has no receive posted, 0 to 6 (7 would be for ever). Default 6; flow control sees to it
    /// that there is always one.
    pub receiver_retry_count: Option<u8>,
    /// The service level of packets, 0 to 7. Default 0.
    pub service_level: Option<u8>,
    /// The largest packet, at most what the port is set to; the smaller of both sides' holds. Default: the port's.
    pub mtu: Option<Mtu>,
    /// The traffic class (DSCP and ECN bits) of packets. Default 0.
    pub traffic_class: Option<u8>,
    /// Whether users' own memory is pinned. Default [`OnDemandPaging::Auto`].
    pub on_demand_paging: Option<OnDemandPaging>,
}

impl Rdma {
    /// These, and where they say nothing `other`.
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

    /// Whether each is in its range. Limits of the device are checked when it is opened.
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

    /// How a device retries.
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

/// InfiniBand allows 7, which Soft-RoCE takes for ever.
const RETRIES_MAX: u8 = 6;

/// How a queue pair retries, in the device's own units. All of it is finite: a peer that is gone is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Time to wait for an acknowledgement: 4.096 µs · 2ⁿ.
    pub(crate) acknowledgement: u8,
    /// Retries after that.
    pub(crate) retries: u8,
    /// Retries when the peer has no receive posted. With right flow control there are none.
    pub(crate) receiver_retries: u8,
    /// What a peer without a receive is told to wait for, in the code of the InfiniBand specification: 12 is 0.64 ms.
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

    /// Of a number of bytes; `None` for one that no port has.
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

    /// Of a value of `enum ibv_mtu`.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// One of the [`Rdma`].
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
    /// All of them.
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

    /// This project's environment variable.
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

    /// The environment variables of TensorFlow's verbs plugin: what its source reads, then what its README says where
    /// that differs. None for what it has no variable for.
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

    /// Of those that are numbers. What a device has of them may be less.
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

    /// That `value`, found under `name`, is none for this setting.
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

/// A setting that cannot be used, whatever the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// Not a value of this setting.
    #[error("{name} is `{value}`: use {allowed}")]
    Invalid {
        /// The variable, or the field of [`Rdma`].
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        allowed: String,
    },
    /// Two variables name one setting, and differ.
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
        /// The variable that goes before both.
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

    /// What it holds.
    pub fn value(&self) -> &str {
        match self {
            Self::Invalid { value, .. } => value,
            Self::Conflict { first_value, .. } => first_value,
        }
    }
}

/// Whether users' own memory is registered without being pinned, where the device can page on demand.
///
/// Pinned memory is resident and counts against the limit on locked memory. What is registered on demand does neither,
/// so that a mapped file may be larger than both; the device asks the kernel for each page at its first use, which costs
/// tens of microseconds a page. Memory of pools is resident anyway and stays pinned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OnDemandPaging {
    /// On demand where the device can, else pinned.
    #[default]
    Auto,
    /// Pinned.
    Never,
    /// On demand; a device that can't is an error.
    Require,
}

impl OnDemandPaging {
    pub(super) const ALL: [Self; 3] = [Self::Auto, Self::Never, Self::Require];

    /// Of its name; `None` for one that there is not.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// As a setting has it: `auto`, `never` or `require`.
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
