//! VERSION, of published values.

use super::{
    Arrived, ArrivedResult, Requests,
    entry::{RequestPhase, Version},
};
use crate::{PeerMisbehaved, RequestIndex, VersionNotice};

impl<L> Requests<L> {
    /// VERSION came.
    pub(crate) fn version_came(&mut self, notice: VersionNotice) -> ArrivedResult<L> {
        let Some(entry) = self.entry(notice.index) else { return Ok(Arrived::IGNORED) };
        match (&entry.phase, entry.version) {
            (RequestPhase::Asked { .. }, Version::Wanted) => entry.version = Version::Known(notice.version),
            _ => return Err(PeerMisbehaved::VersionUnasked),
        }
        Ok(Arrived::HANDLED)
    }

    /// The version of the request's value, if VERSION came.
    pub(crate) fn version(&mut self, index: RequestIndex) -> Option<u64> {
        match self.entry(index)?.version {
            Version::Known(version) => Some(version),
            Version::Wanted | Version::Unwanted => None,
        }
    }
}
