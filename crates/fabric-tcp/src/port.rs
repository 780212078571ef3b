//! Passes the streams of dialling peers to their queue pairs.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::channel::oneshot;

use crate::{
    door::{Presence, Visit},
    handshake::{HELLO_BYTES, HELLO_MAGIC, Hello, Token, VERSION, encode_welcome},
    protection::{Protection, Stream},
};

/// Passes each stream of a dialling peer to the queue pair that issued its token. The owner of the listener passes it
/// the streams that begin with a hello. A fabric [at this port](super::TcpFabric::at_port) needs no port of its own.
/// Cheap to clone.
#[derive(Clone, Default)]
pub struct DataPort(Arc<Port>);

#[derive(Default)]
struct Port {
    tickets: Tickets,
    counters: Counters,
    protection: Protection,
}

#[derive(Default)]
struct Counters {
    handed_over: AtomicU64,
    bad_tokens: AtomicU64,
    malformed: AtomicU64,
    not_trusted: AtomicU64,
}

impl DataPort {
    /// For streams that are not encrypted.
    pub fn new() -> Self {
        Self::default()
    }

    /// For streams under mutual TLS.
    #[cfg(feature = "tls")]
    pub fn with_tls(identity: crate::tls::TlsIdentity) -> Self {
        Self(Arc::new(Port { protection: Protection::Tls(identity), ..Port::default() }))
    }

    /// Whether a hello may begin with this byte. Neither HTTP/2 nor TLS begins with it.
    pub fn may_begin_with(first: u8) -> bool {
        first == HELLO_MAGIC[0]
    }

    /// Whether its streams are encrypted.
    pub fn encrypts(&self) -> bool {
        self.0.protection.encrypts()
    }

    /// Reads the hello of a stream that a door has admitted, within the time limit of the door, and passes the stream
    /// on. Closes it if its token was never issued, or was used before.
    ///
    /// # Cancel safety
    /// Dropping the future closes the stream.
    pub async fn receive(&self, stream: Stream, mut presence: Presence) {
        presence.stranger().note(Visit::Data);
        match presence.unless_cut(self.greet(stream)).await {
            Some(Ok(())) => presence.stranger().admit(),
            // Dropping its presence counts it as refused.
            Some(Err(counter)) => count(counter),
            None => {}
        }
    }

    /// Reads the hello and passes the stream on. The error is the counter of the failure.
    async fn greet(&self, mut stream: Stream) -> Result<(), &AtomicU64> {
        let counters = &self.0.counters;
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes).await.map_err(|_| &counters.malformed)?;
        let hello = Hello::decode(&bytes).ok_or(&counters.malformed)?;
        if hello.version != VERSION {
            // The local version, so that the dialer can report both.
            let _ = stream.write_all(&encode_welcome()).await;
            return Err(&counters.malformed);
        }
        let Some(waiting) = self.0.tickets.claim(hello.ticket, &hello.token) else {
            log!(DEBUG, "a data connection with a wrong or used token was closed");
            return Err(&counters.bad_tokens);
        };
        // Counted first, so that the stream is counted when its receiver has it.
        if !waiting.is_canceled() {
            count(&counters.handed_over);
        }
        // A receiver that has given up meanwhile needs no stream.
        drop(waiting.send(Visitor { stream, nonce: hello.nonce }));
        Ok(())
    }

    pub(super) fn protection(&self) -> &Protection {
        &self.0.protection
    }

    /// Counts a stream that was closed because its peer did not use TLS, or showed no trusted certificate.
    pub(super) fn count_not_trusted(&self) {
        count(&self.0.counters.not_trusted);
    }

    /// Streams handed over, with wrong tokens, without a hello of this version, and not trusted.
    pub(super) fn counts(&self) -> [u64; 4] {
        let Counters { handed_over, bad_tokens, malformed, not_trusted } = &self.0.counters;
        [handed_over, bad_tokens, malformed, not_trusted].map(|counter| counter.load(Ordering::Relaxed))
    }

    /// A ticket for one stream.
    pub(super) fn issue(&self, token: Token) -> Ticket {
        let (sender, visitor) = oneshot::channel();
        let number = self.0.tickets.add(IssuedTicket { token, sender });
        Ticket { port: self.clone(), number, visitor }
    }
}

impl fmt::Debug for DataPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataPort").field("encrypts", &self.encrypts()).finish_non_exhaustive()
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A stream that showed the right token.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) stream: Stream,
    pub(super) nonce: Token,
}

/// The right to receive one stream. Dropping it withdraws the right.
#[derive(Debug)]
pub(super) struct Ticket {
    port: DataPort,
    number: u64,
    visitor: oneshot::Receiver<Visitor>,
}

impl Ticket {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The stream that showed this ticket's token; `None` if the port is gone.
    ///
    /// # Cancel safety
    /// Cancel-safe: the stream stays with the ticket.
    pub(super) async fn visitor(&mut self) -> Option<Visitor> {
        (&mut self.visitor).await.ok()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.port.0.tickets.withdraw(self.number);
    }
}

struct IssuedTicket {
    token: Token,
    sender: oneshot::Sender<Visitor>,
}

/// The tickets that no stream has claimed yet.
#[derive(Default)]
struct Tickets {
    next: AtomicU64,
    issued: Mutex<HashMap<u64, IssuedTicket>>,
}

impl Tickets {
    fn add(&self, issued: IssuedTicket) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, issued);
        number
    }

    fn withdraw(&self, number: u64) {
        let withdrawn = self.lock().remove(&number);
        drop(withdrawn);
    }

    /// Takes the ticket, if the token is its own. A wrong token leaves it for the right one.
    fn claim(&self, number: u64, token: &Token) -> Option<oneshot::Sender<Visitor>> {
        let mut issued = self.lock();
        if !issued.get(&number)?.token.matches(token) {
            return None;
        }
        issued.remove(&number).map(|ticket| ticket.sender)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, IssuedTicket>> {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
