//! Tensors over gRPC: the last way between two workers that nothing better connects, and what to compare others with.
//!
//! ```text
//!  receiving worker                                     sending worker
//!  GrpcRoute ── client ──▶ one HTTP/2 connection ──▶ door ──▶ TensorService ──▶ its values
//!      ▲                     (the control port)                    │
//!      └── Reader: content into place, one copy ◀── Answer: content from where it lies, no copy
//! ```
//!
//! The service is `proto/tensors.proto`. Two workers agree on a route over their control session, as on any data
//! connection: Connect and Connected carry, in place of a queue pair's data, the token that the other end's calls must
//! present. A route lives as long as its session and its HTTP/2 connections; each end opens one when it first asks for
//! something.
//!
//! A receive that is given up is not simply reset, because nobody would know where its value is: it is cancelled by a
//! call of its own, and its answer tells. If it came with the value, that is kept for the next receive of its key.

mod answer;
mod client;
mod kept;
mod messages;
mod reading;
mod request_ids;
mod route;
mod served;
mod service;
mod status;
#[cfg(test)]
mod tests;
mod turns;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use sha2::{Digest, Sha256};
use tonic::codegen::http::HeaderValue;
use verbs_reactor::Runtime;

#[cfg(any(test, fuzzing))]
pub use self::reading::fuzzing::recv_tensor;
use self::request_ids::RequestIds;
pub(super) use self::service::TensorService;
pub(crate) use self::{
    reading::Arrived,
    route::{GrpcRoute, HeldArrival, RouteEnds},
};
use super::wire::Security;
use crate::outcome::{Outcome, Teller};

/// Calls of one peer that may be unanswered at once.
const CALLS_MAX: usize = 320;

/// Receives of one peer that may be outstanding at once.
const RECEIVES_MAX: u32 = 256;

/// Fetches of one peer that may be outstanding at once. With the receives, and room to give some of these up, they stay
/// below [`STREAMS_MAX`].
const FETCHES_MAX: usize = 64;

/// Requests that one HTTP/2 connection may carry at once.
pub(super) const STREAMS_MAX: u32 = 384;

/// Connections that one peer may use for one route.
const CONNECTIONS_MAX: usize = 4;

/// Longest content of one message unless set otherwise, in bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// Metadata that every call carries.
const TOKEN: &str = "tensorwire-token";

/// Metadata of receives: the place among those of its connection, counted from 1.
const ORDER: &str = "tensorwire-order";

/// Version of what Connect and Connected carry, and its length: the version and a token.
const VERSION: u8 = 1;
const DATA_BYTES: usize = 1 + TOKEN_BYTES;
const TOKEN_BYTES: usize = 32;

/// What a call must present. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token([u8; TOKEN_BYTES]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// One that nobody can guess.
    pub(crate) fn new(runtime: &dyn Runtime) -> Self {
        let mut token = [0; TOKEN_BYTES];
        token.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&runtime.random().to_le_bytes()));
        Self(token)
    }

    /// As Connect and Connected carry it.
    pub(crate) fn to_connection_data(&self) -> Vec<u8> {
        [&[VERSION][..], &self.0].concat()
    }

    /// Out of what the peer sent.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn from_connection_data(data: &[u8]) -> Result<Self, String> {
        match data.split_first() {
            Some((&VERSION, token)) if data.len() == DATA_BYTES => {
                let token = token.try_into().map_err(|_| "its token has another length".to_owned())?;
                Ok(Self(token))
            }
            Some((&version, _)) if version != VERSION => Err(format!(
                "its gRPC routes have version {version}, not {VERSION}: use one version everywhere"
            )),
            _ => Err(format!("its connection data has {} bytes, not {DATA_BYTES}", data.len())),
        }
    }

    /// As metadata, which is neither indexed nor shown.
    fn to_header(&self) -> Option<HeaderValue> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut value = HeaderValue::from_str(&text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// Digest of a token's metadata: looking it up tells nothing of the token, however long it takes.
type TokenDigest = [u8; 32];

fn digest(header: &HeaderValue) -> TokenDigest {
    Sha256::digest(header.as_bytes()).into()
}

/// What a gRPC plane carries tensors with. Opaque: a worker uses it by itself.
pub struct TensorCalls {
    security: Security,
    admitted: Mutex<BTreeMap<TokenDigest, Admitted>>,
    seen: Mutex<RequestIds>,
    message_bytes_max: usize,
}

/// Whose calls present a token.
#[derive(Debug)]
enum Admitted {
    /// Those of a route that is being agreed on: the peer may have heard of it first.
    Coming(Outcome<Weak<GrpcRoute>>),
    /// Those of this route.
    Up(Weak<GrpcRoute>),
}

/// A route that is being agreed on. Calls that present its token wait until it is up, or this is dropped.
#[derive(Debug)]
pub(crate) struct Expected {
    calls: Arc<TensorCalls>,
    token: TokenDigest,
    teller: Option<Teller<Weak<GrpcRoute>>>,
}

impl Expected {
    /// The route is up.
    fn arrived(mut self, route: &Arc<GrpcRoute>) -> TokenDigest {
        self.calls.admitted().insert(self.token, Admitted::Up(Arc::downgrade(route)));
        if let Some(teller) = self.teller.take() {
            teller.tell(Arc::downgrade(route));
        }
        self.token
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        if self.teller.is_some() {
            self.calls.forget(&self.token);
        }
    }
}

impl fmt::Debug for TensorCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorCalls").field("routes", &self.admitted().len()).finish_non_exhaustive()
    }
}

impl TensorCalls {
    pub(super) fn new(message_bytes_max: usize, security: Security) -> Arc<Self> {
        Arc::new(Self { security, admitted: Mutex::default(), seen: Mutex::default(), message_bytes_max })
    }

    /// Whether what they carry is encrypted.
    fn encrypts(&self) -> bool {
        self.security.encrypts()
    }

    /// Calls with this token will come. `None` if it cannot be shown.
    pub(crate) fn expect(self: &Arc<Self>, token: &Token) -> Option<Expected> {
        let token = digest(&token.to_header()?);
        let coming = Outcome::new();
        let teller = Some(coming.teller());
        self.admitted().insert(token, Admitted::Coming(coming));
        Some(Expected { calls: self.clone(), token, teller })
    }

    fn forget(&self, token: &TokenDigest) {
        let forgotten = self.admitted().remove(token);
        drop(forgotten);
    }

    /// Whose token this is.
    async fn route(&self, header: &HeaderValue) -> Option<Arc<GrpcRoute>> {
        let coming = match self.admitted().get(&digest(header))? {
            Admitted::Up(route) => Err(route.clone()),
            Admitted::Coming(coming) => Ok(coming.clone()),
        };
        let route = match coming {
            Ok(coming) => coming.wait().await?,
            Err(up) => up,
        };
        route.upgrade().filter(|route| !route.is_over())
    }

    fn is_new(&self, id: u64) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).is_new(id)
    }

    fn admitted(&self) -> MutexGuard<'_, BTreeMap<TokenDigest, Admitted>> {
        self.admitted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
