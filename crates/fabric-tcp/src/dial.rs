//! Connecting. Every dialler of the project uses this module, so all have the same rules.
//!
//! | dialler | function | limit of time |
//! | --- | --- | --- |
//! | control sessions (`rendezvous`) | [`Dial`], since a name may have several addresses | `GrpcConfig::dial_limit` |
//! | data connections (this crate) | `open`, at the address of the control session | `ConnectParams::limit` |
//! | clients of stores (`collective`) | [`Dial`] | the store's limit, 10 s at most |
//!
//! - **Several addresses.** The first address is dialled at once, and the next one when an attempt fails, or 250 ms later. The
//!   first connection is returned, and the other attempts end. So an address that swallows packets costs 250 ms and not the
//!   whole limit. This is the idea of RFC 8305, in the order of the resolver.
//! - **A handshake that fails.** If the caller cannot use the connection, it reports why by [`Dial::refuse`] and connects again:
//!   the remaining addresses are dialled.
//! - **Connections to itself.** If nothing listens at a port of the ephemeral range, the system may give the dialler this same
//!   port, and TCP's simultaneous open connects the socket to itself. Such a connection is reset and counts as refused. Until
//!   then it has the port at which the server is about to listen, which SO_REUSEADDR makes possible.
//! - **Link-local addresses** need a zone (`fe80::1%eth0`), which the system cannot guess. One without is an error that says so.
//!
//! A [`Dial`] outlives the futures of its connections: after a time limit of the caller, its `Display` text names each address
//! that was tried, with the reason.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_memory::Limit;
use tokio::net::{TcpSocket, TcpStream, lookup_host};

use crate::congestion::Congestion;

/// How long an attempt has before the next address is dialled, too.
const STAGGER: Duration = Duration::from_millis(250);

/// The reason of an address whose connection the caller has neither used nor refused.
const SILENT: &str = "connected, but no answer came: its process is stopped or overloaded or is no Tensorwire, or large \
                      packets are lost on the way (a black hole of MTU)";

/// Connects to a host that may have several addresses. See the module's documentation.
#[derive(Debug)]
pub struct Dial {
    runtime: Arc<dyn Runtime>,
    /// Addresses without a result, in the order of dialling.
    left: Vec<SocketAddr>,
    /// Addresses that failed, or whose connection was returned.
    tried: Vec<(SocketAddr, io::Error)>,
}

impl Dial {
    /// Dials nothing yet. `runtime` must be one of tokio with IO enabled.
    pub fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self { runtime, left: Vec::new(), tried: Vec::new() }
    }

    /// Finds the addresses of `host`: a name, an IPv4 address, or an IPv6 address without brackets, which may have a zone.
    ///
    /// # Errors
    /// Those of the system's resolver.
    ///
    /// # Cancel safety
    /// If dropped, the host has no addresses.
    pub async fn resolve(&mut self, host: &str, port: u16) -> io::Result<()> {
        self.left = lookup_host((host, port)).await?.collect();
        Ok(())
    }

    /// The first connection to an address that has not failed. `None` if there is none; the `Display` text has the
    /// reasons. Lasts as long as the system tries, so bound it.
    ///
    /// # Cancel safety
    /// If dropped, all attempts end, and the next call begins them again.
    pub async fn connect(&mut self) -> Option<(SocketAddr, TcpStream)> {
        let mut waiting = self.left.clone().into_iter();
        let mut begun = FuturesUnordered::new();
        loop {
            let next = waiting.next();
            begun.extend(next.map(|to| async move { (to, open(to, &Congestion::default()).await) }));
            let pause = if waiting.len() == 0 { Duration::MAX } else { STAGGER };
            let Ok(ended) = timeout(&*self.runtime, pause, begun.next()).await else { continue };
            let (address, opened) = ended?;
            self.left.retain(|left| *left != address);
            match opened {
                Ok(stream) => {
                    self.tried.push((address, io::Error::other(SILENT)));
                    return Some((address, stream));
                }
                Err(error) => self.tried.push((address, error)),
            }
        }
    }

    /// Records why the last connection cannot be used.
    pub fn refuse(&mut self, why: impl Into<String>) {
        if let Some((_, reason)) = self.tried.last_mut() {
            *reason = io::Error::other(why.into());
        }
    }

    /// The limit of this process or host that an attempt has met.
    pub fn limit(&self) -> Option<Limit> {
        self.tried.iter().find_map(|(_, error)| Limit::of_files(error))
    }
}

impl fmt::Display for Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tried = self.tried.iter().map(|(address, error)| match error.kind() {
            io::ErrorKind::ConnectionRefused => format!("{address}: connection refused"),
            _ => format!("{address}: {error}"),
        });
        let reasons: Vec<_> = tried.chain(self.left.iter().map(|at| format!("{at}: no answer"))).collect();
        f.write_str(if reasons.is_empty() { "the name has no known address" } else { "" })?;
        f.write_str(&reasons.join("; "))
    }
}

/// Connects to one address. Small writes on the stream are sent at once.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::ConnectionRefused`] also if the socket was connected to itself.
pub(super) async fn open(to: SocketAddr, congestion: &Congestion) -> io::Result<TcpStream> {
    if matches!(to, SocketAddr::V6(to) if to.ip().is_unicast_link_local() && to.scope_id() == 0) {
        return Err(io::Error::other("a link-local address needs its zone: write [fe80::1%eth0]:PORT"));
    }
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    congestion.choose(&socket);
    socket.set_reuseaddr(true)?;
    let stream = socket.connect(to).await?;
    if stream.local_addr()? == stream.peer_addr()? {
        // Without it the port stays in TIME_WAIT.
        stream.set_zero_linger()?;
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed step is a failed test
mod tests {
    use std::net::TcpListener;

    use super::{Congestion, open};
    use crate::tests::on_a_runtime;

    #[test]
    fn at_the_port_of_a_dialler_somebody_else_can_listen() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        on_a_runtime(|tokio| {
            let listens = || {
                let stream = tokio.block_on(open(peer, &Congestion::default())).unwrap();
                TcpListener::bind(stream.local_addr().unwrap()).is_ok()
            };
            // Another process may have a connection from the same port.
            assert!((0..8).any(|_| listens()));
        });
    }
}
