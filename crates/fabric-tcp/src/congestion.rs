//! The congestion control of streams.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// The congestion control of a worker's streams: the system's default, or one that is named. Clones share one log line about
/// a refusal.
#[derive(Debug, Clone, Default)]
pub struct Congestion(Option<Arc<Named>>);

#[derive(Debug)]
struct Named {
    algorithm: String,
    was_refused: AtomicBool,
}

impl PartialEq for Congestion {
    fn eq(&self, other: &Self) -> bool {
        self.algorithm() == other.algorithm()
    }
}

impl Eq for Congestion {}

impl Congestion {
    /// The algorithm of this name, as in the system's `net.ipv4.tcp_available_congestion_control`. An ordinary user may
    /// choose those in `net.ipv4.tcp_allowed_congestion_control`. Where the system refuses it, its default is used.
    pub fn named(algorithm: impl Into<String>) -> Self {
        Self(Some(Arc::new(Named { algorithm: algorithm.into(), was_refused: AtomicBool::new(false) })))
    }

    /// Its name; `None` for the system's default.
    pub fn algorithm(&self) -> Option<&str> {
        self.0.as_ref().map(|named| named.algorithm.as_str())
    }

    /// Sets it on a listener, from which accepted streams inherit it, or on a stream. On a dialled stream it must be
    /// called before connecting, because an algorithm that paces does not stop after it has begun. The first refusal is
    /// logged.
    pub(crate) fn choose(&self, socket: &impl AsFd) {
        let Some(named) = &self.0 else { return };
        let Err(error) = rustix::net::sockopt::set_tcp_congestion(socket, &named.algorithm) else { return };
        if !named.was_refused.swap(true, Ordering::Relaxed) {
            let (algorithm, error) = (&named.algorithm, std::io::Error::from(error));
            log!(
                INFO,
                %algorithm,
                %error,
                "the system refuses this congestion control, so tcp uses the system's default: an ordinary user may \
                 choose those in net.ipv4.tcp_allowed_congestion_control"
            );
        }
    }

    #[cfg(test)]
    pub(crate) fn was_refused(&self) -> bool {
        self.0.as_ref().is_some_and(|named| named.was_refused.load(Ordering::Relaxed))
    }
}
