//! Whether streams are encrypted, and the handshake of those that are.

#[cfg(feature = "tls")]
use tensorwire_fabric::PeerViolation;
use tensorwire_fabric::{FabricError, FabricKind};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

#[cfg(feature = "tls")]
use crate::tls::{PeerCertificate, TlsIdentity, TlsPurpose, explain_io};

/// SHA-256 of the certificate that a side of an encrypted connection shows.
pub(super) type Certificate = [u8; 32];

/// How a fabric protects its streams.
#[derive(Debug, Clone, Default)]
pub(super) enum Protection {
    /// Streams are not encrypted.
    #[default]
    None,
    /// Mutual TLS.
    #[cfg(feature = "tls")]
    Tls(TlsIdentity),
}

impl Protection {
    pub(super) fn encrypts(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// The certificate that this side shows.
    pub(super) fn certificate(&self) -> Option<Certificate> {
        match self {
            Self::None => None,
            #[cfg(feature = "tls")]
            Self::Tls(identity) => Some(identity.digest()),
        }
    }

    /// The text for an error of a stream: what happened, and what to do.
    pub(super) fn explain(&self, error: &std::io::Error) -> String {
        match self {
            Self::None => error.to_string(),
            #[cfg(feature = "tls")]
            Self::Tls(_) => explain_io(error),
        }
    }

    /// Checks that both sides encrypt, or neither.
    ///
    /// # Errors
    /// [`FabricError::Connect`] if they differ. No side falls back to an unencrypted stream.
    pub(super) fn check(&self, peer: Option<&Certificate>) -> Result<(), FabricError> {
        let detail = match (self.encrypts(), peer) {
            (true, Some(_)) | (false, None) => return Ok(()),
            (true, None) => "this side encrypts tcp and the peer does not: give the peer a TLS identity too",
            (false, Some(_)) => {
                "the peer encrypts tcp and this side does not: give this side a TLS identity too"
            }
        };
        Err(failed("agreeing on encryption", detail.to_owned()))
    }

    /// Protects a dialled stream, whose peer must show the certificate `peer`.
    pub(super) async fn dial(
        &self,
        stream: TcpStream,
        peer: Option<&Certificate>,
    ) -> Result<Stream, FabricError> {
        self.check(peer)?;
        let stream = match self {
            Self::None => Stream::Plain(stream),
            #[cfg(feature = "tls")]
            Self::Tls(identity) => {
                let secured = identity.connect(TlsPurpose::Data, stream).await;
                Stream::Tls(Box::new(secured.map_err(|error| failed("TLS", explain_io(&error)))?))
            }
        };
        stream.check_peer(peer)?;
        Ok(stream)
    }

    /// Protects an accepted stream. Its token shows later which peer it belongs to; see [`Stream::check_peer`].
    ///
    /// # Errors
    /// The cause, and what to do.
    pub(super) async fn accept(&self, stream: TcpStream) -> Result<Stream, String> {
        match self {
            Self::None => Ok(Stream::Plain(stream)),
            #[cfg(feature = "tls")]
            Self::Tls(identity) => {
                // The TLS handshake is a sequence of small messages that answer each other.
                let _ = stream.set_nodelay(true);
                let secured = identity.accept(stream).await;
                Ok(Stream::Tls(Box::new(secured.map_err(|error| explain_io(&error))?)))
            }
        }
    }
}

/// A connected stream before its first frame.
#[derive(Debug)]
#[non_exhaustive]
pub enum Stream {
    /// Unencrypted.
    Plain(TcpStream),
    /// Under mutual TLS, after the handshake.
    #[cfg(feature = "tls")]
    Tls(Box<tokio_rustls::TlsStream<TcpStream>>),
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self::Plain(stream)
    }
}

#[cfg(feature = "tls")]
impl From<tokio_rustls::TlsStream<TcpStream>> for Stream {
    fn from(stream: tokio_rustls::TlsStream<TcpStream>) -> Self {
        Self::Tls(Box::new(stream))
    }
}

impl Stream {
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            #[cfg(feature = "tls")]
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Checks that the peer has shown the certificate that it announced over the control session. So both connections
    /// belong to one worker, and a stolen token is of no use.
    ///
    /// # Errors
    /// [`FabricError::PeerMisbehaved`]: it has shown a different one, or none.
    pub(super) fn check_peer(&self, expected: Option<&Certificate>) -> Result<(), FabricError> {
        match (self, expected) {
            (Self::Plain(_), None) => Ok(()),
            #[cfg(feature = "tls")]
            (Self::Tls(stream), Some(expected)) => {
                let shown = PeerCertificate::of(stream.get_ref().1, TlsPurpose::Data);
                let shown = shown.map_err(|detail| failed("TLS", detail))?;
                if shown.digest() == *expected {
                    return Ok(());
                }
                let violation = PeerViolation::WrongCertificate;
                Err(FabricError::PeerMisbehaved { kind: FabricKind::TCP, violation })
            }
            _ => Err(failed(
                "agreeing on encryption",
                "one side encrypts tcp, and the other does not".to_owned(),
            )),
        }
    }

    pub(super) async fn read_exact(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::Plain(stream) => stream.read_exact(into).await.map(drop),
            #[cfg(feature = "tls")]
            Self::Tls(stream) => stream.read_exact(into).await.map(drop),
        }
    }

    pub(super) async fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(bytes).await,
            #[cfg(feature = "tls")]
            Self::Tls(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
        }
    }
}

fn failed(step: &'static str, detail: String) -> FabricError {
    FabricError::Connect { kind: FabricKind::TCP, step, detail }
}
