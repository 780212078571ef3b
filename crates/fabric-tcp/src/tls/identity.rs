//! The identity of this side.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::Arc,
};

use rustls::{
    ClientConfig, Error, RootCertStore, ServerConfig,
    client::{Resumption, danger::ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::TLS13,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::{
    CertificateDigest, CertificateProblem, PeerCertificate, TlsError, TlsField, TlsPurpose,
    verifier::ChainVerifier,
};

/// Longest content of a file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Bytes of a refused peer that are read and discarded. It may have sent more than its part of the handshake. Closing
/// with unread bytes would reset the connection, and lose the alert with the reason.
const LEAVING_BYTES_MAX: u64 = 64 << 10;

/// The origin of bytes that are not from a file.
const BYTES: &str = "(given as bytes)";

/// A certificate chain with its private key, and the CAs whose members are admitted. Cheap to clone. `Debug` shows the
/// names in the certificate, and nothing of the key.
///
/// It is read once: a renewed certificate is used by workers that are started with it.
#[derive(Clone)]
pub struct TlsIdentity(Arc<Credentials>);

struct Credentials {
    own: PeerCertificate,
    /// For data connections alone.
    data_server: Arc<ServerConfig>,
    /// For connections of any purpose.
    server: Arc<ServerConfig>,
    control_client: Arc<ClientConfig>,
    data_client: Arc<ClientConfig>,
}

/// PEM, and its origin.
struct Input {
    field: TlsField,
    place: String,
    bytes: Vec<u8>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").field("uris", &self.0.own.uris()).finish_non_exhaustive()
    }
}

impl TlsIdentity {
    /// From PEM files: the certificate chain (this side's own certificate first), its private key, and the certificates of
    /// the trusted CAs. Warns when others than its owner can read the key.
    ///
    /// # Errors
    /// [`TlsError`], which names the file: it cannot be read, holds something else, the key is another certificate's, or
    /// peers with those CAs would refuse the certificate now, as a dialler or as an acceptor.
    pub fn from_files(
        certificate: impl AsRef<Path>,
        key: impl AsRef<Path>,
        authorities: impl AsRef<Path>,
    ) -> Result<Self, TlsError> {
        let certificate = Input::read(TlsField::Certificate, certificate.as_ref())?;
        let key = Input::read(TlsField::Key, key.as_ref())?;
        let authorities = Input::read(TlsField::Authorities, authorities.as_ref())?;
        Self::new(&certificate, &key, &authorities, true)
    }

    /// As [`from_files`](Self::from_files), from PEM in memory.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub fn from_pem(certificate: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, TlsError> {
        Self::new(
            &Input::given(TlsField::Certificate, certificate),
            &Input::given(TlsField::Key, key),
            &Input::given(TlsField::Authorities, authorities),
            true,
        )
    }

    /// As [`from_pem`](Self::from_pem), without the check that peers would accept it: for tests of peers that refuse it.
    ///
    /// # Errors
    /// Those of [`from_files`](Self::from_files), except for a certificate that is not admitted.
    #[cfg(feature = "test-certificates")]
    #[doc(hidden)]
    pub fn unchecked_from_pem(certificate: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, TlsError> {
        Self::new(
            &Input::given(TlsField::Certificate, certificate),
            &Input::given(TlsField::Key, key),
            &Input::given(TlsField::Authorities, authorities),
            false,
        )
    }

    fn new(certificate: &Input, key: &Input, authorities: &Input, check: bool) -> Result<Self, TlsError> {
        let chain = certificate.certificates()?;
        let own = chain.first().cloned().ok_or_else(|| certificate.malformed("it holds no certificate"))?;
        let private = key.private_key()?;
        let roots = Arc::new(authorities.roots()?);
        let provider = Arc::new(ring::default_provider());
        let servers = Arc::new(ChainVerifier { roots: roots.clone(), provider: provider.clone() });
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
        let clients = clients.map_err(|error| authorities.malformed(&error.to_string()))?;
        if check {
            check_own(certificate, &chain, &*servers, &*clients)?;
        }
        let wrong_key = |error: Error| match error {
            Error::InconsistentKeys(_) => {
                TlsError::KeyMismatch { key: key.place.clone(), certificate: certificate.place.clone() }
            }
            other => key.malformed(&other.to_string()),
        };
        let server = server_config(&provider, clients, &chain, &private).map_err(wrong_key)?;
        let client = client_config(&provider, servers, &chain, &private).map_err(wrong_key)?;
        let server_for = |purposes: &[TlsPurpose]| {
            let mut server = server.clone();
            server.alpn_protocols = protocols(purposes);
            Arc::new(server)
        };
        let client_for = |purpose| {
            let mut client = client.clone();
            client.alpn_protocols = protocols(&[purpose]);
            Arc::new(client)
        };
        Ok(Self(Arc::new(Credentials {
            own: PeerCertificate::new(own),
            data_server: server_for(&[TlsPurpose::Data]),
            server: server_for(&[TlsPurpose::Control, TlsPurpose::Data]),
            control_client: client_for(TlsPurpose::Control),
            data_client: client_for(TlsPurpose::Data),
        })))
    }

    /// The certificate that peers see.
    #[doc(hidden)]
    pub fn certificate(&self) -> &PeerCertificate {
        &self.0.own
    }

    /// The digest of this side's certificate.
    pub fn digest(&self) -> CertificateDigest {
        self.0.own.digest()
    }

    /// The dialler's handshake. It lasts as long as the peer takes, so bound it.
    ///
    /// # Errors
    /// Those of the stream or of TLS; [`explain_io`](super::explain_io) explains them.
    ///
    /// # Cancel safety
    /// Dropping the future ends the stream.
    #[doc(hidden)]
    pub async fn connect(&self, purpose: TlsPurpose, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        // Neither sent nor checked; see `ChainVerifier`.
        let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
        let client = match purpose {
            TlsPurpose::Control => &self.0.control_client,
            TlsPurpose::Data => &self.0.data_client,
        };
        let connector = TlsConnector::from(client.clone());
        Ok(connector.connect(name, stream).await?.into())
    }

    /// The acceptor's handshake, for a data connection. It lasts as long as the peer takes, even to disconnect after it
    /// was refused, so bound it.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// Dropping the future ends the stream.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        accept(self.0.data_server.clone(), stream).await
    }

    /// As [`accept`](Self::accept), for any purpose of the peer.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// Dropping the future ends the stream.
    #[doc(hidden)]
    pub async fn accept_any(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, TlsPurpose)> {
        let stream = accept(self.0.server.clone(), stream).await?;
        let agreed = stream.get_ref().1.alpn_protocol();
        // A peer that names no purpose is refused later, by the check of its certificate.
        let purpose = match agreed == Some(TlsPurpose::Data.protocol()) {
            true => TlsPurpose::Data,
            false => TlsPurpose::Control,
        };
        Ok((stream, purpose))
    }
}

async fn accept(server: Arc<ServerConfig>, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    match TlsAcceptor::from(server).accept(stream).into_fallible().await {
        Ok(stream) => Ok(stream.into()),
        Err((error, mut stream)) => {
            let _ = stream.shutdown().await;
            let _ = tokio::io::copy(&mut stream.take(LEAVING_BYTES_MAX), &mut tokio::io::sink()).await;
            Err(error)
        }
    }
}

fn protocols(purposes: &[TlsPurpose]) -> Vec<Vec<u8>> {
    purposes.iter().map(|purpose| purpose.protocol().to_vec()).collect()
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    clients: Arc<dyn ClientCertVerifier>,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<ServerConfig, Error> {
    let config = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13])?;
    let config = config.with_client_cert_verifier(clients);
    let mut config = config.with_single_cert(chain.to_vec(), key.clone_key())?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    servers: Arc<dyn ServerCertVerifier>,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<ClientConfig, Error> {
    let config = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13])?;
    let config = config.dangerous().with_custom_certificate_verifier(servers);
    let mut config = config.with_client_auth_cert(chain.to_vec(), key.clone_key())?;
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

/// Whether peers with these CAs would accept this side now. An error here is better than one at each peer.
fn check_own(
    input: &Input,
    chain: &[CertificateDer<'static>],
    servers: &dyn ServerCertVerifier,
    clients: &dyn ClientCertVerifier,
) -> Result<(), TlsError> {
    let Some((own, intermediates)) = chain.split_first() else { return Ok(()) };
    let now = UnixTime::now();
    let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
    let as_server = servers.verify_server_cert(own, intermediates, &name, &[], now).map(drop);
    let checked = as_server.and_then(|()| clients.verify_client_cert(own, intermediates, now).map(drop));
    checked.map_err(|error| {
        let problem = match &error {
            Error::InvalidCertificate(why) => CertificateProblem::of(why),
            _ => CertificateProblem::Other,
        };
        TlsError::Unusable { place: input.place.clone(), problem, detail: error.to_string() }
    })
}

impl Input {
    fn given(field: TlsField, bytes: &[u8]) -> Self {
        Self { field, place: BYTES.to_owned(), bytes: bytes.to_vec() }
    }

    fn read(field: TlsField, path: &Path) -> Result<Self, TlsError> {
        let place = format!("`{}`", path.display());
        let unreadable = |detail: String| TlsError::Unreadable { field, place: place.clone(), detail };
        let (bytes, mode) = read(path).map_err(|error| unreadable(error.to_string()))?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(unreadable(format!(
                "it holds more than {FILE_BYTES_MAX} bytes: is it the right file?"
            )));
        }
        if field == TlsField::Key && mode & 0o044 != 0 {
            let mode = format!("{:03o}", mode & 0o777);
            log!(
                WARN,
                path = %path.display(), mode,
                "the TLS key can be read by others than its owner: run chmod 600 on it"
            );
        }
        Ok(Self { field, place, bytes })
    }

    fn malformed(&self, detail: &str) -> TlsError {
        TlsError::Malformed { field: self.field, place: self.place.clone(), detail: detail.to_owned() }
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.bytes).collect();
        let found = found.map_err(|error| self.malformed(&format!("it is no PEM: {error}")))?;
        if found.is_empty() {
            return Err(self.malformed("it holds no certificate: give PEM with -----BEGIN CERTIFICATE-----"));
        }
        Ok(found)
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.bytes).map_err(|_| {
            self.malformed(
                "it holds no private key: give PEM with -----BEGIN PRIVATE KEY-----, not encrypted",
            )
        })
    }

    fn roots(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in self.certificates()? {
            roots.add(authority).map_err(|error| self.malformed(&format!("it holds no CA: {error}")))?;
        }
        Ok(roots)
    }
}

/// Content and mode of the same open file. Reads one byte more than allowed, to detect a file that is too long.
fn read(path: &Path) -> io::Result<(Vec<u8>, u32)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok((bytes, metadata.permissions().mode()))
}
