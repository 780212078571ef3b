//! What a worker encrypts.

#[cfg(feature = "tls")]
use verbs_reactor::{FabricError, tls::TlsIdentity};
use verbs_reactor::{FabricKind, tcp::TcpFabric};

#[cfg(feature = "tls")]
use super::WorkerBuilder;
use crate::WorkerError;
#[cfg(feature = "tls")]
use crate::control::{GrpcConfig, TlsNames, check_worker};

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
    /// it trusts. Control sessions, tensors over gRPC and tensors over TCP are encrypted. A peer without TLS is refused,
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
    /// fabrics of the user's own that don't encrypt ([`Capabilities::encrypted`](verbs_reactor::Capabilities::encrypted))
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
    /// # Errors
    /// [`WorkerError::Config`] for settings that contradict each other, or an identity that is not this worker's.
    pub(super) fn check(&self, worker: &str) -> Result<(), WorkerError> {
        let Some(identity) = &self.identity else {
            if self.required == Some(true) {
                let remedy =
                    "nothing encrypts without an identity: give one with WorkerBuilder::tls".to_owned();
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
        if encrypts || kind == FabricKind::Shm || !is_required {
            return Ok(());
        }
        let what = "be used: it does not encrypt, and TLS is on; use tcp or grpc, or let tensors travel in the clear \
                    with WorkerBuilder::require_encryption(false)";
        Err(FabricError::Unsupported { kind, what }.into())
    }
}

#[cfg(not(feature = "tls"))]
#[allow(clippy::unused_self, clippy::unnecessary_wraps)] // as with the feature
impl Encryption {
    pub(super) fn check(&self, _: &str) -> Result<(), WorkerError> {
        Ok(())
    }

    pub(super) fn of_plane(&self, config: crate::control::GrpcConfig) -> crate::control::GrpcConfig {
        config
    }

    pub(super) fn of_tcp(&self, fabric: TcpFabric) -> TcpFabric {
        fabric
    }

    pub(super) fn allow(&self, _: FabricKind, _: bool) -> Result<(), WorkerError> {
        Ok(())
    }
}
