//! Mutual TLS: the identity of a worker, and its proof.
//!
//! A [`TlsIdentity`] is a certificate chain, its private key, and the certificates of the authorities (CAs) whose
//! members are let in. Both sides of a connection show their chains, and each checks the other's: that a trusted CA signed
//! it, that it is valid now, and that it may be used by the end that shows it. Only TLS 1.3 is spoken. Nothing is resumed
//! and nothing is sent early, so no recorded handshake can be of use.
//!
//! The caller that connects decides, from the [`PeerCertificate`], whether the certificate belongs to the worker or host
//! that it means.

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
