//! The listener of a fabric with a port of its own.

use std::{net::SocketAddr, sync::Arc};

use futures::{StreamExt, channel::oneshot, stream::FuturesUnordered};
use tensorwire_fabric::{BoxFuture, Runtime};
use tokio::net::TcpListener;

use crate::{
    congestion::Congestion,
    door::{Door, Newcomer, listen},
    port::DataPort,
};

/// Listens as long as it lives.
#[derive(Debug)]
pub(super) struct Listener {
    address: SocketAddr,
    /// Ends the task when dropped.
    _stop: oneshot::Sender<()>,
}

impl Listener {
    /// Listens on `bind`, and passes to `port` the streams that `door` admits.
    ///
    /// # Errors
    /// Those of the operating system.
    pub(super) fn start(
        runtime: &Arc<dyn Runtime>,
        bind: SocketAddr,
        congestion: &Congestion,
        door: Arc<Door>,
        port: DataPort,
    ) -> std::io::Result<Arc<Self>> {
        let socket = listen(&[bind], congestion)?;
        let address = socket.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        runtime.spawn("tcp listener", Box::pin(serve(socket, door, port, stopped)));
        Ok(Arc::new(Self { address, _stop: stop }))
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn serve(
    socket: std::net::TcpListener,
    door: Arc<Door>,
    port: DataPort,
    mut stopped: oneshot::Receiver<()>,
) {
    let socket = match TcpListener::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            log!(ERROR, %error, "the tcp data listener cannot start: connections to it will time out");
            return;
        }
    };
    let mut guests: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            _ = &mut stopped => return,
            Some(()) = guests.next() => {}
            newcomer = door.accept(&socket) => guests.push(Box::pin(receive(newcomer, &port))),
        }
    }
}

async fn receive(newcomer: Newcomer, port: &DataPort) {
    let Some(mut guest) = newcomer.await else { return };
    match guest.presence.unless_cut(port.protection().accept(guest.stream)).await {
        Some(Ok(stream)) => port.receive(stream, guest.presence).await,
        Some(Err(why)) => {
            log!(DEBUG, why, "a data connection was closed during the TLS handshake");
            port.count_not_trusted();
        }
        None => {}
    }
}
