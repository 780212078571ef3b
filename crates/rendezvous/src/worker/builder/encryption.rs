//! What a worker encrypts.

#[cfg(feature = "tcp")]
use tensorwire_fabric_tcp::TcpFabric;
#[cfg(feature = "tls")]
use tensorwire_fabric_tcp::tls::TlsIdentity;
#[cfg(feature = "tls")]
use tensorwire_verbs_reactor::FabricError;
use tensorwire_verbs_reactor::FabricKind;

#[cfg(feature = "tls")]
use super::WorkerBuilder;
#[cfg(feature = "tls")]
use crate::control::{GrpcConfig, TlsNames, check_worker, named_workers, own_name};
use crate::error::WorkerError;

/// The settings of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Encryption {
    #[cfg(feature = "tls")]
    identity: Option<TlsIdentity>,
    #[cfg(feature = "tls")]
    names: TlsNames,
    #[cfg(feature = "tls")]
    required: Option<bool>,
}

#[cfg(feature = "tls")]
impl WorkerBuilder {
    /// Proves by this certificate who this worker is, and lets in only workers that prove themselves by one of the CAs that
    /// it trusts. Control sessions and tensors over TCP are encrypted. A peer without TLS is refused,
    /// whoever dials; neither end falls back. Where a [`secret`](Self::secret) is given too, both must hold; none is
    /// handed over on loopback then, and none is needed to listen beyond it.
    ///
    /// Default: none, TLS is off.
    #[must_use]
    pub fn tls(mut self, identity: TlsIdentity) -> Self {
        self.encryption.identity = Some(identity);
        self
    }

    /// What a peer's certificate must say, beside being signed by a trusted CA. Default [`TlsNames::Proven`]: the name
    /// that the peer goes by, and the host where it was dialled by address alone.
    #[must_use]
    pub fn tls_names(mut self, names: TlsNames) -> Self {
        self.encryption.names = names;
        self
    }

    /// Whether tensors may leave this host only encrypted. Default: yes with [`tls`](Self::tls), else no. RDMA and
    /// fabrics of the user's own that don't encrypt ([`Capabilities::encrypted`](tensorwire_verbs_reactor::Capabilities::encrypted))
    /// are not used then, and [`Worker::peers`](crate::Worker::peers) says why. Shared memory is: it stays within one host
    /// and user.
    #[must_use]
    pub fn require_encryption(mut self, required: bool) -> Self {
        self.encryption.required = Some(required);
        self
    }
}

#[cfg(feature = "tls")]
impl Encryption {
    /// The name that a worker must have which was given none: the one in its certificate. With `number` as that of its
    /// task, where the certificate is for all tasks of a job. `None` if it may have any.
    ///
    /// # Errors
    /// [`WorkerError::Config`]: the certificate names no worker, or several.
    pub(super) fn name(&self, number: u32) -> Result<Option<String>, WorkerError> {
        let Some(identity) = self.identity.as_ref().filter(|_| self.names != TlsNames::AnyMember) else {
            return Ok(None);
        };
        let uris = identity.certificate().uris();
        let problem = match &*named_workers(&uris) {
            [name] => match own_name(name, number) {
                Ok(name) => return Ok(Some(name)),
                Err(remedy) => format!("its certificate names `{name}`: {remedy}"),
            },
            [] => "its certificate names no worker: put one in, as URI:tensorwire:NAME, or give it a name"
                .to_owned(),
            several => {
                format!(
                    "its certificate names several workers, {}: give it one of these names",
                    several.join(", ")
                )
            }
        };
        Err(WorkerError::Config { field: "name", value: "none".to_owned(), remedy: problem })
    }

    /// # Errors
    /// [`WorkerError::Config`] for settings that contradict each other, or an identity that is not this worker's.
    pub(super) fn check(&self, worker: &str) -> Result<(), WorkerError> {
        let Some(identity) = &self.identity else {
            if self.required == Some(true) {
                let remedy =
                    "nothing encrypts without an identity: give one with the setting `tls`".to_owned();
                return Err(WorkerError::Config {
                    field: "require_encryption",
                    value: "true".to_owned(),
                    remedy,
                });
            }
            return Ok(());
        };
        if self.names == TlsNames::AnyMember {
            return Ok(());
        }
        let uris = identity.certificate().uris();
        check_worker(&uris, worker).map_err(|problem| WorkerError::Config {
            field: "tls",
            value: if uris.is_empty() { "a certificate without URIs".to_owned() } else { uris.join(", ") },
            remedy: format!("this worker's own certificate {problem}"),
        })
    }

    pub(super) fn of_plane(&self, config: GrpcConfig) -> GrpcConfig {
        match &self.identity {
            Some(identity) => config.tls(identity.clone(), self.names),
            None => config,
        }
    }

    #[cfg(feature = "tcp")]
    pub(super) fn is_on(&self) -> bool {
        self.identity.is_some()
    }

    #[cfg(feature = "tcp")]
    pub(super) fn of_tcp(&self, fabric: TcpFabric) -> TcpFabric {
        match &self.identity {
            Some(identity) => fabric.with_tls(identity.clone()),
            None => fabric,
        }
    }

    /// Whether a fabric may be used.
    ///
    /// # Errors
    /// It does not encrypt, and must.
    pub(super) fn allow(&self, kind: FabricKind, encrypts: bool) -> Result<(), WorkerError> {
        let is_required = self.required.unwrap_or(self.identity.is_some());
        if encrypts || kind == FabricKind::SHM || !is_required {
            return Ok(());
        }
        let what = "be used: it does not encrypt, and TLS is on; use tcp, or let tensors travel in the clear \
                    with the setting `require_encryption` at false";
        Err(FabricError::Unsupported { kind, what }.into())
    }
}

#[cfg(not(feature = "tls"))]
#[allow(clippy::unused_self, clippy::unnecessary_wraps)] // as with the feature
impl Encryption {
    pub(super) fn name(&self, _: u32) -> Result<Option<String>, WorkerError> {
        Ok(None)
    }

    pub(super) fn check(&self, _: &str) -> Result<(), WorkerError> {
        Ok(())
    }

    pub(super) fn of_plane(&self, config: crate::control::GrpcConfig) -> crate::control::GrpcConfig {
        config
    }

    #[cfg(feature = "tcp")]
    pub(super) fn is_on(&self) -> bool {
        false
    }

    #[cfg(feature = "tcp")]
    pub(super) fn of_tcp(&self, fabric: TcpFabric) -> TcpFabric {
        fabric
    }

    pub(super) fn allow(&self, _: FabricKind, _: bool) -> Result<(), WorkerError> {
        Ok(())
    }
}
