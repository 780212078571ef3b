//! The syntax of addresses.

use std::net::SocketAddr;

use tensorwire_protocol::{limits::ADDRESS_BYTES_MAX, text::is_active};

use super::ControlError;

/// Splits an address of the form `HOST:PORT`. This is the form of addresses on the command line, in a cluster, and of
/// peers. An IPv6 host is written in brackets and returned without them. Port 0 is allowed; only listeners can use it.
/// The host is not looked up.
///
/// ```
/// use tensorwire::settings::host_and_port;
///
/// assert_eq!(host_and_port("[::1]:4242"), Ok(("::1", 4242)));
/// assert!(host_and_port("::1:4242").is_err());
/// ```
///
/// # Errors
/// The problem, and the remedy.
pub fn host_and_port(address: &str) -> Result<(&str, u16), &'static str> {
    if address.len() > ADDRESS_BYTES_MAX {
        return Err("it is longer than 256 bytes");
    }
    if address.contains("://") {
        return Err("write it as HOST:PORT, without a scheme");
    }
    let (host, port) = address.rsplit_once(':').ok_or("it has no port: write HOST:PORT")?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or("its bracket is not closed: write [::1]:PORT")?,
        None if host.contains(':') => return Err("write IPv6 addresses in brackets: [::1]:PORT"),
        None => host,
    };
    if host.is_empty() {
        return Err("it has no host: write HOST:PORT");
    }
    if host
        .chars()
        .any(|part| part.is_whitespace() || is_active(part) || matches!(part, '/' | ',' | '@' | '[' | ']'))
    {
        return Err("its host has characters that are not allowed in host names: write HOST:PORT");
    }
    // `parse` alone would accept a sign.
    let digits = port.bytes().all(|digit| digit.is_ascii_digit()).then_some(port);
    let port =
        digits.and_then(|digits| digits.parse().ok()).ok_or("its port is not a number from 1 to 65535")?;
    Ok((host, port))
}

/// This worker's listen address in a form for other hosts: without the zone of a link-local address, which has a
/// meaning only on this host.
pub(crate) fn for_peers(address: &str) -> String {
    match address.parse() {
        Ok(SocketAddr::V6(mut address)) => {
            address.set_scope_id(0);
            address.to_string()
        }
        _ => address.to_owned(),
    }
}

/// The listen address that a peer announced, in a form that this worker can dial. If the peer listens on all its
/// addresses, the result has the host of the session's address `peer`. A link-local address gets the zone of the
/// session.
pub(crate) fn dialable(address: &str, peer: Option<SocketAddr>) -> String {
    let (Ok(mut listens), Some(peer)) = (address.parse::<SocketAddr>(), peer) else {
        return address.to_owned();
    };
    let (port, host) = (listens.port(), peer.ip().to_canonical());
    if listens.ip().is_unspecified() {
        listens = if host == peer.ip() { peer } else { SocketAddr::new(host, port) };
        listens.set_port(port);
    }
    if let (SocketAddr::V6(listens), SocketAddr::V6(peer)) = (&mut listens, peer)
        && listens.ip().is_unicast_link_local()
    {
        listens.set_scope_id(peer.scope_id());
    }
    listens.to_string()
}

/// Like [`host_and_port`], for an address to listen on or to dial.
pub(super) fn parts(address: &str) -> Result<(&str, u16), ControlError> {
    host_and_port(address).map_err(|_| ControlError::BadAddress { address: address.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_stays_on_its_host() {
        assert_eq!(for_peers("[fe80::1%2]:5"), "[fe80::1]:5");
        for address in ["[fd00::1]:5", "10.0.0.1:5", "host:5"] {
            assert_eq!(for_peers(address), address);
        }
        for (listens, peer, dialled) in [
            ("[fe80::1]:5", "[fe80::9%3]:1", "[fe80::1%3]:5"),
            ("[fe80::1%7]:5", "[fe80::9%3]:1", "[fe80::1%3]:5"),
            ("[::]:5", "[fe80::9%3]:1", "[fe80::9%3]:5"),
            ("[fd00::1]:5", "[fe80::9%3]:1", "[fd00::1]:5"),
            ("host:5", "[fe80::9%3]:1", "host:5"),
        ] {
            assert_eq!(dialable(listens, peer.parse().ok()), dialled);
        }
    }

    #[test]
    fn an_address_has_a_host_and_a_port_and_nothing_else() {
        let taken = [
            ("127.0.0.1:1", ("127.0.0.1", 1)),
            ("127.0.0.1:0", ("127.0.0.1", 0)),
            ("[::1]:4242", ("::1", 4242)),
            ("[::ffff:1.2.3.4]:65535", ("::ffff:1.2.3.4", 65535)),
            ("server.example:65535", ("server.example", 65535)),
        ];
        for (address, parts) in taken {
            assert_eq!(host_and_port(address), Ok(parts));
        }
        let refused = [
            ("", "no port"),
            ("nowhere", "no port"),
            (":1", "no host"),
            ("[]:1", "no host"),
            ("host:", "port is not a number"),
            ("host:x", "port is not a number"),
            ("host:+1", "port is not a number"),
            ("host:-1", "port is not a number"),
            ("host: 1", "port is not a number"),
            ("host:65536", "port is not a number"),
            ("::1:1", "brackets"),
            ("a:b:1", "brackets"),
            ("[::1:1", "not closed"),
            ("[::1]x:1", "not closed"),
            ("[[::1]]:1", "characters"),
            ("::1]:1", "brackets"),
            ("a]:1", "characters"),
            ("a b:1", "characters"),
            ("a/b:1", "characters"),
            ("a,b:1", "characters"),
            ("a@b:1", "characters"),
            ("http://a:1", "without a scheme"),
        ];
        for (address, why) in refused {
            let problem = host_and_port(address).unwrap_err();
            assert!(problem.contains(why), "{address}: {problem}");
        }
        let long = format!("{}:1", "h".repeat(ADDRESS_BYTES_MAX));
        assert!(host_and_port(&long).is_err() && host_and_port(&long[2..]).is_ok());
    }
}
