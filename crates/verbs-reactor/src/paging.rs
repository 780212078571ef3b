//! On-demand paging: memory that a device faults in when it needs it, instead of memory that is pinned.

use std::{fmt, sync::Arc};

use super::{OnDemandPaging, Setting, VerbsError, sys};

impl OnDemandPaging {
    /// How users' memory is registered on `device`, which supports `paging`.
    ///
    /// # Errors
    /// [`VerbsError::Unfit`] for [`Require`](Self::Require) if the device does not support all operations on it.
    pub(super) fn on(self, device: &str, paging: Paging) -> Result<UserPages, VerbsError> {
        match self {
            Self::Never => Ok(UserPages::Pinned),
            Self::Auto if paging.suffices() => Ok(UserPages::OnDemandIfTaken),
            Self::Auto => Ok(UserPages::Pinned),
            Self::Require if paging.suffices() => Ok(UserPages::OnDemand),
            Self::Require => {
                let remedy = format!(
                    "it has {paging}: use auto, and the memory is pinned, or name a device that pages sends, writes \
                     and reads of reliable connections on demand"
                );
                let (value, device) = (self.name().to_owned(), device.to_owned());
                Err(VerbsError::Unfit { setting: Setting::OnDemandPaging, value, device, remedy })
            }
        }
    }
}

/// The operations of reliable connections that a device supports on memory that is not pinned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Paging {
    /// Sends from such memory.
    pub send: bool,
    /// Writes from such memory, and accepts peers' writes into it.
    pub write: bool,
    /// Reads into such memory, and lets peers read it.
    pub read: bool,
}

impl Paging {
    /// Parses the fields of `struct ibv_odp_caps`.
    pub(super) fn of(general: u64, reliable: u32) -> Self {
        let has = |bit: u32| general & u64::from(sys::IBV_ODP_SUPPORT) != 0 && reliable & bit != 0;
        Self {
            send: has(sys::IBV_ODP_SUPPORT_SEND),
            write: has(sys::IBV_ODP_SUPPORT_WRITE),
            read: has(sys::IBV_ODP_SUPPORT_READ),
        }
    }

    /// Whether users' memory need not be pinned.
    pub fn suffices(self) -> bool {
        self.send && self.write && self.read
    }
}

impl fmt::Display for Paging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [(self.send, "sends"), (self.write, "writes"), (self.read, "reads")];
        let parts: Vec<&str> = parts.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect();
        if parts.is_empty() {
            f.write_str("no on-demand paging")
        } else {
            write!(f, "on-demand paging of {}", parts.join(", "))
        }
    }
}

/// How users' memory is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UserPages {
    Pinned,
    OnDemand,
    /// On demand, or pinned if the device refuses that: drivers differ in which mappings they can page.
    OnDemandIfTaken,
}

impl UserPages {
    /// Whether memory is registered without being pinned, unless the device refuses.
    pub(super) fn on_demand(self) -> bool {
        self != Self::Pinned
    }

    /// Registers memory by `register`. Its argument is true for on-demand paging.
    pub(super) fn register<T>(
        self,
        mut register: impl FnMut(bool) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        match self {
            Self::Pinned => register(false),
            Self::OnDemand => register(true),
            Self::OnDemandIfTaken => register(true).or_else(|refused| {
                let refused: Arc<str> = refused.to_string().into();
                log!(DEBUG, %refused, "the device refused to page this memory on demand: it is pinned instead");
                register(false)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    const ALL: Paging = Paging { send: true, write: true, read: true };

    #[test]
    fn capabilities_are_those_of_reliable_connections() {
        let support = u64::from(sys::IBV_ODP_SUPPORT);
        assert_eq!(Paging::of(0, u32::MAX), Paging::default(), "without that bit the others mean nothing");
        assert_eq!(Paging::of(support, 0), Paging::default());
        assert_eq!(Paging::of(support, u32::MAX), ALL);
        let send = Paging { send: true, ..Paging::default() };
        assert_eq!(Paging::of(support, sys::IBV_ODP_SUPPORT_SEND | sys::IBV_ODP_SUPPORT_RECV), send);
        assert_eq!(Paging::default().to_string(), "no on-demand paging");
        assert_eq!(Paging { read: true, ..send }.to_string(), "on-demand paging of sends, reads");
    }

    #[test]
    fn memory_is_paged_where_the_device_can_do_all_that_users_memory_needs() {
        use OnDemandPaging::{Auto, Never, Require};
        for lacking in [
            Paging::default(),
            Paging { send: false, ..ALL },
            Paging { write: false, ..ALL },
            Paging { read: false, ..ALL },
        ] {
            assert_eq!(Auto.on("rxe0", lacking).unwrap(), UserPages::Pinned, "{lacking}");
            assert_eq!(Never.on("rxe0", lacking).unwrap(), UserPages::Pinned);
            let error = Require.on("rxe0", lacking).unwrap_err().to_string();
            let has = lacking.to_string();
            for part in ["require", "rxe0", &has, "use auto", "TENSORWIRE_RDMA_ON_DEMAND_PAGING"] {
                assert!(error.contains(part), "{part} is missing: {error}");
            }
        }
        assert_eq!(Auto.on("mlx5_0", ALL).unwrap(), UserPages::OnDemandIfTaken);
        assert_eq!(Require.on("mlx5_0", ALL).unwrap(), UserPages::OnDemand);
        assert_eq!(Never.on("mlx5_0", ALL).unwrap(), UserPages::Pinned);
    }

    #[test]
    fn memory_that_the_device_does_not_page_is_pinned_unless_paging_is_required() {
        let refusal = || {
            let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            super::super::error::refused(source, "ibv_reg_mr", "mlx5_0")
        };
        let asked = |pages: UserPages, takes: bool| {
            let mut asked = Vec::new();
            let result = pages.register(|on_demand| {
                asked.push(on_demand);
                if on_demand && !takes { Err(refusal()) } else { Ok(on_demand) }
            });
            (asked, result.ok())
        };
        assert_eq!(asked(UserPages::Pinned, true), (vec![false], Some(false)));
        assert_eq!(asked(UserPages::OnDemand, true), (vec![true], Some(true)));
        assert_eq!(asked(UserPages::OnDemand, false), (vec![true], None));
        assert_eq!(asked(UserPages::OnDemandIfTaken, true), (vec![true], Some(true)));
        assert_eq!(asked(UserPages::OnDemandIfTaken, false), (vec![true, false], Some(false)));
    }

    #[test]
    fn names_are_those_of_the_setting() {
        for one in OnDemandPaging::ALL {
            assert_eq!(OnDemandPaging::from_name(one.name()), Some(one));
        }
        assert_eq!(OnDemandPaging::from_name("always"), None);
    }
}
