//! The store in Redis.

mod bounded;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, FromRedisValue, RedisConnectionInfo, RedisError, RedisResult,
    aio::MultiplexedConnection, cmd,
};
use tensorwire_fabric::{BoxFuture, Runtime, timeout};

use self::bounded::Bounded;
#[cfg(doc)]
use super::Store;
use super::{
    StoreError,
    backend::Backend,
    request::{Answer, Request},
    rules::{NoSum, shown},
    url::{Service, StoreUrl},
    wanted::Pause,
};

/// The most keys read by one command. Their values have at most 63 MiB together.
const KEYS_MAX: usize = 128;

/// The pause before a wait reads its keys again. It doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Sets the key to the first argument if its value is the second one, or if it has none and there is no second one. Returns the
/// value after that. Scripts are atomic on the server.
const COMPARE_SET: &str = "local stored = redis.call('GET', KEYS[1]) \
    if stored ~= (ARGV[2] or false) then return stored end \
    redis.call('SET', KEYS[1], ARGV[1]) \
    return ARGV[1]";

/// A map in a Redis server, or one with the same protocol. Clones share the connection.
///
/// The server must have version 2.6 or later, and needs no configuration. A restricted user needs the commands `GET`, `SET`,
/// `MGET`, `INCRBY`, `DEL` and `EVAL`. Keys are used unchanged: give each job a [`PrefixStore`](super::PrefixStore) or a
/// database. They stay until they are removed.
///
/// Waits poll their keys, with pauses of up to 100 ms, because a server reports writes only if it is configured to.
///
/// # What happens when the connection breaks
/// The next call reconnects. [`set`](Store::set), [`get`](Store::get) and [`wait`](Store::wait) retry once themselves, because
/// they may happen twice. [`add`](Store::add), [`compare_set`](Store::compare_set) and [`delete`](Store::delete) end with
/// [`StoreError::Unreachable`] if the server may have received them. So does any call, or wait, that the server does not answer
/// within the limit.
///
/// # Trust
/// The connection is not encrypted: others on the network can read the password and all keys.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    /// The store's name in errors, without a password.
    name: String,
    service: Service,
    settings: RedisConnectionInfo,
    /// The connection that all calls share, if there is one.
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
    /// Connects to the server at `url`, which begins with `redis://`. `limit` is the time limit of this call, and of each later
    /// operation without its own.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if there is no server, it rejects the user, password or database, or it does not answer within
    /// `limit`; [`StoreError::BadUrl`].
    ///
    /// # Cancel safety
    /// If dropped, nothing is connected.
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
        let (service, connection) = (service.clone(), Mutex::new(None));
        let shared = Shared { name, service, settings, connection, limit, runtime };
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
    /// The server may have received the command.
    Unknown(RedisError),
}

impl Shared {
    /// Sends a command, within the store's limit.
    async fn ask<T: FromRedisValue>(&self, command: &Cmd, repeated: Repeated) -> Result<T, Failed> {
        self.ask_within(self.limit, command, repeated).await
    }

    async fn ask_within<T: FromRedisValue>(
        &self,
        limit: Duration,
        command: &Cmd,
        repeated: Repeated,
    ) -> Result<T, Failed> {
        let Ok(answer) = timeout(&*self.runtime, limit, self.ask_now(command, repeated)).await else {
            // The answer may never come, and would delay later ones: the next call reconnects.
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
        // The limit of the call applies to both.
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let stream = self.service.connect(&self.runtime).await?;
        let connected = MultiplexedConnection::new_with_config(&self.settings, Bounded::new(stream), config);
        let (connection, driver) = connected.await?;
        self.runtime.spawn("redis client", Box::pin(driver));
        Ok(connection)
    }

    fn connection(&self) -> Option<MultiplexedConnection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_connection(&self, connection: Option<MultiplexedConnection>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    async fn read(&self, keys: Vec<String>) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let mut values = Vec::with_capacity(keys.len());
        let end = self.runtime.now().saturating_add(self.limit);
        for part in keys.chunks(KEYS_MAX) {
            let mut command = cmd("MGET");
            command.arg(part);
            let left = end.saturating_sub(self.runtime.now());
            let read = self.ask_within::<Vec<Option<Vec<u8>>>>(left, &command, Repeated::AsNeeded).await;
            values.extend(read.map_err(|why| self.error(&why))?);
        }
        Ok(values)
    }

    async fn execute(&self, request: Request) -> Result<Answer, StoreError> {
        let failed = |why: Failed| self.error(&why);
        match request {
            Request::Get { keys } | Request::Wait { keys, .. } => self.read(keys).await.map(Answer::values),
            Request::Set { key, value } => {
                let set = self.ask(cmd("SET").arg(key).arg(value), Repeated::AsNeeded).await;
                set.map(|()| Answer::Done).map_err(failed)
            }
            Request::Add { key, delta } => {
                let sum = self.ask(cmd("INCRBY").arg(&key).arg(delta), Repeated::Once).await;
                sum.map(Answer::Sum).map_err(|why| match no_sum(&why) {
                    Some(why) => why.error(self.name.clone(), &key, delta),
                    None => failed(why),
                })
            }
            Request::CompareSet { key, expected, value } => {
                let mut command = cmd("EVAL");
                command.arg(COMPARE_SET).arg(1).arg(key).arg(value).arg(expected);
                self.ask(&command, Repeated::Once).await.map(Answer::value).map_err(failed)
            }
            Request::Delete { key } => {
                let removed: Result<u64, Failed> = self.ask(cmd("DEL").arg(key), Repeated::Once).await;
                removed.map(|count| Answer::Deleted(count > 0)).map_err(failed)
            }
        }
    }

    fn error(&self, why: &Failed) -> StoreError {
        let detail = match why {
            Failed::Silent => format!(
                "it did not answer within {:?}, and the request may still take effect; check that Redis runs there, and is not stopped or overloaded",
                self.limit
            ),
            Failed::Unknown(error) => format!(
                "{} before it answered: whether the write happened is unknown; read the key before you repeat it",
                shown(error)
            ),
            Failed::Redis(error) => format!("{}; {}", shown(error), remedy(error)),
        };
        StoreError::Unreachable { store: self.name.clone(), detail }
    }
}

/// Why `INCRBY` did not add, if the error shows it.
fn no_sum(why: &Failed) -> Option<NoSum> {
    let Failed::Redis(error) = why else { return None };
    let message = error.detail().unwrap_or_default();
    if message.contains("would overflow") {
        Some(NoSum::Overflow)
    } else if message.contains("not an integer") || error.code() == Some("WRONGTYPE") {
        Some(NoSum::NotANumber)
    } else {
        None
    }
}

/// The remedy for an error.
fn remedy(error: &RedisError) -> &'static str {
    let message = error.to_string();
    match error.code() {
        _ if error.kind() == ErrorKind::AuthenticationFailed || message.contains("WRONGPASS") => {
            "check the user and the password in the URL"
        }
        Some("NOAUTH") => "give the password in the URL: redis://:PASSWORD@HOST:PORT",
        Some("NOPERM") => "let the user call GET, SET, MGET, INCRBY, DEL and EVAL for the job's keys",
        Some("OOM") => "the server is full: remove keys, or raise its `maxmemory`",
        Some("READONLY") => "it is a replica: give the address of the primary server",
        _ if message.contains("DB index") || message.contains("database") => {
            "the server has no such database: give a number below its setting `databases` (default 16)"
        }
        _ => "check that Redis runs there, and that the URL names its host and port",
    }
}

impl Backend for RedisStore {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn runtime(&self) -> &dyn Runtime {
        &*self.shared.runtime
    }

    fn pauses(&self) -> Pause {
        Pause::new(PAUSE_MIN, PAUSE_MAX)
    }

    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        self.shared.execute(request).boxed()
    }
}
