//! Asks the worker that serves a store.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_rendezvous::{StoreAddress, Unanswered, Worker, WorkerError, control::ControlError};

#[cfg(doc)]
use super::super::Store;
use super::{
    super::{
        StoreError,
        backend::Backend,
        on_runtime::look_up,
        request::{Answer, Request},
        wanted::Pause,
    },
    wire::{Part, Response},
};

/// The pause before a request is sent again. It doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The store that another worker [serves](super::super::MemoryStore::serve) at its own port. Clones
/// share the session.
///
/// It is reached over the session of the two workers, behind the same proof as everything else between them: a worker without the
/// secret, or without a certificate, reads and writes nothing. The keys are in the memory of the worker that serves them, and end
/// with its store. If that worker is started again, the store is empty.
///
/// # Which writes are repeated
/// If the session breaks before the answer, the next call opens another one. [`set`](Store::set), [`get`](Store::get) and
/// [`wait`](Store::wait) are repeated. A repeated `set` overwrites a value that another rank wrote in between.
/// [`add`](Store::add), [`compare_set`](Store::compare_set) and [`delete`](Store::delete) are not repeated if the worker may have
/// received them: they end with [`StoreError::Unreachable`].
///
/// # Many keys
/// One request reads up to 4,096 keys, or waits for up to 256, with values of at most 500 KiB together. More keys take several
/// requests, one after the other, so their values may be of different times.
#[derive(Debug, Clone)]
pub struct WorkerStore {
    at: Arc<StoreAddress>,
    /// The store's name in errors.
    name: Arc<str>,
    limit: Duration,
}

impl WorkerStore {
    /// Connects `worker` to the store of the worker that listens at `address`, `HOST:PORT`. Tries again for `limit`, because that
    /// worker may start later. `limit` also holds for each later operation without its own, and for reconnecting.
    ///
    /// Without a secret, `worker` reaches a store on its own machine only, on loopback, also if `address` is that machine's address
    /// in a network.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if no worker serves a store there in time, or `worker` has another secret or none.
    ///
    /// # Cancel safety
    /// If dropped, no store is connected. A session with the worker may stay.
    pub async fn connect(worker: &Worker, address: &str, limit: Duration) -> Result<Self, StoreError> {
        let name = format!("the store at {address}");
        let unreachable = |why: &str| StoreError::Unreachable { store: name.clone(), detail: why.to_owned() };
        let found = look_up(address, limit, worker.runtime()).await;
        let reached = worker.reach_store(address, &found).map_err(unreachable)?;
        let store =
            Self { at: Arc::new(StoreAddress::new(worker, &reached)), name: name.as_str().into(), limit };
        store.ask(Request::Get { keys: Vec::new() }).await?;
        Ok(store)
    }

    /// The same store with another limit.
    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Ends the session with a worker that serves the store of another job.
    pub(crate) fn hang_up(&self) {
        self.at.hang_up();
    }

    /// When the limit of an operation that begins now expires.
    fn until(&self) -> Duration {
        self.runtime().now().saturating_add(self.limit)
    }

    async fn ask(&self, request: Request) -> Result<Response, StoreError> {
        self.ask_until(&mut |_| request.clone(), self.until(), Duration::ZERO).await
    }

    /// Sends the request that `make` returns for the time that is left until `end`. Repeats it while the worker serves no store,
    /// and after the session broke if the request may be executed twice. The answer may arrive up to `more` after `end`.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if no answer arrives in time; the error in the store's answer.
    async fn ask_until(
        &self,
        make: &mut (dyn FnMut(Duration) -> Request + Send),
        end: Duration,
        more: Duration,
    ) -> Result<Response, StoreError> {
        let runtime = self.runtime();
        let (begun, mut pause) = (runtime.now(), Pause::new(PAUSE_MIN, PAUSE_MAX));
        let (mut trouble, mut was_final) = (None, false);
        loop {
            let left = end.saturating_sub(runtime.now());
            let request = make(left);
            let asked = self.at.ask(request.encode());
            let Ok(answer) = timeout(runtime, left.saturating_add(more), asked).await else { break };
            let why = match answer {
                Ok(answer) => return self.decode(&answer, &request),
                Err(why) => self.check_repeatable(why, &request, &mut was_final)?,
            };
            trouble = Some(why);
            let left = end.saturating_sub(runtime.now());
            if left.is_zero() {
                break;
            }
            pause.sleep(runtime, left).await;
        }
        Err(self.late(runtime.now().saturating_sub(begun), trouble))
    }

    /// The reason why the request must be repeated.
    ///
    /// # Errors
    /// The request must not be repeated, or repeating it cannot succeed. Sets `was_final` at the first error that seems permanent, and
    /// fails at the second, because a starting worker listens shortly before it hands over its secret.
    fn check_repeatable(
        &self,
        why: Unanswered,
        request: &Request,
        was_final: &mut bool,
    ) -> Result<String, StoreError> {
        match why {
            Unanswered::NotServed => Ok("the worker there serves no store".to_owned()),
            Unanswered::NotSent(error) if is_final(&error) && std::mem::replace(was_final, true) => {
                Err(self.unreachable(error.to_string()))
            }
            Unanswered::NotSent(error) => Ok(error.to_string()),
            Unanswered::Broken(why) if request.is_repeatable() => Ok(why),
            Unanswered::Broken(why) => Err(self.unreachable(format!(
                "{why} before it answered: whether the write happened is unknown; read the key before you repeat it"
            ))),
        }
    }

    fn decode(&self, response: &[u8], request: &Request) -> Result<Response, StoreError> {
        match Response::decode(response) {
            Ok(Response::Refused(why, limit)) => {
                Err(why.error(self.name(), usize::try_from(limit).unwrap_or(usize::MAX), request))
            }
            Ok(response) => Ok(response),
            Err(malformed) => {
                Err(self.unreachable(format!("it sent {malformed}: install the same release on all ranks")))
            }
        }
    }

    async fn read_all(&self, keys: Vec<String>) -> Result<Answer, StoreError> {
        let (mut found, until) = (Vec::with_capacity(keys.len()), self.until());
        while found.len() < keys.len() {
            let part = Part::READ.of(&keys[found.len()..]);
            let make = &mut |_| Request::Get { keys: part.to_vec() };
            match self.ask_until(make, until, Duration::ZERO).await? {
                Response::Answer(Answer::Values(values)) if (1..=part.len()).contains(&values.len()) => {
                    found.extend(values);
                }
                _ => return Err(self.unexpected()),
            }
        }
        Ok(Answer::Values(found))
    }

    async fn wait_until(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        let end = self.runtime().now().saturating_add(limit);
        let mut pause = Pause::new(PAUSE_MIN, PAUSE_MAX);
        let (mut found, mut missing, mut done) = (Vec::with_capacity(keys.len()), Vec::new(), 0);
        while done < keys.len() {
            let part = Part::WAIT.of(&keys[done..]);
            let make = &mut |left| Request::wait(left, part);
            match self.ask_until(make, end, self.limit).await? {
                Response::Answer(Answer::Values(values)) if (1..=part.len()).contains(&values.len()) => {
                    done += values.len();
                    found.extend(values.into_iter().flatten().map(|value| value.to_vec()));
                }
                // A key was deleted again, or the worker's clock is ahead.
                Response::Missing(_) if self.runtime().now() < end => {
                    pause.sleep(self.runtime(), end.saturating_sub(self.runtime().now())).await;
                }
                Response::Missing(indices) => {
                    done += part.len();
                    missing.extend(indices.iter().filter_map(|&index| part.get(index as usize)).cloned());
                }
                _ => return Err(self.unexpected()),
            }
        }
        if !missing.is_empty() {
            return Err(StoreError::TimedOut { store: self.name(), limit, missing });
        }
        if found.len() == keys.len() { Ok(found) } else { Err(self.unexpected()) }
    }

    fn late(&self, limit: Duration, trouble: Option<String>) -> StoreError {
        let why = trouble.unwrap_or_else(|| "the worker there does not answer".to_owned());
        self.unreachable(format!(
            "no answer within {limit:.1?}: {why}; check that the serving rank runs, and that this is its address"
        ))
    }
}

/// Whether repeating the request cannot succeed.
fn is_final(error: &WorkerError) -> bool {
    match error {
        WorkerError::Control(error) => !matches!(
            error,
            ControlError::Unreachable { .. }
                | ControlError::Lost { .. }
                | ControlError::Refused { .. }
                | ControlError::Limit { .. }
        ),
        WorkerError::ShutDown => true,
        _ => false,
    }
}

impl Backend for WorkerStore {
    fn name(&self) -> String {
        self.name.to_string()
    }

    fn machine_address(&self) -> Option<IpAddr> {
        self.at.own_address()
    }

    fn runtime(&self) -> &dyn Runtime {
        &**self.at.worker().runtime()
    }

    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        async move {
            if let Request::Get { keys } = request {
                return self.read_all(keys).await;
            }
            match self.ask(request).await? {
                Response::Answer(answer) => Ok(answer),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn wait_for<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.wait_until(keys, limit).boxed()
    }
}
