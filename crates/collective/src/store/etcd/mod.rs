//! The store in etcd.

mod client;
mod messages;

use std::{fmt, io, sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tonic::{Code, Status};

use self::{
    client::{Client, Failed, Repeated},
    messages::{
        Compare, Delete, Deleted, Done, KeyValue, Operation, Put, Range, Transaction, WatchCreate,
        WatchRequest,
    },
};
#[cfg(doc)]
use super::Store;
use super::{
    StoreError,
    backend::Backend,
    on_runtime::on_runtime,
    request::{Answer, Request},
    rules::sum,
    url::StoreUrl,
    wanted::{Pause, Wanted},
};

/// The most keys read by one transaction: the default of servers (`--max-txn-ops`).
const KEYS_MAX: usize = 128;

/// The keys whose longest values fit into one answer.
const KEYS_FEW: usize = 4;

/// The pause before a wait reads its keys again after the server has ended its watch. It doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The target of a `Compare`: the revision of the last write.
const MOD_REVISION: i32 = 2;

/// A filter of watches: no deletions.
const NO_DELETIONS: i32 = 1;

/// A map in an etcd server of version 3.4 or later. Clones share the connection.
///
/// Keys are used unchanged: give each job a [`PrefixStore`](super::PrefixStore), which the path of the URL makes. A restricted
/// user needs a role that reads and writes the keys with this prefix. They stay until they are removed.
///
/// A watch reports writes to waits; nothing polls.
///
/// # What happens when the connection breaks
/// The next call reconnects. [`set`](Store::set) and [`get`](Store::get) retry once themselves, because they may happen twice.
/// [`add`](Store::add), [`compare_set`](Store::compare_set) and [`delete`](Store::delete) end with [`StoreError::Unreachable`] if
/// the server may have received them. So does a [`wait`](Store::wait) whose connection breaks, and any call that the server does
/// not answer within the limit. A wait reads its keys once more when its own limit is over, so a server that does not answer ends
/// it one limit of the store later.
///
/// # Trust
/// The connection is not encrypted: others on the network can read the password and all keys.
#[derive(Clone)]
pub struct EtcdStore {
    client: Arc<Client>,
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EtcdStore({})", self.client.name)
    }
}

impl EtcdStore {
    /// Connects to the server at `url`, which begins with `etcd://`. Ignores its prefix, which [`StoreUrl::open`] adds. `limit`
    /// is the time limit of this call, and of each later operation without its own.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if there is no server, it rejects the user or password, or it does not answer within `limit`;
    /// [`StoreError::BadUrl`].
    ///
    /// # Cancel safety
    /// If dropped, nothing is connected.
    pub async fn connect(
        url: &StoreUrl,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Self, StoreError> {
        let service = url.etcd()?;
        let name = format!("the store at {url}");
        let (service, own_name, own) = (service.clone(), name.clone(), Arc::clone(&runtime));
        let client = on_runtime(&runtime, async move { Client::new(name, &service, limit, own) }).await;
        let ended = |error: io::Error| StoreError::Unreachable { store: own_name, detail: error.to_string() };
        let store = Self { client: Arc::new(client.map_err(ended)??) };
        // Reads no key, which also a user without any permission may do.
        match store.client.transact(&read(&[]), Repeated::AsNeeded).await {
            Ok(_) => Ok(store),
            Err(Failed::Status(status)) if status.code() == Code::PermissionDenied => Ok(store),
            Err(why) => Err(store.client.error(&why)),
        }
    }

    /// The values of `keys`, and a revision of the map: later writes to `keys` have higher ones.
    async fn read_at(&self, keys: &[String]) -> Result<(Vec<Option<KeyValue>>, i64), StoreError> {
        self.within_limit(self.read_parts(keys)).await
    }

    async fn read_parts(&self, keys: &[String]) -> Result<(Vec<Option<KeyValue>>, i64), StoreError> {
        let (mut found, mut revision, mut most) = (Vec::with_capacity(keys.len()), None, KEYS_MAX);
        while found.len() < keys.len() {
            let part = &keys[found.len()..];
            let part = &part[..most.min(part.len())];
            let done = match self.client.transact(&read(part), Repeated::AsNeeded).await {
                Err(Failed::Status(status)) if is_too_large(&status) && most > KEYS_FEW => {
                    most = KEYS_FEW;
                    continue;
                }
                done => done.map_err(|why| self.client.error(&why))?,
            };
            if done.responses.len() != part.len() {
                return Err(self.unexpected());
            }
            revision = revision.or(done.header.map(|header| header.revision));
            found.extend(done.responses.into_iter().map(|response| response.range.unwrap_or_default().kv));
        }
        Ok((found, revision.unwrap_or_default()))
    }

    async fn watch_for(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        let runtime = &*self.client.runtime;
        let end = runtime.now().saturating_add(limit);
        let (mut wanted, mut pause) = (Wanted::new(keys), Pause::new(PAUSE_MIN, PAUSE_MAX));
        loop {
            let left = end.saturating_sub(runtime.now());
            let (found, revision) = self.read_at(&wanted.missing()).await?;
            wanted.fill(found.into_iter().map(|found| found.map(|found| found.value)).collect());
            if wanted.is_complete() {
                return Ok(wanted.into_values());
            }
            if left.is_zero() {
                return Err(wanted.timed_out(self.client.name.clone(), limit));
            }
            // After the limit, the next read finds which keys are missing, or fails because the server does not answer.
            if let Ok(ended) = timeout(runtime, left, self.watch(&mut wanted, revision + 1).boxed()).await {
                match ended {
                    Err(status) if !is_too_large(&status) => {
                        return Err(self.client.error(&Failed::Status(status)));
                    }
                    Ok(()) if wanted.is_complete() => {}
                    _ => pause.sleep(runtime, end.saturating_sub(runtime.now())).await,
                }
            }
        }
    }

    /// Stores the values written at `revision` or later, until none is missing, or until the server has discarded the history
    /// since then.
    async fn watch(&self, wanted: &mut Wanted<'_>, revision: i64) -> Result<(), Status> {
        let missing = wanted.missing();
        let bounds = (missing.iter().min(), missing.iter().max());
        let (Some(first), Some(last)) = bounds else { return Ok(()) };
        let create = WatchCreate {
            key: first.clone().into_bytes(),
            range_end: [last.as_bytes(), &[0]].concat(),
            start_revision: revision,
            filters: vec![NO_DELETIONS],
        };
        let mut stream = self.client.watch(WatchRequest { create: Some(create) }).await?;
        while let Some(watched) = stream.message().await? {
            if watched.canceled && watched.compact_revision == 0 {
                return Err(Status::aborted(watched.cancel_reason));
            }
            for written in watched.events.into_iter().filter_map(|event| event.kv) {
                wanted.put(&written.key, &written.value);
            }
            if watched.canceled || wanted.is_complete() {
                return Ok(());
            }
        }
        Err(Status::unavailable("it ended the watch"))
    }

    /// Writes `value` under `key` if the key's last write is `seen` (`None`: if there is no key). Otherwise returns the stored
    /// value.
    async fn replace(
        &self,
        key: &str,
        seen: Option<&KeyValue>,
        value: &[u8],
    ) -> Result<Result<(), Option<KeyValue>>, StoreError> {
        let key = key.as_bytes().to_vec();
        let put = Put { key: key.clone(), value: value.to_vec() };
        let revision = seen.map_or(0, |seen| seen.mod_revision);
        let transaction = Transaction {
            compare: vec![Compare { target: MOD_REVISION, key: key.clone(), mod_revision: Some(revision) }],
            success: vec![Operation { put: Some(put), range: None }],
            failure: vec![Operation { range: Some(Range { key }), put: None }],
        };
        let done = self.client.transact(&transaction, Repeated::Once).await;
        let mut done = done.map_err(|why| self.client.error(&why))?;
        if done.succeeded {
            return Ok(Ok(()));
        }
        let range =
            done.responses.pop().and_then(|response| response.range).ok_or_else(|| self.unexpected())?;
        Ok(Err(range.kv))
    }

    /// Writes the value that `next` computes from the stored one. Repeats this if another client changes the stored value meanwhile.
    /// Returns the stored value if `next` returns `None`.
    async fn update<Refused>(
        &self,
        key: &str,
        mut stored: Option<KeyValue>,
        next: impl Fn(Option<&[u8]>) -> Result<Option<Vec<u8>>, Refused>,
    ) -> Result<Result<Option<Vec<u8>>, Refused>, StoreError> {
        loop {
            let value = match next(stored.as_ref().map(|stored| &*stored.value)) {
                Ok(Some(value)) => value,
                Ok(None) => return Ok(Ok(stored.map(|stored| stored.value))),
                Err(refused) => return Ok(Err(refused)),
            };
            match self.replace(key, stored.as_ref(), &value).await? {
                Ok(()) => return Ok(Ok(Some(value))),
                Err(other) => stored = other,
            }
        }
    }

    async fn execute_parts(&self, request: Request) -> Result<Answer, StoreError> {
        let client = &self.client;
        match request {
            Request::Get { keys } | Request::Wait { keys, .. } => {
                let (found, _) = self.read_parts(&keys).await?;
                Ok(Answer::values(found.into_iter().map(|found| found.map(|found| found.value)).collect()))
            }
            Request::Set { key, value } => {
                let put = Put { key: key.into_bytes(), value };
                let done = client.call("/etcdserverpb.KV/Put", &put, Repeated::AsNeeded).await;
                done.map(|Done {}| Answer::Done).map_err(|why| client.error(&why))
            }
            Request::Add { key, delta } => self.add_to(&key, delta).await.map(Answer::Sum),
            Request::CompareSet { key, expected, value } => {
                // If no value is expected, the write itself shows whether there is one.
                let found = match expected {
                    Some(_) => self.read_parts(std::slice::from_ref(&key)).await?.0.pop().flatten(),
                    None => None,
                };
                let next = |stored: Option<&[u8]>| {
                    Ok::<_, ()>((stored == expected.as_deref()).then(|| value.clone()))
                };
                let written = self.update(&key, found, next).await?;
                Ok(Answer::value(written.unwrap_or_default()))
            }
            Request::Delete { key } => {
                let delete = Delete { key: key.into_bytes() };
                let done = client.call("/etcdserverpb.KV/DeleteRange", &delete, Repeated::Once).await;
                done.map(|Deleted { deleted }| Answer::Deleted(deleted > 0)).map_err(|why| client.error(&why))
            }
        }
    }

    async fn add_to(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        let (mut found, _) = self.read_parts(&[key.to_owned()]).await?;
        let next = |value: Option<&[u8]>| sum(value, delta).map(|sum| Some(sum.to_string().into_bytes()));
        let written = self.update(key, found.pop().flatten(), next).await?;
        let written = written.map_err(|why| why.error(self.client.name.clone(), key, delta))?;
        sum(written.as_deref(), 0).map_err(|why| why.error(self.client.name.clone(), key, delta))
    }

    /// Ends `call`, which makes several requests, after the store's limit.
    async fn within_limit<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let call = std::pin::pin!(call);
        let ended = timeout(&*self.client.runtime, self.client.limit, call).await;
        ended.unwrap_or_else(|_| Err(self.client.error(&Failed::Silent)))
    }
}

/// Whether an answer exceeds `ANSWER_BYTES_MAX`.
fn is_too_large(status: &Status) -> bool {
    status.code() == Code::OutOfRange
}

/// Reads `keys` in one transaction.
fn read(keys: &[String]) -> Transaction {
    let range = |key: &String| Operation { range: Some(Range { key: key.clone().into_bytes() }), put: None };
    Transaction { compare: Vec::new(), success: keys.iter().map(range).collect(), failure: Vec::new() }
}

impl Backend for EtcdStore {
    fn name(&self) -> String {
        self.client.name.clone()
    }

    fn runtime(&self) -> &dyn Runtime {
        &*self.client.runtime
    }

    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        self.within_limit(self.execute_parts(request)).boxed()
    }

    fn wait_for<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.watch_for(keys, limit).boxed()
    }
}
