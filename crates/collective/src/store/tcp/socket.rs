//! What is asked of a connection of the store.

use std::{io, time::Duration};

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// A silent peer is asked after this for a sign of life.
const SILENT_MAX: Duration = Duration::from_secs(10);

/// How often it is asked again, and the pause in between.
const PROBES: u32 = 4;
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// How long the peer's machine may not confirm what was sent, in milliseconds.
const UNCONFIRMED_MAX: u32 = 30_000;

/// Requests are small, and each is waited for: none waits for more to send. A connection ends half a minute after its peer's
/// machine crashed or cannot be reached any more, of which nothing else tells.
///
/// # Errors
/// Those of the operating system.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENT_MAX)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, UNCONFIRMED_MAX)?;
    Ok(())
}
