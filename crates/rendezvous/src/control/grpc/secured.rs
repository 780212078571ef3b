//! What TLS proves about the peer of a session.

use tensorwire_fabric_tcp::tls::{PeerCertificate, TlsPurpose};
use tensorwire_protocol::text::{escaped, is_active};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use crate::control::{ProvenPeer, TlsNames};

/// The label of the keying material that both sides export from the connection.
const CHANNEL: &[u8] = b"EXPORTER-tensorwire control channel";

/// What the peer of `stream` has proven. `host` is the dialled host; `None` if the peer dialled.
///
/// # Errors
/// A message for users.
pub(super) fn prove(
    stream: &TlsStream<TcpStream>,
    names: TlsNames,
    host: Option<&str>,
) -> Result<ProvenPeer, String> {
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
