//! Certificates for tests, made anew each time: no private key is ever written into the repository.

use std::{fmt, net::IpAddr};

/// For tests that speak TLS themselves.
pub use rustls;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
    date_time_ymd,
};

use super::{TlsError, TlsIdentity};

/// A CA.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority")
    }
}

/// When a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// Now.
    Now,
    /// In the past.
    Past,
    /// In the future.
    Future,
}

/// The sides of a connection that may use a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Both.
    Both,
    /// The side that dials.
    Client,
    /// The side that is dialled.
    Server,
}

/// The content of a certificate.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Its URIs.
    pub uris: Vec<String>,
    /// Its DNS names and IP addresses.
    pub hosts: Vec<String>,
    /// Its time of validity.
    pub validity: Validity,
    /// Its extended key usage.
    pub usage: Usage,
}

impl Wanted {
    /// For the worker `name` on `127.0.0.1` and `localhost`.
    pub fn worker(name: &str) -> Self {
        Self {
            uris: vec![format!("tensorwire:{name}")],
            hosts: vec!["127.0.0.1".to_owned(), "localhost".to_owned()],
            validity: Validity::Now,
            usage: Usage::Both,
        }
    }
}

/// The PEM texts of one side.
pub struct Issued {
    /// Its certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
    /// The CA that it trusts.
    pub authorities: String,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Issued")
    }
}

impl Issued {
    /// The identity.
    ///
    /// # Errors
    /// Peers would refuse it.
    pub fn identity(&self) -> Result<TlsIdentity, TlsError> {
        TlsIdentity::from_pem(self.certificate.as_bytes(), self.key.as_bytes(), self.authorities.as_bytes())
    }

    /// The identity, without the check that peers would accept it.
    ///
    /// # Errors
    /// Its key is another certificate's.
    pub fn unchecked(&self) -> Result<TlsIdentity, TlsError> {
        TlsIdentity::unchecked_from_pem(
            self.certificate.as_bytes(),
            self.key.as_bytes(),
            self.authorities.as_bytes(),
        )
    }
}

impl Authority {
    /// A new one; all have the same name, and each its own key.
    ///
    /// # Errors
    /// Those of rcgen.
    pub fn new() -> Result<Self, rcgen::Error> {
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, "tensorwire test CA");
        let key = KeyPair::generate()?;
        let pem = parameters.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(parameters, key), pem })
    }

    /// Its own certificate, as PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate, its key, and this CA as the trusted one.
    ///
    /// # Errors
    /// Those of rcgen.
    pub fn issue(&self, wanted: &Wanted) -> Result<Issued, rcgen::Error> {
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.distinguished_name.push(DnType::CommonName, "tensorwire test member");
        for uri in &wanted.uris {
            parameters.subject_alt_names.push(SanType::URI(uri.as_str().try_into()?));
        }
        for host in &wanted.hosts {
            let name = match host.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(host.as_str().try_into()?),
            };
            parameters.subject_alt_names.push(name);
        }
        let (begin, end) = match wanted.validity {
            Validity::Now => (2020, 4000),
            Validity::Past => (2000, 2001),
            Validity::Future => (3000, 4000),
        };
        (parameters.not_before, parameters.not_after) =
            (date_time_ymd(begin, 1, 1), date_time_ymd(end, 1, 1));
        let (client, server) = (ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth);
        parameters.extended_key_usages = match wanted.usage {
            Usage::Both => vec![client, server],
            Usage::Client => vec![client],
            Usage::Server => vec![server],
        };
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer)?.pem();
        Ok(Issued { certificate, key: key.serialize_pem(), authorities: self.pem.clone() })
    }
}
