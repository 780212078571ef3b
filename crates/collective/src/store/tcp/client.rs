//! What a client of the store asks, and how often it asks again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::channel::{mpsc, oneshot};
use tensorwire_verbs_reactor::{Runtime, timeout};

use super::{
    super::{StoreError, board::Refused},
    driver::{self, Command, Lost},
    link::Link,
    wire::{Answer, Request},
};

/// Talks to a server over one connection, which all futures share. The connection ends with this.
#[derive(Debug)]
pub(super) struct Client {
    link: Arc<Link>,
    /// How long an operation may take, if it has no limit of its own, and how long the server may take to answer a wait.
    limit: Duration,
    runtime: Arc<dyn Runtime>,
    commands: mpsc::UnboundedSender<Command>,
    next_number: AtomicU64,
}

/// Tells the driver that nobody waits for the answer any more, when dropped.
struct Ticket<'a> {
    client: &'a Client,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        // The driver ends after the client.
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

    pub(super) fn store(&self) -> String {
        self.link.store()
    }

    /// Asks, and asks again after the connection broke if the request may happen twice.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] without an answer within the limit; what the server refuses.
    pub(super) async fn ask(&self, request: Request) -> Result<Answer, StoreError> {
        let until = self.now().saturating_add(self.limit);
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
    /// As [`ask`](Self::ask). The server has the store's own limit to say what is missing, when the time is up.
    pub(super) async fn ask_wait(&self, keys: &[String], until: Duration) -> Result<Answer, StoreError> {
        let begun = self.now();
        loop {
            let left = until.saturating_sub(self.now());
            let limit = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
            let request = Request::Wait { limit, keys: keys.to_vec() };
            let Some(answer) = self.within(left, self.ask_once(&request)).await else {
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

    /// The server measures the limit of a wait itself, and its answer comes later. Without a connection none will come.
    async fn within<T>(&self, limit: Duration, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = std::pin::pin!(answer);
        if let Ok(answer) = timeout(&*self.runtime, limit, answer.as_mut()).await {
            return Some(answer);
        }
        if self.link.trouble().is_some() {
            return None;
        }
        timeout(&*self.runtime, self.limit, answer).await.ok()
    }

    async fn ask_once(&self, request: &Request) -> Result<Answer, Lost> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let ended =
            || Lost::Hopeless(self.link.unreachable("the runtime that it was made on ended".to_owned()));
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
            "{why} before it answered: whether the write happened is unknown; read the key before it is repeated"
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

    /// An answer to another question.
    pub(super) fn unexpected(&self) -> StoreError {
        self.link.unreachable("it answers what was not asked: is it a store of the same version?".to_owned())
    }

    fn late(&self, limit: Duration) -> StoreError {
        let why = self.link.trouble().unwrap_or_else(|| "it is connected, and does not answer".to_owned());
        self.link.unreachable(format!(
            "no answer within {limit:?}: {why}; check that the rank that serves runs, and that the address is its own"
        ))
    }
}
