//! The certificate of the peer.

use rustls::{
    CommonState,
    client::verify_server_name,
    pki_types::{CertificateDer, ServerName},
    server::ParsedCertificate,
};
use sha2::{Digest, Sha256};

use super::{TlsPurpose, explain};

/// SHA-256 of a certificate.
pub type CertificateDigest = [u8; 32];

/// The certificate that the peer of a connection has shown, and whose key it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate {
    leaf: CertificateDer<'static>,
}

impl PeerCertificate {
    /// The peer's certificate of a connection after its handshake.
    ///
    /// # Errors
    /// What was seen, and what to do: there is no certificate, or the connection was made for another purpose.
    pub fn of(connection: &CommonState, purpose: TlsPurpose) -> Result<Self, String> {
        if connection.alpn_protocol() != Some(purpose.protocol()) {
            return Err(
                "the peer expects something else on this connection: is it a worker of this version?"
                    .to_owned(),
            );
        }
        let leaf = connection.peer_certificates().and_then(|chain| chain.first());
        let leaf = leaf.ok_or_else(|| "the peer showed no certificate".to_owned())?;
        Ok(Self { leaf: leaf.clone() })
    }

    pub(super) fn new(leaf: CertificateDer<'static>) -> Self {
        Self { leaf }
    }

    /// The digest of this certificate.
    pub fn digest(&self) -> CertificateDigest {
        Sha256::digest(&self.leaf).into()
    }

    /// The URIs among its alternative names.
    pub fn uris(&self) -> Vec<String> {
        webpki::EndEntityCert::try_from(&self.leaf)
            .map(|leaf| leaf.valid_uri_names().map(str::to_owned).collect())
            .unwrap_or_default()
    }

    /// Whether `host`, a DNS name or an IP address, is among its alternative names.
    ///
    /// # Errors
    /// What was seen, and what to do, if it is not.
    pub fn is_for_host(&self, host: &str) -> Result<(), String> {
        let name =
            ServerName::try_from(host).map_err(|error| format!("`{host}` is no host name: {error}"))?;
        let leaf = ParsedCertificate::try_from(&self.leaf).map_err(|error| explain(&error))?;
        verify_server_name(&leaf, &name).map_err(|error| explain(&error))
    }
}
