//! The store that one rank serves to all.

mod client;
mod driver;
mod frames;
mod guests;
mod link;
mod server;
mod socket;
mod wire;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_rendezvous::control::host_and_port;
use tokio::net::TcpListener;

use self::{
    client::Client,
    server::Server,
    wire::{Answer, KEYS_BYTES_MAX, KEYS_MAX, Request},
};
use super::{
    Store, StoreError,
    board::{Board, BoardLimits},
    memory::MemoryStore,
    on_runtime::on_runtime,
    rules::{check_compare, check_key, check_keys, check_value},
};

/// The most keys that a client waits for in one request. The server holds the keys of all waits, and each of thousands of ranks
/// may wait for all ranks.
const WAIT_KEYS_MAX: usize = 256;

/// The limits of the server of a [`TcpStore`]. Beyond them it rejects requests with an error that names the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpLimits {
    /// Connections at a time, one for each client. Default: 16,384, and at most three quarters of the files that the process may
    /// open, less 64. Above that the server closes one that has made no request, or one that has done nothing for `request`.
    pub connections: usize,
    /// Keys. Default: 1,048,576.
    pub keys: usize,
    /// Bytes of all keys and values. As many again may be under way: the keys of waits, incomplete requests and unread answers.
    /// Above that the server closes the connection that holds most of these. Default: 256 MiB.
    pub bytes: usize,
    /// Waits at a time, including those of the serving rank. Default: 65,536.
    pub waits: usize,
    /// How long a client may take for its hello, for the rest of a request that it began, and for reading an answer, before its
    /// connection is closed. Default: 10 s. An idle client may stay connected.
    pub request: Duration,
}

impl Default for TcpLimits {
    fn default() -> Self {
        Self {
            connections: 1 << 14,
            keys: 1 << 20,
            bytes: 256 << 20,
            waits: 1 << 16,
            request: Duration::from_secs(10),
        }
    }
}

/// A map in the process of one rank, which serves it to the others over TCP. Clones share the connection, or the server.
///
/// The server holds its keys in memory. It ends with the last clone of the serving store, and its keys are lost. Clients
/// reconnect, within the limit of each operation, when their connection breaks, or when the server's machine has not responded
/// for half a minute. If the server was restarted, they find an empty store, and log a warning.
///
/// # Which writes are repeated
/// If a connection breaks before the answer, [`set`](Store::set), [`get`](Store::get) and [`wait`](Store::wait) are repeated. A
/// repeated `set` overwrites a value that another rank wrote in between. [`add`](Store::add), [`compare_set`](Store::compare_set)
/// and [`delete`](Store::delete) are not repeated if the server may have received them: they end with
/// [`StoreError::Unreachable`].
///
/// # Many keys
/// One request reads up to 4,096 keys, or waits for up to 256, with values of at most 4 MiB together. More keys take several
/// requests, one after the other, so their values may be of different times.
///
/// # Trust
/// The store neither authenticates nor encrypts: any process that can connect can read and write all keys. Let only the job's
/// processes reach it. Ranks authenticate each other when they connect, by the secret of the workers.
#[derive(Debug, Clone)]
pub struct TcpStore {
    side: Side,
}

#[derive(Debug, Clone)]
enum Side {
    Server { memory: MemoryStore, server: Arc<Server> },
    Client(Arc<Client>),
}

impl TcpStore {
    /// Serves a new store at `address` with the default [`TcpLimits`]. `address` is `HOST:PORT`. With port 0 the operating system
    /// chooses one; without a host (`:29500`) only processes of this machine can connect. Returns the store and the address that
    /// it bound.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if the address cannot be bound.
    ///
    /// # Cancel safety
    /// If dropped, nothing is served.
    pub async fn serve(address: &str, runtime: Arc<dyn Runtime>) -> Result<(Self, SocketAddr), StoreError> {
        Self::serve_within(address, TcpLimits::default(), runtime).await
    }

    /// As [`serve`](Self::serve), with other limits.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    ///
    /// # Cancel safety
    /// As [`serve`](Self::serve).
    pub async fn serve_within(
        address: &str,
        limits: TcpLimits,
        runtime: Arc<dyn Runtime>,
    ) -> Result<(Self, SocketAddr), StoreError> {
        Self::serve_with(address, limits, None, runtime).await
    }

    /// As [`serve_within`](Self::serve_within), with a key and its value that each client finds there.
    pub(crate) async fn serve_with(
        address: &str,
        limits: TcpLimits,
        first: Option<(&str, &[u8])>,
        runtime: Arc<dyn Runtime>,
    ) -> Result<(Self, SocketAddr), StoreError> {
        let failed = |error: io::Error| StoreError::Unreachable {
            store: format!("the store at {address}"),
            detail: format!("cannot serve it: {error}; give an address of this machine with a free port"),
        };
        // Any process that can connect can write, so other machines are admitted only on request.
        let bind = if address.starts_with(':') { format!("127.0.0.1{address}") } else { address.to_owned() };
        let (host, port) = host_and_port(&bind).map_err(|why| failed(io::Error::other(why)))?;
        let parts = (host.to_owned(), port);
        let bound = on_runtime(&runtime, async move { TcpListener::bind((&*parts.0, parts.1)).await });
        let listener = bound.await.and_then(|bound| bound).map_err(failed)?;
        let TcpLimits { keys, bytes, waits, .. } = limits;
        let board = Arc::new(Board::new(BoardLimits { keys, bytes, waits }));
        // Fits the limits.
        let _written = first.map(|(key, value)| board.set(key, value));
        let server = Server::start(listener, Arc::clone(&board), limits, &runtime).map_err(failed)?;
        let bound = server.address();
        let memory = MemoryStore::over(&format!("the store served at {bound}"), board, runtime);
        Ok((Self { side: Side::Server { memory, server: Arc::new(server) } }, bound))
    }

    /// Connects to the store at `address`, `HOST:PORT`. Tries again for `limit`, because the server may start later. `limit` also
    /// holds for each later operation without its own, and for reconnecting.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if no server answers in time, or another program listens there; [`StoreError::Full`] if the
    /// server has too many connections.
    ///
    /// # Cancel safety
    /// If dropped, nothing is connected.
    pub async fn connect(
        address: &str,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Self, StoreError> {
        let client = Arc::new(Client::new(address, limit, runtime));
        client.ask(Request::Get { keys: Vec::new() }).await?;
        Ok(Self { side: Side::Client(client) })
    }

    /// The number of clients connected to this server; `None` for a client.
    pub fn connections(&self) -> Option<usize> {
        match &self.side {
            Side::Server { server, .. } => Some(server.connections()),
            Side::Client(_) => None,
        }
    }

    /// The number of waits in progress on this server; `None` for a client.
    pub fn waits(&self) -> Option<usize> {
        match &self.side {
            Side::Server { memory, .. } => Some(memory.waits()),
            Side::Client(_) => None,
        }
    }
}

impl Client {
    async fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_key(key)?;
        check_value(value)?;
        match self.ask(Request::Set { key: key.to_owned(), value: value.to_vec() }).await? {
            Answer::Done => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    async fn get(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        check_keys(keys)?;
        let (mut found, until) = (Vec::with_capacity(keys.len()), self.until());
        while found.len() < keys.len() {
            let part = part(&keys[found.len()..], KEYS_MAX);
            match self.ask_until(Request::Get { keys: part.to_vec() }, until).await? {
                Answer::Values(values) if (1..=part.len()).contains(&values.len()) => {
                    found.extend(values.into_iter().map(|value| value.map(|value| value.to_vec())));
                }
                _ => return Err(self.unexpected()),
            }
        }
        Ok(found)
    }

    async fn wait(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        check_keys(keys)?;
        let until = self.now().saturating_add(limit);
        let (mut found, mut missing, mut done) = (Vec::with_capacity(keys.len()), Vec::new(), 0);
        while done < keys.len() {
            let part = part(&keys[done..], WAIT_KEYS_MAX);
            match self.ask_wait(part, until).await? {
                Answer::Values(values) if (1..=part.len()).contains(&values.len()) => {
                    done += values.len();
                    found.extend(values.into_iter().flatten().map(|value| value.to_vec()));
                }
                Answer::Missing(indices) => {
                    done += part.len();
                    missing.extend(indices.iter().filter_map(|&index| part.get(index as usize)).cloned());
                }
                _ => return Err(self.unexpected()),
            }
        }
        if !missing.is_empty() {
            return Err(StoreError::TimedOut { store: self.store(), limit, missing });
        }
        if found.len() == keys.len() { Ok(found) } else { Err(self.unexpected()) }
    }

    async fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        match self.ask(Request::Add { key: key.to_owned(), delta }).await? {
            Answer::Number(sum) => Ok(sum),
            _ => Err(self.unexpected()),
        }
    }

    async fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        check_compare(key, expected, value)?;
        let (key, expected) = (key.to_owned(), expected.map(<[u8]>::to_vec));
        match self.ask(Request::CompareSet { key, expected, value: value.to_vec() }).await? {
            Answer::Value(value) => Ok(value.map(|value| value.to_vec())),
            _ => Err(self.unexpected()),
        }
    }

    async fn delete(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        match self.ask(Request::Delete { key: key.to_owned() }).await? {
            Answer::Deleted(had_one) => Ok(had_one),
            _ => Err(self.unexpected()),
        }
    }
}

/// The first of `keys` that fit into one request, at most `max` and at least one.
fn part(keys: &[String], max: usize) -> &[String] {
    let mut bytes = 0;
    let fits = |key: &&String| {
        bytes += key.len();
        bytes <= KEYS_BYTES_MAX
    };
    &keys[..keys.iter().take(max).take_while(fits).count()]
}

impl Store for TcpStore {
    fn own_address(&self) -> Option<IpAddr> {
        match &self.side {
            Side::Server { server, .. } => {
                Some(server.address().ip()).filter(|bound| !bound.is_unspecified())
            }
            Side::Client(client) => client.own_address(),
        }
    }

    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.set(key, value),
            Side::Client(client) => client.set(key, value).boxed(),
        }
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.get(keys),
            Side::Client(client) => client.get(keys).boxed(),
        }
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.wait(keys, limit),
            Side::Client(client) => client.wait(keys, limit).boxed(),
        }
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.add(key, delta),
            Side::Client(client) => client.add(key, delta).boxed(),
        }
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.compare_set(key, expected, value),
            Side::Client(client) => client.compare_set(key, expected, value).boxed(),
        }
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        match &self.side {
            Side::Server { memory, .. } => memory.delete(key),
            Side::Client(client) => client.delete(key).boxed(),
        }
    }
}
