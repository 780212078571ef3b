//! The store in Redis.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ErrorKind, FromRedisValue, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, RedisResult, aio::MultiplexedConnection, cmd,
};
use tensorwire_verbs_reactor::{BoxFuture, Runtime, timeout};

use super::{
    Store, StoreError,
    rules::{NoSum, check_compare, check_key, check_keys, check_value},
    url::StoreUrl,
    wanted::{Pause, look_for},
};

/// The most keys that are read by one command. Their values have at most 128 MiB.
const KEYS_MAX: usize = 128;

/// The pause after which a wait looks again. It doubles up to the most.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Sets the key to the first argument if its value is the second one, or if it has none and there is no second one. Returns
/// the value that is there afterwards. A script runs alone on the server.
const COMPARE_SET: &str = "local there = redis.call('GET', KEYS[1]) \
    if there ~= (ARGV[2] or false) then return there end \
    redis.call('SET', KEYS[1], ARGV[1]) \
    return ARGV[1]";

/// A map in a server of Redis, or in one that speaks its protocol. Clones share the connection.
///
/// The server needs version 2.6 and no configuration. A user who is restricted needs the commands `GET`, `SET`, `MGET`, `INCRBY`, `DEL`
/// and `EVAL`. Keys are those of the caller: give each job a [`PrefixStore`](super::PrefixStore), or a database. They stay until somebody
/// removes them.
///
/// Waits look for their keys with pauses of up to 100 ms: a server tells of writes only if it is configured to.
///
/// # What happens when the connection breaks
/// The next call makes another. [`set`](Store::set), [`get`](Store::get) and [`wait`](Store::wait) try that once themselves, since they may
/// happen twice. [`add`](Store::add), [`compare_set`](Store::compare_set) and [`delete`](Store::delete) end with
/// [`StoreError::Unreachable`] if the server may have seen them. A call that the server does not answer within the limit ends with
/// the same, and so does a wait.
///
/// # Trust
/// The connection is not encrypted: the password and all keys can be read on the way.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    /// What errors call the store; without a password.
    name: String,
    client: Client,
    /// The connection that all calls share, once there is one.
    connection: Mutex<Option<MultiplexedConnection>>,
    limit: Duration,
    runtime: Arc<dyn Runtime>,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisStore({})", self.shared.name)
    }
}

/// Whether a command may happen twice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeated {
    Once,
    AsNeeded,
}

impl RedisStore {
    /// Connects to the server at `url`, which begins with `redis://`. `limit` holds for this call, and for each later operation that has
    /// none of its own.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if there is no server, if it does not take the user, the password or the database, or if it does not
    /// answer within `limit`; [`StoreError::BadUrl`].
    ///
    /// # Cancel safety
    /// Nothing is connected if dropped.
    pub async fn connect(
        url: &StoreUrl,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Self, StoreError> {
        let (service, database) = url.redis()?;
        let mut settings = RedisConnectionInfo::default().set_db(database).set_skip_set_lib_name();
        if !service.user.is_empty() {
            settings = settings.set_username(&service.user);
        }
        if let Some(password) = &service.password {
            settings = settings.set_password(password);
        }
        let name = format!("the store at {url}");
        let address = ConnectionAddr::Tcp(service.host.clone(), service.port).into_connection_info();
        let client = address.and_then(|address| Client::open(address.set_redis_settings(settings)));
        let client = client.map_err(|error| StoreError::Unreachable {
            store: name.clone(),
            detail: format!("{error}; check the URL"),
        })?;
        let shared = Shared { name, client, connection: Mutex::new(None), limit, runtime };
        let store = Self { shared: Arc::new(shared) };
        store
            .shared
            .ask::<()>(&cmd("PING"), Repeated::AsNeeded)
            .await
            .map_err(|why| store.shared.error(&why))?;
        Ok(store)
    }
}

/// Why a command has no result.
enum Failed {
    Silent,
    Redis(RedisError),
    /// The server may have seen the command.
    Unknown(RedisError),
}

impl Shared {
    /// Asks the server, within the limit.
    async fn ask<T: FromRedisValue>(&self, command: &Cmd, repeated: Repeated) -> Result<T, Failed> {
        let Ok(answer) = timeout(&*self.runtime, self.limit, self.ask_now(command, repeated)).await else {
            // It may never answer: the next call has another connection.
            self.set_connection(None);
            return Err(Failed::Silent);
        };
        T::from_redis_value(answer?).map_err(|error| Failed::Redis(error.into()))
    }

    async fn ask_now(&self, command: &Cmd, repeated: Repeated) -> Result<redis::Value, Failed> {
        if let Some(mut earlier) = self.connection() {
            match earlier.send_packed_command(command).await {
                Err(error) if error.is_unrecoverable_error() || error.is_io_error() => {
                    self.set_connection(None);
                    if repeated == Repeated::Once {
                        return Err(Failed::Unknown(error));
                    }
                }
                answer => return answer.and_then(redis::Value::extract_error).map_err(Failed::Redis),
            }
        }
        let mut connection = self.connect().await.map_err(Failed::Redis)?;
        self.set_connection(Some(connection.clone()));
        let answer = connection.send_packed_command(command).await;
        answer.and_then(redis::Value::extract_error).map_err(|error| {
            let lost = error.is_io_error();
            if lost {
                self.set_connection(None);
            }
            if lost && repeated == Repeated::Once { Failed::Unknown(error) } else { Failed::Redis(error) }
        })
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        // The limit of the call is that of both.
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        self.client.get_multiplexed_async_connection_with_config(&config).await
    }

    fn connection(&self) -> Option<MultiplexedConnection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_connection(&self, connection: Option<MultiplexedConnection>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    async fn read(&self, keys: Vec<String>) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let mut values = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_MAX) {
            let mut command = cmd("MGET");
            command.arg(part);
            let read: Vec<Option<Vec<u8>>> =
                self.ask(&command, Repeated::AsNeeded).await.map_err(|why| self.error(&why))?;
            values.extend(read);
        }
        Ok(values)
    }

    async fn wait(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        check_keys(keys)?;
        let looking = (&*self.runtime, Pause::new(PAUSE_MIN, PAUSE_MAX));
        look_for(keys, limit, looking, || self.name.clone(), |missing| self.read(missing)).await
    }

    async fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        let sum = self.ask(cmd("INCRBY").arg(key).arg(delta), Repeated::Once).await;
        sum.map_err(|why| match no_sum(&why) {
            Some(why) => why.error(self.name.clone(), key, delta),
            None => self.error(&why),
        })
    }

    async fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        check_compare(key, expected, value)?;
        let mut command = cmd("EVAL");
        command.arg(COMPARE_SET).arg(1).arg(key).arg(value).arg(expected);
        self.ask(&command, Repeated::Once).await.map_err(|why| self.error(&why))
    }

    fn error(&self, why: &Failed) -> StoreError {
        let detail = match why {
            Failed::Silent => format!(
                "it did not answer within {:?}, and may do what it was asked later; check that Redis runs there, and is not stopped or overloaded",
                self.limit
            ),
            Failed::Unknown(error) => format!(
                "{error} before it answered: whether the write happened is unknown; read the key before it is repeated"
            ),
            Failed::Redis(error) => format!("{error}; {}", remedy(error)),
        };
        StoreError::Unreachable { store: self.name.clone(), detail }
    }
}

/// What `INCRBY` answers where it does not add.
fn no_sum(why: &Failed) -> Option<NoSum> {
    let Failed::Redis(error) = why else { return None };
    let said = error.detail().unwrap_or_default();
    if said.contains("would overflow") {
        Some(NoSum::Overflow)
    } else if said.contains("not an integer") || error.code() == Some("WRONGTYPE") {
        Some(NoSum::NotANumber)
    } else {
        None
    }
}

/// What to do about what the server answered, or about its silence.
fn remedy(error: &RedisError) -> &'static str {
    let said = error.to_string();
    match error.code() {
        _ if error.kind() == ErrorKind::AuthenticationFailed || said.contains("WRONGPASS") => {
            "check the user and the password in the URL"
        }
        Some("NOAUTH") => "give the password in the URL: redis://:PASSWORD@HOST:PORT",
        Some("NOPERM") => "let the user call GET, SET, MGET, INCRBY, DEL and EVAL for the job's keys",
        Some("OOM") => "the server is full: remove keys, or raise its `maxmemory`",
        Some("READONLY") => "it is a replica: give the address of the primary server",
        _ if said.contains("DB index") || said.contains("database") => {
            "the server has no such database: give one below its `databases`, of which there are 16 unless configured"
        }
        _ => "check that Redis runs there, and that the URL names its host and port",
    }
}

impl Store for RedisStore {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            check_key(key)?;
            check_value(value)?;
            let set = self.shared.ask(cmd("SET").arg(key).arg(value), Repeated::AsNeeded).await;
            set.map_err(|why| self.shared.error(&why))
        }
        .boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move {
            check_keys(keys)?;
            self.shared.read(keys.to_vec()).await
        }
        .boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.shared.wait(keys, limit).boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        self.shared.add(key, delta).boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.shared.compare_set(key, expected, value).boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move {
            check_key(key)?;
            let removed: Result<u64, Failed> = self.shared.ask(cmd("DEL").arg(key), Repeated::Once).await;
            removed.map(|count| count > 0).map_err(|why| self.shared.error(&why))
        }
        .boxed()
    }
}
