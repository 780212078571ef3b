//! What TLS has proven of the other end of a session, and which of its words that covers.

use std::fmt;

use crate::control::name::worker_name;

/// What a certificate that names a worker begins with, in a URI of its subjectAltName: the worker's name follows.
const SCHEME: &str = "tensorwire:";

/// In the place of a task's number: the worker may be any task of its job.
const ANY_TASK: &str = "*";

/// What a peer's certificate must say, beside being signed by a trusted CA.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TlsNames {
    /// What the user named. Always the worker: the name that a peer goes by must be in its certificate, as the URI
    /// `tensorwire:` and the name, for instance `tensorwire:/job:ps/replica:0/task:0`; `task:*` is every task of a job.
    /// And where a worker is dialled by its address alone ([`Worker::peer_at`](crate::Worker::peer_at)), the host too: as
    /// a DNS name or an IP address in the certificate's subjectAltName.
    #[default]
    Proven,
    /// As [`Proven`](Self::Proven), but for the host: whoever answers at an address may be any worker, by its own name.
    AnyHost,
    /// Nothing: a member may come under every name, also another member's.
    AnyMember,
}

/// The other end of a session, as TLS has proven it.
#[derive(Clone, PartialEq, Eq)]
pub struct ProvenPeer {
    /// What both ends of this one connection know, and nobody else.
    pub(crate) channel: [u8; 32],
    /// The URIs in its certificate.
    pub(crate) uris: Vec<String>,
    /// Whether its certificate is for the host that was dialled, if one was; else why not.
    pub(crate) host: Result<(), String>,
    pub(crate) names: TlsNames,
}

impl fmt::Debug for ProvenPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProvenPeer").field("uris", &self.uris).finish_non_exhaustive()
    }
}

impl ProvenPeer {
    /// Whether the certificate lets it go by the name `worker`.
    ///
    /// # Errors
    /// It does not: what follows "the certificate", for people.
    pub(crate) fn check_worker(&self, worker: &str) -> Result<(), String> {
        match self.names {
            TlsNames::AnyMember => Ok(()),
            TlsNames::Proven | TlsNames::AnyHost => check_worker(&self.uris, worker),
        }
    }

    /// Whether the certificate is for the host that was dialled.
    ///
    /// # Errors
    /// It is not: text for people.
    pub(crate) fn check_host(&self) -> Result<(), String> {
        match self.names {
            TlsNames::AnyMember | TlsNames::AnyHost => Ok(()),
            TlsNames::Proven => self.host.clone(),
        }
    }
}

/// Whether one of `uris` names `worker`.
pub(crate) fn check_worker(uris: &[String], worker: &str) -> Result<(), String> {
    let named = named_workers(uris);
    if named.iter().any(|name| is_for(name, worker)) {
        return Ok(());
    }
    let named = if named.is_empty() { "no worker".to_owned() } else { named.join(", ") };
    Err(format!(
        "names {named}: give {worker} a certificate with URI:{SCHEME}{worker} in its subjectAltName, or let members \
         go by any name (`tls_names` at AnyMember)"
    ))
}

/// The names of workers in `uris`, which may be plain, or of any task of a job.
pub(crate) fn named_workers(uris: &[String]) -> Vec<&str> {
    uris.iter().filter_map(|uri| uri.strip_prefix(SCHEME)).collect()
}

/// The name of a worker whose certificate gives it `name`; of any task of a job, one with this number.
///
/// # Errors
/// It names none: what to write.
#[cfg(feature = "tls")]
pub(crate) fn own_name(name: &str, number: u32) -> Result<String, String> {
    match name.strip_suffix(ANY_TASK).filter(|job| job.ends_with("/task:")) {
        Some(job) => worker_name(&format!("{job}{number}")),
        None => worker_name(name),
    }
}

fn is_for(name: &str, worker: &str) -> bool {
    if name == worker || worker_name(name).is_ok_and(|name| name == worker) {
        return true;
    }
    let Some(job) = name.strip_suffix(ANY_TASK).filter(|job| job.ends_with("/task:")) else { return false };
    worker
        .strip_prefix(job)
        .is_some_and(|task| !task.is_empty() && task.bytes().all(|it| it.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e_a_certificate_is_for_the_workers_that_it_names() {
        let uris = [
            "tensorwire:/job:ps/replica:0/task:1",
            "tensorwire:/job:pull/replica:0/task:*",
            "tensorwire:plain",
            "https://a",
        ];
        let uris = uris.map(str::to_owned);
        for (worker, is_named) in [
            ("/job:ps/replica:0/task:1", true),
            ("/job:ps/replica:0/task:10", false),
            ("/job:ps/replica:0/task:2", false),
            ("/job:pull/replica:0/task:4711", true),
            ("/job:pull/replica:0/task:", false),
            ("/job:pull/replica:0/task:1/device:CPU:0", false),
            ("/job:pull/replica:1/task:1", false),
            ("/job:pull/replica:0/task:*", true),
            ("/job:plain/replica:0/task:0", true),
            ("/job:plain/replica:0/task:1", false),
            ("", false),
            ("https://a", false),
        ] {
            assert_eq!(check_worker(&uris, worker).is_ok(), is_named, "{worker}");
        }
        let error = check_worker(&uris, "/job:worker/replica:0/task:0").unwrap_err();
        assert!(error.contains("names /job:ps/replica:0/task:1, "), "{error}");
        assert!(
            error.contains("URI:tensorwire:/job:worker/replica:0/task:0 in its subjectAltName"),
            "{error}"
        );
        for wild in ["tensorwire:*", "tensorwire:/job:*", "tensorwire:/job:ps/replica:*/task:*"] {
            assert!(check_worker(&[wild.to_owned()], "/job:ps/replica:0/task:1").is_err(), "{wild}");
        }
    }

    #[test]
    fn names_are_relaxed_only_when_told() {
        let peer = |names| ProvenPeer {
            channel: [0; 32],
            uris: vec!["tensorwire:/a".to_owned()],
            host: Err("another host".to_owned()),
            names,
        };
        assert_eq!(TlsNames::default(), TlsNames::Proven);
        for (names, worker, host) in [
            (TlsNames::Proven, false, false),
            (TlsNames::AnyHost, false, true),
            (TlsNames::AnyMember, true, true),
        ] {
            let peer = peer(names);
            assert!(peer.check_worker("/a").is_ok());
            assert_eq!(
                (peer.check_worker("/b").is_ok(), peer.check_host().is_ok()),
                (worker, host),
                "{names:?}"
            );
        }
    }
}
