//! A stream under TLS.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use pin_project::pin_project;
use tensorwire_fabric_tcp::tls::{PeerCertificate, TlsIdentity, TlsPurpose, explain_io, explain_later};
use tensorwire_protocol::text::{escaped, is_active};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

use super::trouble::Trouble;
use crate::control::{ProvenPeer, TlsNames};

/// The label of the keying material that both sides export from the connection.
const CHANNEL: &[u8] = b"EXPORTER-tensorwire control channel";

/// An encrypted stream, after the handshake.
#[pin_project]
pub(super) struct Secured {
    #[pin]
    stream: TlsStream<TcpStream>,
    proven: Arc<ProvenPeer>,
    trouble: Trouble,
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("proven", &self.proven).finish_non_exhaustive()
    }
}

impl Secured {
    /// Makes a TLS handshake with `host`.
    ///
    /// # Errors
    /// A message for users.
    pub(super) async fn dial(
        stream: TcpStream,
        identity: &TlsIdentity,
        names: TlsNames,
        host: &str,
        trouble: Trouble,
    ) -> Result<Self, String> {
        let stream = identity.connect(TlsPurpose::Control, stream).await;
        let stream = stream.map_err(|error| escaped(&explain_io(&error)).into_owned())?;
        Self::new(stream, names, Some(host), trouble)
    }

    /// The stream of a session. `host` is the dialled host; `None` if the peer dialled.
    ///
    /// # Errors
    /// A message for users.
    pub(super) fn new(
        stream: TlsStream<TcpStream>,
        names: TlsNames,
        host: Option<&str>,
        trouble: Trouble,
    ) -> Result<Self, String> {
        let proven = Arc::new(prove(&stream, names, host)?);
        Ok(Self { stream, proven, trouble })
    }

    pub(super) fn proven(&self) -> &Arc<ProvenPeer> {
        &self.proven
    }
}

/// What the peer has proven.
fn prove(stream: &TlsStream<TcpStream>, names: TlsNames, host: Option<&str>) -> Result<ProvenPeer, String> {
    let (_, connection) = stream.get_ref();
    let peer = PeerCertificate::of(connection, TlsPurpose::Control)?;
    let channel = match stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; 32], CHANNEL, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; 32], CHANNEL, None),
    };
    let channel = channel.map_err(|error| error.to_string())?;
    let host = host.map_or(Ok(()), |host| peer.is_for_host(host));
    let host = host.map_err(|problem| escaped(&problem).into_owned());
    // They appear in error messages, and no worker name contains such characters.
    let uris = peer.uris().into_iter().filter(|uri| !uri.contains(is_active)).collect();
    Ok(ProvenPeer { channel, uris, host, names })
}

impl AsyncRead for Secured {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.project();
        let read = this.stream.poll_read(context, buffer);
        // The cause of a stream's error is stored, because HTTP/2 would lose it.
        read.map_err(|error| match explain_later(&error) {
            Some(why) => this.trouble.note(why),
            None => error,
        })
    }
}

impl AsyncWrite for Secured {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.project().stream.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().stream.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().stream.poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.project().stream.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
