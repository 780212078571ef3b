//! Answers that are sent under the lock under which their request is read.

use std::sync::MutexGuard;

use super::{Connection, State, Turnstile};
use crate::{Channel, PeerMisbehaved, Source, TensorRequest};

impl<C: Channel> Connection<C> {
    /// As [`on_immediate`](Self::on_immediate), but answers a request at once if `source` has a small value
    /// [at hand](Source::at_hand), and its message can be posted now. Other requests are given to `requested`.
    ///
    /// # Errors
    /// As [`on_immediate`](Self::on_immediate).
    pub fn on_immediate_from<S: Source<Bytes = C::Bytes>>(
        &self,
        immediate: u32,
        length: u64,
        source: &S,
        requested: impl FnMut(TensorRequest),
    ) -> Result<bool, PeerMisbehaved> {
        let mut is_answered = false;
        let at_once = |state: MutexGuard<'_, State<C::Lent>>, request: &TensorRequest| {
            is_answered = self.answer_at_once(state, request, source);
            is_answered
        };
        self.take_immediate((immediate, length), at_once, requested)?;
        Ok(is_answered)
    }

    /// Unlocks, and returns whether the request was answered.
    fn answer_at_once<S: Source<Bytes = C::Bytes>>(
        &self,
        state: MutexGuard<'_, State<C::Lent>>,
        request: &TensorRequest,
        source: &S,
    ) -> bool {
        // Dropped without the lock.
        let at_hand = source.at_hand(request.scope, &request.key, self.agreed.eager_bytes_max);
        let may_be_sent =
            |taken: &&S::Taken| self.may_answer_now(request, S::metadata(taken), S::bytes(taken));
        let Some(taken) = at_hand.as_ref().filter(may_be_sent) else {
            self.unlock(state);
            return false;
        };
        let sent = self.turn_locked(state, (Turnstile::Messages, true), |state| {
            self.try_post_eager(state, request.index, (S::metadata(taken), None), S::bytes(taken))
        });
        // If the connection is over, whoever runs the answer finds that out.
        let is_sent = sent.is_some_and(|sent| sent.and_then(|posted| self.over_if_failed(posted)).is_ok());
        if is_sent {
            source.sent(taken);
        }
        is_sent
    }
}
