//! The TLS settings of a worker.

#[cfg(feature = "tls")]
use tensorwire_fabric::FabricError;
use tensorwire_fabric::FabricKind;
#[cfg(feature = "tcp")]
use tensorwire_fabric_tcp::TcpFabric;
#[cfg(feature = "tls")]
use tensorwire_fabric_tcp::tls::TlsIdentity;

#[cfg(feature = "tls")]
use super::WorkerBuilder;
#[cfg(feature = "tls")]
use crate::control::{GrpcConfig, TlsNames, check_worker, named_workers, own_name};
use crate::error::WorkerError;

/// Identity, name checks and requirement, as the user set them.
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
    /// Turns mutual TLS on: this worker proves its identity by this certificate and accepts only peers with a
    /// certificate of a CA that the identity trusts. Control sessions and tensors over TCP are encrypted. A peer
    /// without TLS is refused, regardless of which side dials; there is no fallback. If a [`secret`](Self::secret) is
    /// set, too, peers must prove both. With TLS, no secret is exchanged automatically on loopback, and none is needed
    /// to listen on other addresses.
    ///
    /// Default: off.
    #[must_use]
    pub fn tls(mut self, identity: TlsIdentity) -> Self {
        self.encryption.identity = Some(identity);
        self
    }

    /// What a peer's certificate must contain besides the signature of a trusted CA. Default [`TlsNames::Proven`]: the
    /// peer's worker name, or its host if it was dialled by address alone.
    #[must_use]
    pub fn tls_names(mut self, names: TlsNames) -> Self {
        self.encryption.names = names;
        self
    }

    /// Whether tensors may leave this host only encrypted. Default: `true` with [`tls`](Self::tls), otherwise `false`.
    /// If `true`, RDMA and custom fabrics that do not encrypt
    /// ([`Capabilities::encrypted`](tensorwire_fabric::Capabilities::encrypted)) are not used, and
    /// [`Worker::peers`](crate::Worker::peers) gives the reason. Shared memory is used, because it stays within one
    /// host and user.
    #[must_use]
    pub fn require_encryption(mut self, required: bool) -> Self {
        self.encryption.required = Some(required);
        self
    }
}

#[cfg(feature = "tls")]
impl Encryption {
    /// The name in the certificate, for a worker that was given no name. If the certificate is valid for all tasks of a
    /// job, the name has the task number `number`. `None` if any name is allowed.
    ///
    /// # Errors
    /// [`WorkerError::Config`]: the certificate contains no worker name, or several.
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
            [] => "its certificate names no worker: add one as URI:tensorwire:NAME, or set a name".to_owned(),
            several => {
                format!(
                    "its certificate names several workers, {}: set one of them as the name",
                    several.join(", ")
                )
            }
        };
        Err(WorkerError::Config { field: "name", value: "none".to_owned(), remedy: problem })
    }

    /// # Errors
    /// [`WorkerError::Config`] if settings contradict each other, or the certificate does not contain this worker's
    /// name.
    pub(super) fn check(&self, worker: &str) -> Result<(), WorkerError> {
        let Some(identity) = &self.identity else {
            if self.required == Some(true) {
                let remedy = "encryption needs an identity: give one with the setting `tls`".to_owned();
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
    /// The fabric does not encrypt, and encryption is required.
    pub(super) fn allow(&self, kind: FabricKind, encrypts: bool) -> Result<(), WorkerError> {
        let is_required = self.required.unwrap_or(self.identity.is_some());
        if encrypts || kind == FabricKind::SHM || !is_required {
            return Ok(());
        }
        let what = "be used: it does not encrypt, and TLS is on; use tcp, or allow unencrypted tensors \
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
