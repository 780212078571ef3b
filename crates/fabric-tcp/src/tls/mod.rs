//! Mutual TLS: the identity of a worker, and its proof.
//!
//! A [`TlsIdentity`] is a certificate chain, its private key, and the certificates of the authorities (CAs) whose
//! members are admitted. Both sides of a connection show their chains, and each checks the other's: that a trusted CA
//! signed it, that it is valid now, and that the side that shows it may use it. Only TLS 1.3 is used. There is no
//! resumption and no early data, so a recorded handshake is useless.
//!
//! The caller that connects checks, with the [`PeerCertificate`], whether the certificate belongs to the worker or host
//! that it dials.

mod error;
mod identity;
mod peer;
mod purpose;
#[cfg(feature = "test-certificates")]
pub mod test_certificates;
mod verifier;

pub(crate) use error::tls_error;
pub use error::{CertificateProblem, TlsError, TlsField, explain, explain_io, explain_later};
pub use identity::TlsIdentity;
pub use peer::{CertificateDigest, PeerCertificate};
pub use purpose::TlsPurpose;
