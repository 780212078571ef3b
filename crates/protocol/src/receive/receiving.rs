//! A receive, from its first poll to its value.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    FirstPoll, Next, Received, Request, Stop,
    admission::{Admission, Known, Terms, WaitingReceive},
    handed_out,
    validate::validate,
};
use crate::{Allocator, Channel, Connection, Metadata, Scope, TransferError};

type ReceiveResult<C> = Result<Received<<C as Channel>::Lent>, TransferError>;

/// A receive, made by [`Connection::receive_with`]. It is a type and not an `async fn`, so that it is small, because thousands may be
/// under way, and so that a value that comes inside a message is moved less often.
#[must_use = "nothing is received until it is awaited"]
pub struct Receiving<'a, C: Channel, A> {
    connection: &'a Arc<Connection<C>>,
    scope: Scope,
    key: &'a str,
    terms: Terms<'a, A>,
    stage: Stage<'a, C>,
}

/// How far a receive is.
enum Stage<'a, C: Channel> {
    /// It was not polled.
    New,
    /// It waits for what it must have before its request. Boxed, because otherwise every receive has room for this.
    Waiting(Box<WaitingReceive<'a, C>>),
    /// Its request has asked for a content inside a message.
    Asked(Request<'a, C>, Known, FirstPoll),
    /// All later stages. Boxed as well.
    Rest(Pin<Box<dyn Future<Output = ReceiveResult<C>> + Send + 'a>>),
    Over,
}

impl<C: Channel, A> fmt::Debug for Receiving<'_, C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, key, .. } = self;
        f.debug_struct("Receiving").field("scope", scope).field("key", key).finish_non_exhaustive()
    }
}

impl<'a, C: Channel, A: Allocator<Lent = C::Lent>> Receiving<'a, C, A> {
    pub(super) fn new(
        connection: &'a Arc<Connection<C>>,
        scope: Scope,
        key: &'a str,
        terms: Terms<'a, A>,
    ) -> Self {
        Self { connection, scope, key, terms, stage: Stage::New }
    }

    /// The stage that follows the wait for a request.
    fn admitted(&self, admission: Admission<C::Lent>) -> Stage<'a, C> {
        match admission {
            Admission::Request { index, known, first } => {
                let request = Request::new(self.connection, index, self.terms.options.may_poll());
                match first {
                    Some(first) => Stage::Asked(request, known, first),
                    None => self.rest(request, known, None),
                }
            }
            Admission::Stashed(key, landed) => {
                let received = handed_out((self.scope, key), *landed, None, self.terms.allocator);
                Stage::Rest(Box::pin(validate(self.connection, received)))
            }
        }
    }

    /// The stage of a request that was not sent yet, or whose value the peer has described.
    fn rest(&self, mut request: Request<'a, C>, known: Known, described: Option<Metadata>) -> Stage<'a, C> {
        let (connection, scope, Terms { allocator, options }) = (self.connection, self.scope, self.terms);
        Stage::Rest(Box::pin(async move {
            let asked = match described {
                Some(_) => Ok((false, FirstPoll::Asks)),
                None => request.ask((scope, &known.key), known.metadata.clone(), allocator, options).await,
            };
            let pulled = match asked {
                Ok(asked) => request.pull((scope, &known), described, asked, allocator).await,
                Err(stop) => Err(stop),
            };
            let landed = match pulled {
                Ok(landed) | Err(Stop::Given(landed)) => landed,
                Err(Stop::Failed(error)) => return Err(error),
            };
            let received = handed_out((scope, known.key), landed, request.version, allocator);
            validate(connection, received).await
        }))
    }
}

impl<C: Channel, A: Allocator<Lent = C::Lent>> Future for Receiving<'_, C, A> {
    type Output = ReceiveResult<C>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ReceiveResult<C>> {
        let this = self.get_mut();
        let (scope, key, terms) = (this.scope, this.key, this.terms);
        loop {
            this.stage = match mem::replace(&mut this.stage, Stage::Over) {
                Stage::New => {
                    let mut waiting = WaitingReceive::new(this.connection, scope);
                    match waiting.poll(key, terms, context.waker()) {
                        Poll::Ready(admission) => this.admitted(admission?),
                        Poll::Pending => {
                            this.stage = Stage::Waiting(Box::new(waiting));
                            return Poll::Pending;
                        }
                    }
                }
                Stage::Waiting(mut waiting) => match waiting.poll(key, terms, context.waker()) {
                    Poll::Ready(admission) => this.admitted(admission?),
                    Poll::Pending => {
                        this.stage = Stage::Waiting(waiting);
                        return Poll::Pending;
                    }
                },
                Stage::Asked(mut request, known, mut first) => {
                    let polled = request.poll_reply(scope, &mut first, context);
                    let Poll::Ready(answered) = polled else {
                        this.stage = Stage::Asked(request, known, first);
                        return Poll::Pending;
                    };
                    match request.follow(answered?, (scope, &known), false, terms.allocator)? {
                        Next::Landed(landed) => {
                            let received =
                                handed_out((scope, known.key), landed, request.version, terms.allocator);
                            if received.is_valid::<C>() {
                                return Poll::Ready(Ok(received));
                            }
                            Stage::Rest(Box::pin(validate(this.connection, received)))
                        }
                        Next::Described(metadata) => this.rest(request, known, Some(metadata)),
                    }
                }
                Stage::Rest(mut rest) => {
                    let polled = rest.as_mut().poll(context);
                    if polled.is_pending() {
                        this.stage = Stage::Rest(rest);
                    }
                    return polled;
                }
                Stage::Over => return Poll::Ready(Err(TransferError::gone())),
            };
        }
    }
}
