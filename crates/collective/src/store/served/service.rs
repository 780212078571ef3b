//! Answers the requests of peers.

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_rendezvous::{MakeAnswer, STORE_WAITS_MAX, StoreAnswer, StoreService};

use super::{
    super::{
        board::{Board, Counted, Refused},
        request::{Answer, Request},
    },
    wire::Response,
};

/// A board, as it is served to peers.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) board: Board,
    pub(crate) runtime: Arc<dyn Runtime>,
}

impl StoreService for Served {
    fn answer(self: Arc<Self>, request: &[u8], may_wait: bool) -> Result<StoreAnswer, &'static str> {
        let request = Request::decode(request).map_err(|malformed| malformed.0)?;
        match (self.respond(&request), request) {
            (Response::Missing(_), Request::Wait { limit, keys }) if may_wait => {
                Ok(StoreAnswer::Later(self.wait(Duration::from_micros(limit), keys)))
            }
            (Response::Missing(_), _) => {
                let refused = Response::Refused(Refused::Full(Counted::Waits), STORE_WAITS_MAX as u64);
                Ok(StoreAnswer::Now(refused.encode()))
            }
            (response, _) => Ok(StoreAnswer::Now(response.encode())),
        }
    }
}

impl Served {
    /// Completes when all `keys` have values, or when `limit` expires. The values are read when the response is made.
    fn wait(self: Arc<Self>, limit: Duration, keys: Vec<String>) -> BoxFuture<'static, MakeAnswer> {
        async move {
            let waited = timeout(&*self.runtime, limit, self.board.wait(&keys)).await;
            let make = move || match waited {
                Ok(Err(why)) => self.refuse(why).encode(),
                // The last value may have arrived just as the limit expired.
                Ok(Ok(_)) | Err(_) => self.respond(&Request::Wait { limit: 0, keys }).encode(),
            };
            Box::new(make) as MakeAnswer
        }
        .boxed()
    }

    fn respond(&self, request: &Request) -> Response {
        match (self.board.execute(request), request) {
            (Ok(Answer::Values(values)), Request::Wait { .. }) if values.iter().any(Option::is_none) => {
                let missing = (0..).zip(values).filter(|(_, value)| value.is_none());
                Response::Missing(missing.map(|(index, _)| index).collect())
            }
            (Ok(Answer::Values(values)), _) => Response::values(values),
            (Ok(answer), _) => Response::Answer(answer),
            (Err(why), _) => self.refuse(why),
        }
    }

    fn refuse(&self, why: Refused) -> Response {
        Response::Refused(why, self.board.limit(why) as u64)
    }
}
