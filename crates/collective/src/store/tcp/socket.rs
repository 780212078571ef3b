//! The options of the store's sockets.

use std::{io, time::Duration};

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// How long a connection may be idle before keep-alive probes.
const SILENT_MAX: Duration = Duration::from_secs(10);

/// The number of probes, and the pause between them.
const PROBES: u32 = 4;
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// How long sent data may stay unacknowledged, in milliseconds.
const UNCONFIRMED_MAX: u32 = 30_000;

/// Sends small requests at once. Ends a connection half a minute after the peer's machine crashed or became unreachable, which
/// nothing else would report.
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
