//! The requests of a client, and how they are repeated.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::channel::{mpsc, oneshot};
use tensorwire_fabric::{Runtime, timeout};

use super::{
    super::{StoreError, board::Refused},
    driver::{self, Command, Lost},
    link::Link,
    wire::{Answer, Request},
};

/// A client. All its futures share one connection, which ends with it.
#[derive(Debug)]
pub(super) struct Client {
    link: Arc<Link>,
    /// The time limit of operations without their own. Also how long the server may take to answer a wait after its limit.
    limit: Duration,
    runtime: Arc<dyn Runtime>,
    commands: mpsc::UnboundedSender<Command>,
    next_number: AtomicU64,
}

/// Cancels its request when dropped.
struct Ticket<'a> {
    client: &'a Client,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        // Cannot fail: the driver outlives the client.
        let _ = self.client.commands.unbounded_send(Command::Forget(self.number));
    }
}

impl Client {
    pub(super) fn new(address: &str, limit: Duration, runtime: Arc<dyn Runtime>) -> Self {
        let (commands, received) = mpsc::unbounded();
        let link = Arc::new(Link::new(address));
        let driver = driver::run(Arc::clone(&link), Arc::clone(&runtime), limit, received);
        runtime.spawn("store client", Box::pin(driver));
        Self { link, limit, runtime, commands, next_number: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> Duration {
        self.runtime.now()
    }

    pub(super) fn own_address(&self) -> Option<IpAddr> {
        self.link.own_address()
    }

    pub(super) fn store(&self) -> String {
        self.link.store()
    }

    /// Sends a request. Sends it again after the connection broke, if it may happen twice.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] without an answer within the limit; the error that the server answers.
    pub(super) async fn ask(&self, request: Request) -> Result<Answer, StoreError> {
        self.ask_until(request, self.until()).await
    }

    /// When an operation that begins now is late.
    pub(super) fn until(&self) -> Duration {
        self.now().saturating_add(self.limit)
    }

    /// As [`ask`](Self::ask), for one of several requests of an operation.
    pub(super) async fn ask_until(&self, request: Request, until: Duration) -> Result<Answer, StoreError> {
        loop {
            let left = until.saturating_sub(self.now());
            let Ok(answer) = timeout(&*self.runtime, left, self.ask_once(&request)).await else {
                return Err(self.late(self.limit));
            };
            match answer {
                Err(Lost::Broken(why)) => self.check_repeatable(&request, &why)?,
                Err(Lost::Hopeless(error)) => return Err(error),
                Ok(answer) => return self.check(answer, &request),
            }
        }
    }

    /// Waits for `keys` until `until`, on this runtime's clock.
    ///
    /// # Errors
    /// As [`ask`](Self::ask). After `until`, the server has the store's own limit to answer which keys are missing, for all
    /// requests with the same `until` together.
    pub(super) async fn ask_wait(&self, keys: &[String], until: Duration) -> Result<Answer, StoreError> {
        let begun = self.now();
        loop {
            let left = until.saturating_sub(self.now());
            let limit = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
            let request = Request::Wait { limit, keys: keys.to_vec() };
            let Some(answer) = self.within(left, until, self.ask_once(&request)).await else {
                return Err(self.late(self.now().saturating_sub(begun)));
            };
            match answer {
                Err(Lost::Broken(why)) if until <= self.now() => {
                    return Err(self.link.unreachable(why));
                }
                Err(Lost::Broken(_)) => {}
                Err(Lost::Hopeless(error)) => return Err(error),
                Ok(answer) => return self.check(answer, &request),
            }
        }
    }

    /// The server measures the limit of a wait, so its answer comes after the limit. Without a connection none comes.
    async fn within<T>(
        &self,
        limit: Duration,
        until: Duration,
        answer: impl Future<Output = T>,
    ) -> Option<T> {
        let mut answer = std::pin::pin!(answer);
        if let Ok(answer) = timeout(&*self.runtime, limit, answer.as_mut()).await {
            return Some(answer);
        }
        if self.link.trouble().is_some() {
            return None;
        }
        let left = until.saturating_add(self.limit).saturating_sub(self.now());
        timeout(&*self.runtime, left, answer).await.ok()
    }

    async fn ask_once(&self, request: &Request) -> Result<Answer, Lost> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let ended =
            || Lost::Hopeless(self.link.unreachable("the runtime on which it was made has ended".to_owned()));
        let command = Command::Ask { number, frame: request.encode(number), answer };
        let _ticket = Ticket { client: self, number };
        self.commands.unbounded_send(command).map_err(|_| ended())?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }

    fn check_repeatable(&self, request: &Request, why: &str) -> Result<(), StoreError> {
        if request.is_repeatable() {
            return Ok(());
        }
        Err(self.link.unreachable(format!(
            "{why} before it answered: whether the write happened is unknown; read the key before you repeat it"
        )))
    }

    fn check(&self, answer: Answer, request: &Request) -> Result<Answer, StoreError> {
        let Answer::Refused(why, limit) = answer else { return Ok(answer) };
        let store = self.store();
        Err(match (why, request) {
            (Refused::NoSum(why), Request::Add { key, delta }) => why.error(store, key, *delta),
            (Refused::NoSum(_), _) => self.unexpected(),
            (Refused::Full(what), _) => {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                StoreError::Full { store, what: what.name(), limit }
            }
        })
    }

    /// The error of an answer to another kind of request.
    pub(super) fn unexpected(&self) -> StoreError {
        self.link
            .unreachable("unexpected answer: check that the server is a store of the same version".to_owned())
    }

    fn late(&self, limit: Duration) -> StoreError {
        let why = self.link.trouble().unwrap_or_else(|| "it is connected but does not answer".to_owned());
        self.link.unreachable(format!(
            "no answer within {limit:?}: {why}; check that the serving rank runs, and that this is its address"
        ))
    }
}
