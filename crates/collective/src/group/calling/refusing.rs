//! Calls that this rank does not make, because their arguments are wrong.

use super::Calling;
use crate::{error::GroupError, schedule::Algorithm};

impl Calling {
    /// Refuses the call if this rank alone can see that its arguments are wrong: every rank that passes the same arguments refuses it,
    /// too. So the call takes no number. If a later call has a number already, this call ends its turn without a message.
    pub(crate) fn require(&mut self, checked: Result<(), impl Into<GroupError>>) {
        if let (Err(error), None) = (checked, &self.refused) {
            self.refused = Some(error.into());
            *self.is_complete.get_mut() = self.group.take_back(self.call.number);
        }
    }

    /// As [`require`](Self::require), in a call that is awaited already.
    pub(crate) fn require_late(&mut self, checked: Result<(), impl Into<GroupError>>) {
        self.refused = self.refused.take().or(checked.err().map(Into::into));
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Checks that the ranks can use `algorithm`.
    pub(crate) fn check_algorithm(&self, algorithm: Algorithm) -> Result<(), GroupError> {
        if algorithm != Algorithm::Views || self.is_on_one_host() {
            return Ok(());
        }
        let remedy =
            "the ranks do not share memory: they are on several hosts, or a worker does not offer shm";
        Err(GroupError::Argument {
            field: "algorithm",
            value: algorithm.to_string(),
            remedy: remedy.to_owned(),
        })
    }
}
