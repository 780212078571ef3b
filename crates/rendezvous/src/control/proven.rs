//! The facts that TLS proves about the peer of a session, and the checks of the peer's claims against them.

use std::fmt;

use crate::control::name::worker_name;

/// The scheme of URIs in a certificate's subjectAltName that contain a worker name.
const SCHEME: &str = "tensorwire:";

/// Instead of a task number: the certificate is valid for every task of the job.
const ANY_TASK: &str = "*";

/// What a peer's certificate must contain besides the signature of a trusted CA.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TlsNames {
    /// The peer's worker name, as a URI in the subjectAltName: `tensorwire:` and the name, for instance
    /// `tensorwire:/job:ps/replica:0/task:0`; `task:*` stands for every task of a job. If a worker is dialled only by
    /// its address ([`Worker::peer_at`](crate::Worker::peer_at)), the certificate must also contain the host, as a DNS
    /// name or an IP address in the subjectAltName.
    #[default]
    Proven,
    /// The peer's worker name, as with [`Proven`](Self::Proven), but not the host: any worker may answer at an address,
    /// with its own name.
    AnyHost,
    /// Nothing: a member may use any name, also that of another member.
    AnyMember,
}

/// What TLS has proven about the peer of a session.
#[derive(Clone, PartialEq, Eq)]
pub struct ProvenPeer {
    /// Keying material that only the two sides of this connection know.
    pub(crate) channel: [u8; 32],
    /// The URIs in its certificate.
    pub(crate) uris: Vec<String>,
    /// Whether the certificate is valid for the dialled host. The error says why not. `Ok` if the peer dialled.
    pub(crate) host: Result<(), String>,
    pub(crate) names: TlsNames,
}

impl fmt::Debug for ProvenPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProvenPeer").field("uris", &self.uris).finish_non_exhaustive()
    }
}

impl ProvenPeer {
    /// Checks that the certificate contains the name `worker`.
    ///
    /// # Errors
    /// A text that continues "the certificate".
    pub(crate) fn check_worker(&self, worker: &str) -> Result<(), String> {
        match self.names {
            TlsNames::AnyMember => Ok(()),
            TlsNames::Proven | TlsNames::AnyHost => check_worker(&self.uris, worker),
        }
    }

    /// Checks that the certificate is valid for the dialled host.
    ///
    /// # Errors
    /// The reason, for an error message.
    pub(crate) fn check_host(&self) -> Result<(), String> {
        match self.names {
            TlsNames::AnyMember | TlsNames::AnyHost => Ok(()),
            TlsNames::Proven => self.host.clone(),
        }
    }
}

/// Checks that one of `uris` contains the name `worker`.
pub(crate) fn check_worker(uris: &[String], worker: &str) -> Result<(), String> {
    let named = named_workers(uris);
    if named.iter().any(|name| is_for(name, worker)) {
        return Ok(());
    }
    let named = if named.is_empty() { "no worker".to_owned() } else { named.join(", ") };
    Err(format!(
        "names {named}: give {worker} a certificate with URI:{SCHEME}{worker} in its subjectAltName, or let members \
         use any name (`tls_names` at AnyMember)"
    ))
}

/// The worker names in `uris`. They may be short names, or names for any task of a job.
pub(crate) fn named_workers(uris: &[String]) -> Vec<&str> {
    uris.iter().filter_map(|uri| uri.strip_prefix(SCHEME)).collect()
}

/// The worker name for `name` in its certificate. If the certificate is valid for any task of a job, the name has the
/// task number `number`.
///
/// # Errors
/// The remedy, if the text is not a worker name.
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
