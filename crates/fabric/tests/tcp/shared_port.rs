//! A fabric that shares a port with a host: the host listens, and passes on the streams that begin with a hello.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures::{
    StreamExt,
    channel::oneshot,
    future::{Either, join, select},
    stream::FuturesUnordered,
};
use tensorwire_fabric::{
    ConnectParams, ConnectionData, Fabric, FabricError, Immediate, Prepared, Role, Runtime,
};
use tensorwire_fabric_tcp::{Congestion, DataPort, Door, TcpConfig, TcpFabric, listen};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::HOST;
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, STEP_LIMIT, immediate, step},
};

/// The host that listens. It answers streams that are no data connections with `answer`.
struct Host {
    address: SocketAddr,
    data: DataPort,
    _stop: oneshot::Sender<()>,
}

impl Host {
    fn new(runtime: &Arc<dyn Runtime>, answer: &'static [u8]) -> Self {
        let listener = listen(&[SocketAddr::new(HOST, 0)], &Congestion::default()).unwrap();
        let address = listener.local_addr().unwrap();
        let (data, door) = (DataPort::new(), Door::new(64, Duration::from_secs(5), runtime.clone()));
        let (stop, stopped) = oneshot::channel();
        let port = data.clone();
        let serving = async move {
            let listener = TcpListener::from_std(listener).unwrap();
            let mut guests = FuturesUnordered::new();
            let serving = async {
                loop {
                    tokio::select! {
                        Some(()) = guests.next() => {}
                        newcomer = door.accept(&listener) => guests.push(async {
                            let Some(mut guest) = newcomer.await else { return };
                            if DataPort::may_begin_with(guest.first) && answer.is_empty() {
                                return port.receive(guest.stream.into(), guest.presence).await;
                            }
                            let _gone = guest.stream.write_all(answer).await;
                            let _gone = guest.presence.unless_cut(guest.stream.read(&mut [0; 200])).await;
                        }),
                    }
                }
            };
            drop::<Either<_, _>>(select(std::pin::pin!(serving), stopped).await);
        };
        runtime.spawn("host", Box::pin(serving));
        Self { address, data, _stop: stop }
    }

    fn prepare(&self, runtime: &Arc<dyn Runtime>) -> Box<dyn Prepared> {
        let fabric = TcpFabric::at_port(runtime.clone(), TcpConfig::default(), self.data.clone());
        fabric.open_domain().unwrap().prepare(DEPTHS).unwrap()
    }

    fn params(&self, peer: ConnectionData, role: Role) -> ConnectParams {
        let peer_address = (role == Role::Dialer).then_some(self.address);
        ConnectParams { peer, role, peer_address, limit: STEP_LIMIT }
    }
}

#[test]
fn data_connections_come_in_at_the_port_of_somebody_else() {
    for flavour in [Flavour::CurrentThread, Flavour::TwoWorkers] {
        bounded(flavour, |runtime| async move {
            let (near, far) = (Host::new(&runtime, b""), Host::new(&runtime, b""));
            for (dialer, acceptor) in [(&near, &far), (&far, &near), (&near, &near)] {
                let (dialing, accepting) = (dialer.prepare(&runtime), acceptor.prepare(&runtime));
                let to = acceptor.params(accepting.connection_data(), Role::Dialer);
                let from = acceptor.params(dialing.connection_data(), Role::Acceptor);
                let both = join(dialing.connect(to), accepting.connect(from));
                let (dialed, accepted) = step(&runtime, "connecting", both).await;
                let (dialed, accepted) =
                    (dialed.unwrap().spawn(&*runtime), accepted.unwrap().spawn(&*runtime));
                step(&runtime, "a notification", dialed.notify(Immediate(3))).await.unwrap();
                let arrival = step(&runtime, "an arrival", accepted.next_arrival()).await.unwrap();
                assert_eq!(immediate(arrival), (3, 0));
            }
        });
    }
}

#[test]
fn what_begins_otherwise_stays_with_who_listens() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let host = Host::new(&runtime, b"something else");
        let mut stream = TcpStream::connect(host.address).await.unwrap();
        stream.write_all(b"PRI * HTTP/2.0").await.unwrap();
        let mut answer = [0; 14];
        step(&runtime, "the answer", stream.read_exact(&mut answer)).await.unwrap();
        assert_eq!(&answer, b"something else");
    });
}

#[test]
fn a_proxy_for_http_on_the_way_is_named_with_what_is_needed_instead() {
    let settings: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0];
    for answer in [b"HTTP/1.1 400 Bad Request\r\n\r\n", settings] {
        bounded(Flavour::CurrentThread, move |runtime| async move {
            let (near, proxy) = (Host::new(&runtime, b""), Host::new(&runtime, answer));
            let peer = proxy.prepare(&runtime).connection_data();
            let dialing = near.prepare(&runtime).connect(proxy.params(peer, Role::Dialer));
            let error = step(&runtime, "the dial", dialing).await.unwrap_err();
            assert!(matches!(error, FabricError::Connect { step: "the handshake", .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("answers in HTTP") && text.contains("passes TCP or TLS through"), "{text}");
        });
    }
}
