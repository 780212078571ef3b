//! A stream under TLS. One that came in shakes hands when it is first read, so that a slow stranger holds up nobody but
//! itself, within the door's time.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;
use verbs_reactor::{
    BoxFuture,
    tls::{PeerCertificate, TlsIdentity, TlsPurpose, explain_io, explain_later},
};

use super::wire::Trouble;
use crate::control::{ProvenPeer, TlsNames};

/// What both ends derive from their connection alone.
const CHANNEL: &[u8] = b"EXPORTER-tensorwire control channel";

/// An encrypted stream.
pub(super) struct Secured {
    state: State,
    names: TlsNames,
    proven: Option<Arc<ProvenPeer>>,
    trouble: Trouble,
}

enum State {
    Greeting(BoxFuture<'static, io::Result<TlsStream<TcpStream>>>),
    Up(Box<TlsStream<TcpStream>>),
    Failed,
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("proven", &self.proven).finish_non_exhaustive()
    }
}

impl Secured {
    /// Shakes hands with the end at `host`.
    pub(super) async fn dial(
        stream: TcpStream,
        identity: &TlsIdentity,
        names: TlsNames,
        host: &str,
        trouble: Trouble,
    ) -> Result<Self, String> {
        let up = identity.connect(TlsPurpose::Control, stream).await.map_err(|error| explain_io(&error))?;
        let proven = Some(Arc::new(prove(&up, names, Some(host))?));
        Ok(Self { state: State::Up(Box::new(up)), names, proven, trouble })
    }

    /// Will shake hands with the end that dialled.
    pub(super) fn accept(
        stream: TcpStream,
        identity: &TlsIdentity,
        names: TlsNames,
        trouble: Trouble,
    ) -> Self {
        let identity = identity.clone();
        let greeting = async move { identity.accept(TlsPurpose::Control, stream).await };
        let state = State::Greeting(Box::pin(greeting));
        Self { state, names, proven: None, trouble }
    }

    pub(super) fn proven(&self) -> Option<&Arc<ProvenPeer>> {
        self.proven.as_ref()
    }

    /// The stream, once hands are shaken.
    fn poll_up(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<TcpStream>>>> {
        if let State::Greeting(accept) = &mut self.state {
            let greeted = ready!(accept.as_mut().poll(context));
            let greeted = greeted
                .map_err(|error| explain_io(&error))
                .and_then(|stream| prove(&stream, self.names, None).map(|proven| (stream, proven)));
            self.state = match greeted {
                Ok((stream, proven)) => {
                    self.proven = Some(Arc::new(proven));
                    State::Up(Box::new(stream))
                }
                Err(why) => {
                    self.trouble.note(why);
                    State::Failed
                }
            };
        }
        Poll::Ready(match &mut self.state {
            State::Up(stream) => Ok(Pin::new(&mut **stream)),
            State::Greeting(_) | State::Failed => Err(self.trouble.note("the TLS handshake failed")),
        })
    }

    /// What an error of the stream means; HTTP/2 would lose its cause.
    fn noted<T>(trouble: &Trouble, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        polled.map_err(|error| match explain_later(&error) {
            Some(why) => trouble.note(why),
            None => error,
        })
    }
}

/// What the other end has proven.
fn prove(stream: &TlsStream<TcpStream>, names: TlsNames, host: Option<&str>) -> Result<ProvenPeer, String> {
    let (_, connection) = stream.get_ref();
    let peer = PeerCertificate::of(connection, TlsPurpose::Control)?;
    let channel = match stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; 32], CHANNEL, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; 32], CHANNEL, None),
    };
    let channel = channel.map_err(|error| error.to_string())?;
    let host = host.map_or(Ok(()), |host| peer.is_for_host(host));
    Ok(ProvenPeer { certificate: peer.digest(), channel, uris: peer.uris(), host, names })
}

impl AsyncRead for Secured {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let trouble = this.trouble.clone();
        let stream = ready!(this.poll_up(context))?;
        Self::noted(&trouble, stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Secured {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.get_mut().poll_up(context))?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Up(stream) => Pin::new(&mut **stream).poll_flush(context),
            // Nothing was written.
            State::Greeting(_) | State::Failed => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Up(stream) => Pin::new(&mut **stream).poll_shutdown(context),
            State::Greeting(_) | State::Failed => Poll::Ready(Ok(())),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.get_mut().poll_up(context))?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
