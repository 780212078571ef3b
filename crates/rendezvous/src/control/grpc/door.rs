//! Connections that arrive at the plane's port. The [`Door`] limits connections whose peers are not authenticated. The
//! first bytes of a connection show its protocol: HTTP/2 for a session, or the hello of a data connection; under TLS,
//! ALPN names it. A data connection is passed to the tcp fabric. A session must be opened in time, and a connection
//! carries one session. A peer that is not authenticated can send a limited number of bytes and frames (see
//! [`traffic`](super::traffic)).

#[cfg(test)]
mod tests;

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

#[cfg(feature = "tls")]
use tensorwire_fabric_tcp::tls::{TlsPurpose, explain_io};
use tensorwire_fabric_tcp::{DataPort, Door, Newcomer, Presence, Stranger, Visit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::{
    traffic::{STRANGER_BYTES, STRANGER_FRAMES},
    wire::{Security, Wire},
};
use crate::{
    control::{Addresses, ProvenPeer},
    log::quota::LogQuota,
};

/// Distinguishes sessions from data connections.
pub(super) struct Reception {
    pub(super) door: Arc<Door>,
    pub(super) security: Security,
    pub(super) data: DataPort,
    pub(super) log: LogQuota,
}

impl Reception {
    /// The stream of a session, after its peer has sent the first bytes; `None` if it is a data connection, or was
    /// closed.
    pub(super) async fn receive(self: Arc<Self>, newcomer: Newcomer) -> Option<GuestStream> {
        let tensorwire_fabric_tcp::Guest { stream, presence, first } = newcomer.await?;
        match &self.security {
            Security::None if DataPort::may_begin_with(first) => {
                self.data.receive(stream.into(), presence).await;
                None
            }
            Security::None => Some(GuestStream::new(Wire::accepted(stream), presence, &self)),
            #[cfg(feature = "tls")]
            Security::Tls { identity, names } => {
                let mut presence = presence;
                let accepted = presence.unless_cut(identity.accept_any(stream)).await?;
                let wire = match accepted {
                    Ok((stream, TlsPurpose::Data)) => {
                        self.data.receive(stream.into(), presence).await;
                        return None;
                    }
                    Ok((stream, TlsPurpose::Control)) => Wire::accepted_under_tls(stream, *names),
                    Err(error) => Err(explain_io(&error)),
                };
                match wire {
                    Ok(wire) => Some(GuestStream::new(wire, presence, &self)),
                    Err(why) => {
                        self.complain(presence.stranger(), &tensorwire_protocol::text::escaped(&why));
                        None
                    }
                }
            }
        }
    }

    /// Logs why a connection is closed.
    fn complain(&self, stranger: &Stranger, why: &str) {
        let peer = stranger.peer_address().ip();
        if let Some(left_out) = self.log.line(&peer.to_string()) {
            log!(WARN, %peer, why, left_out, "a control connection was cut");
        }
    }
}

/// The connection of an accepted session.
pub(super) struct Guest {
    /// The door's state of the connection.
    pub(super) stranger: Arc<Stranger>,
    /// What the peer has proven by TLS.
    pub(super) proven: Option<Arc<ProvenPeer>>,
}

impl Guest {
    /// The addresses of the connection.
    pub(super) fn addresses(&self) -> Addresses {
        Addresses { own: self.stranger.own_address(), peer: self.stranger.peer_address() }
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stranger.fmt(f)
    }
}

/// The stream of a session, which the door can close.
pub(super) struct GuestStream {
    stream: Wire,
    presence: Presence,
    guest: Arc<Guest>,
    reception: Arc<Reception>,
}

impl GuestStream {
    fn new(stream: Wire, presence: Presence, reception: &Arc<Reception>) -> Self {
        let stranger = presence.stranger().clone();
        stranger.note(Visit::Session);
        let guest = Arc::new(Guest { stranger, proven: stream.proven().cloned() });
        Self { stream, presence, guest, reception: reception.clone() }
    }

    /// Logs what was wrong with the peer's bytes.
    fn note<T>(&self, polled: &Poll<io::Result<T>>) {
        if matches!(polled, Poll::Ready(Err(_)))
            && let Some(why) = self.stream.trouble().why()
            && (!why.is_tls || self.guest.stranger.is_arriving())
        {
            self.reception.complain(&self.guest.stranger, &why.text);
        }
    }
}

impl Drop for GuestStream {
    fn drop(&mut self) {
        if self.presence.is_held_back() {
            let why = format!(
                "the peer reached the limit of {STRANGER_BYTES} bytes or {STRANGER_FRAMES} frames before it was authenticated"
            );
            self.reception.complain(&self.guest.stranger, &why);
        }
    }
}

impl Connected for GuestStream {
    type ConnectInfo = Arc<Guest>;

    fn connect_info(&self) -> Arc<Guest> {
        self.guest.clone()
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.presence.poll_cut(context)?;
        if this.guest.stranger.is_admitted() {
            this.stream.admit();
        }
        if this.stream.is_held_back() {
            this.presence.hold_back();
        }
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.note(&read);
        read
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.presence.poll_cut(context)?;
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.presence.poll_cut(context)?;
        Pin::new(&mut this.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
