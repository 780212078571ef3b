//! Runs futures that need tokio as tasks of the store's runtime, because a program may await a store on another executor.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use futures::{FutureExt, channel::oneshot, future::select};
use tensorwire_fabric::{Runtime, timeout};
use tokio::net::lookup_host;
#[cfg(any(feature = "redis", feature = "etcd"))]
use {super::url::Service, tensorwire_rendezvous::control::Dial, tokio::net::TcpStream};

/// Awaits `future` as a task of `runtime`.
///
/// # Errors
/// The runtime has ended.
///
/// # Cancel safety
/// If dropped, the task ends.
pub(super) async fn on_runtime<T: Send + 'static>(
    runtime: &Arc<dyn Runtime>,
    future: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let (mut done, output) = oneshot::channel();
    let task = async move {
        let output = async { Some(future.await) };
        let dropped = done.cancellation().map(|()| None);
        if let Some(output) = select(output.boxed(), dropped).await.factor_first().0 {
            let _ = done.send(output);
        }
    };
    runtime.spawn("store", task.boxed());
    output.await.map_err(|_| io::Error::other("the runtime has ended"))
}

/// The addresses of `HOST:PORT`. Empty if the look-up fails or exceeds `limit`; dialling then reports the error.
pub(crate) async fn look_up(address: &str, limit: Duration, runtime: &Arc<dyn Runtime>) -> Vec<SocketAddr> {
    let address = address.to_owned();
    let found = on_runtime(runtime, async move { lookup_host(address).await.map(Iterator::collect) });
    match timeout(&**runtime, limit, found).await {
        Ok(Ok(Ok(found))) => found,
        _ => Vec::new(),
    }
}

#[cfg(any(feature = "redis", feature = "etcd"))]
impl Service {
    /// Connects to the server.
    ///
    /// # Errors
    /// Those of the resolver, or each address with its reason.
    pub(super) async fn connect(&self, runtime: &Arc<dyn Runtime>) -> io::Result<TcpStream> {
        let (host, port, mut dial) = (self.host.clone(), self.port, Dial::new(Arc::clone(runtime)));
        let dialled = async move {
            dial.resolve(&host, port).await?;
            let connected = dial.connect().await.map(|(_, stream)| stream);
            connected.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, dial.to_string()))
        };
        on_runtime(runtime, dialled).await?
    }
}
