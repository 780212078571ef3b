//! Errors of identities, and explanations of failed handshakes.

use std::{fmt, io};

use rustls::{AlertDescription, CertificateError, Error};

/// The parts of an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TlsField {
    /// The certificate chain.
    Certificate,
    /// The private key.
    Key,
    /// The certificates of the trusted CAs.
    Authorities,
}

impl fmt::Display for TlsField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "TLS certificate",
            Self::Key => "TLS key",
            Self::Authorities => "TLS CA",
        })
    }
}

/// Why a certificate is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CertificateProblem {
    /// It has expired.
    Expired,
    /// It is not valid yet.
    NotYetValid,
    /// No trusted CA signed it.
    UnknownAuthority,
    /// Its extended key usage does not include its use.
    WrongUsage,
    /// It is for another host.
    WrongHost,
    /// Something else.
    Other,
}

impl CertificateProblem {
    pub(crate) fn of(error: &CertificateError) -> Self {
        match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
            // A CA of the same name and another key.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownAuthority,
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Self::WrongUsage
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Self::WrongHost
            }
            _ => Self::Other,
        }
    }

    /// The problem with its remedy, as a clause after "the certificate".
    fn words(self) -> &'static str {
        match self {
            Self::Expired => "has expired: renew it, or set the clock of this host right",
            Self::NotYetValid => "is not valid yet: wait for its time, or set the clock of this host right",
            Self::UnknownAuthority => {
                "is signed by no CA that is trusted here: give both sides certificates of one CA, and that CA"
            }
            Self::WrongUsage => {
                "may not be used by this side of a connection: a worker both dials and is dialled, so its extended key \
                 usage must have serverAuth and clientAuth, or be absent"
            }
            Self::WrongHost => "is not for the host that was dialled: put the host into its subjectAltName",
            Self::Other => "cannot be used: make another one",
        }
    }
}

/// Why an identity cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that cannot be read.
    #[error("{field} {place}: {detail}")]
    Unreadable {
        /// Which part.
        field: TlsField,
        /// The file.
        place: String,
        /// The cause, and what to do.
        detail: String,
    },
    /// A text without the expected content.
    #[error("{field} {place}: {detail}")]
    Malformed {
        /// Which part.
        field: TlsField,
        /// The file, or that it was given as bytes.
        place: String,
        /// What is wrong with it, and what to do.
        detail: String,
    },
    /// The private key is not the certificate's.
    #[error(
        "TLS key {key}: it does not belong to the certificate {certificate}: give the key that was made with it"
    )]
    KeyMismatch {
        /// The key's file, or that it was given as bytes.
        key: String,
        /// The certificate's.
        certificate: String,
    },
    /// A certificate that peers with these CAs would refuse.
    #[error("TLS certificate {place}: it {} ({detail})", problem.words())]
    Unusable {
        /// The file, or that it was given as bytes.
        place: String,
        /// What is wrong with it.
        problem: CertificateProblem,
        /// In the verifier's words.
        detail: String,
    },
}

/// The text of a failed TLS connection: what was seen, and what to do.
pub fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => {
            // It may quote the certificate.
            let detail = why.to_string().replace(|part: char| part.is_control(), "\u{fffd}");
            format!("the peer's certificate {} ({detail})", CertificateProblem::of(why).words())
        }
        Error::AlertReceived(alert) => refused_by_peer(*alert),
        Error::NoCertificatesPresented => {
            "the peer showed no certificate: give it one, signed by the common CA".to_owned()
        }
        Error::InvalidMessage(_) => {
            "the peer does not speak TLS: it runs without, or is no worker; turn TLS on at both sides".to_owned()
        }
        Error::PeerIncompatible(why) => {
            format!("the peer does not speak TLS 1.3, which alone is spoken here ({why:?})")
        }
        Error::DecryptError => {
            "a record was changed, repeated or left out on the way: somebody may tamper with the network between the hosts"
                .to_owned()
        }
        other => other.to_string(),
    }
}

fn refused_by_peer(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateRequired => {
            "wants a certificate: give this side one, signed by the common CA"
        }
        // For a CA with the name of a trusted one and another key, the signature check fails.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "does not trust the CA of this side's certificate: give both sides certificates of one CA, and that CA"
        }
        AlertDescription::CertificateExpired => {
            "says that this side's certificate has expired or is not valid yet: renew it, or set the clocks of both \
             hosts right"
        }
        AlertDescription::UnsupportedCertificate => {
            "does not accept what this side's certificate may be used for: a worker's extended key usage must have \
             serverAuth and clientAuth, or be absent"
        }
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "does not accept this side's certificate: its log says why"
        }
        AlertDescription::AccessDenied => "does not let this side in: its log says why",
        AlertDescription::ProtocolVersion => "does not speak TLS 1.3, which alone is spoken here",
        AlertDescription::NoApplicationProtocol => {
            "expects something else on this port: is it a worker of this version, and does everything on the way pass TLS \
             through unchanged?"
        }
        AlertDescription::BadRecordMac => {
            "got a record that was changed on the way: somebody may tamper with the network between the hosts"
        }
        other => return format!("the peer ended TLS with the alert {other:?}: its log says why"),
    };
    format!("the peer {why}")
}

/// As [`explain`], for an error of a stream during the handshake, or before the peer's first bytes after it.
pub fn explain_io(error: &io::Error) -> String {
    if let Some(tls) = tls_error(error) {
        return explain(tls);
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!(
            "the peer ended the connection during the TLS handshake ({error}): it runs without TLS, or does not let \
             this side in; its log says why"
        ),
        _ => error.to_string(),
    }
}

/// As [`explain`], for an error of a stream after the handshake; `None` if it is not one of TLS.
pub fn explain_later(error: &io::Error) -> Option<String> {
    tls_error(error).map(explain)
}

/// The TLS error behind an error of a stream, if one is.
pub(crate) fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}
