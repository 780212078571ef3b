//! The address to print for clients.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Addresses that no host has (RFC 5737, RFC 3849): the route to them is the default route.
const OUTSIDE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];
const ANY_PORT: u16 = 9;

/// An address of this host by which clients reach a server that listens at all addresses; `None` for a server that
/// listens at one address.
pub(crate) fn instead_of_all(listening: &str) -> Option<SocketAddr> {
    let all = listening.parse::<SocketAddr>().ok().filter(|address| address.ip().is_unspecified())?;
    // A socket for all addresses of IPv6 takes IPv4, too.
    let ways = OUTSIDE.iter().filter(|outside| all.is_ipv6() || outside.is_ipv4());
    let own = ways.filter_map(|outside| on_the_way_to(*outside)).next();
    Some(SocketAddr::new(own.unwrap_or(Ipv4Addr::LOCALHOST.into()), all.port()))
}

/// The address that this host sends from. Connecting a UDP socket looks up the route and sends nothing.
fn on_the_way_to(outside: IpAddr) -> Option<IpAddr> {
    let any =
        if outside.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((outside, ANY_PORT)).ok()?;
    socket.local_addr().ok().map(|own| own.ip())
}

#[cfg(test)]
mod tests {
    use super::instead_of_all;

    #[test]
    fn all_addresses_become_one_with_the_same_port() {
        for all in ["0.0.0.0:4242", "[::]:4242"] {
            let one = instead_of_all(all).unwrap();
            assert!(!one.ip().is_unspecified() && one.port() == 4242, "{all}: {one}");
        }
        assert!(instead_of_all("0.0.0.0:4242").unwrap().is_ipv4());
    }

    #[test]
    fn one_address_stays() {
        for one in ["127.0.0.1:4242", "[::1]:4242", "a.example:4242"] {
            assert_eq!(instead_of_all(one), None);
        }
    }
}
