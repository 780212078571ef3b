//! What ranks tell each other in [`Notes`]: each other's calls, with what is short, and the end of the group. A small group has
//! a channel of notes between any two ranks. In a larger one, all this travels as values of the group's step.
//!
//! A rank has few notes that it did not take: every call is compared along the ring of ranks, so none is further ahead of another
//! than one call of a lane for each rank between them.
//!
//! The end comes in every lane, because calls wait in any of them. It does not come if the other rank has its channel in another
//! connection, or not yet; so a call that takes long [asks](super::calling) for it as well.

use std::sync::Arc;

use futures::{FutureExt as _, future::try_join_all};
use tensorwire_protocol::{Code, Status, text::escaped};
use tensorwire_rendezvous::{Notes, WorkerError};
use tensorwire_verbs_reactor::Runtime;

use super::{CALLS_UNDER_WAY, GroupState};

/// Ranks of the largest group that has channels, for which each rank connects to all others.
const RANKS_MAX: usize = 8;

/// The first bytes of the end of the group. The call has others.
const END: [u8; 4] = *b"TWGe";

/// The channels of this rank, in the order of the ranks.
pub(super) struct Telling(Vec<Option<Notes>>);

impl Telling {
    /// Opens a channel with each other rank. `None` for a group that has none.
    ///
    /// # Errors
    /// The rank with which that failed.
    pub(super) async fn open(group: &GroupState) -> Result<Option<Arc<Self>>, (usize, WorkerError)> {
        if group.size() > RANKS_MAX {
            return Ok(None);
        }
        let channel = group.step.id() as u64;
        let open = group.peers.iter().enumerate().map(|(at, peer)| async move {
            if at == group.rank {
                Ok(None)
            } else {
                peer.notes(channel, CALLS_UNDER_WAY as u16).await.map(Some).map_err(|error| (at, error))
            }
        });
        try_join_all(open).await.map(|notes| Some(Arc::new(Self(notes))))
    }

    pub(super) fn with(&self, rank: usize) -> Option<&Notes> {
        self.0.get(rank)?.as_ref()
    }

    /// Tells all other ranks that the group is over for `status`.
    pub(super) fn tell_end(self: &Arc<Self>, status: &Status, runtime: &dyn Runtime) {
        let note = encode(status);
        for rank in 0..self.0.len() {
            let (telling, note) = (self.clone(), note.clone());
            let mut told = Box::pin(async move {
                let Some(notes) = telling.with(rank) else { return };
                // One that cannot be told asks when its call takes long.
                let _told = notes.send(Notes::EVERY_LANE, &[&note]).await;
            });
            if told.as_mut().now_or_never().is_none() {
                runtime.spawn("tell the end of a group", told);
            }
        }
    }
}

fn encode(status: &Status) -> Vec<u8> {
    let Status { message, details, .. } = status;
    let details = details.get(..usize::from(u8::MAX)).unwrap_or(details);
    let mut note: Vec<u8> = END.into_iter().chain([details.len() as u8]).collect();
    note.extend_from_slice(details);
    let room = Notes::BYTES_MAX.saturating_sub(note.len());
    note.extend(message.bytes().take(room));
    note
}

/// Why the group is over, if that is what a note tells.
pub(super) fn end_of(note: &[u8]) -> Option<Status> {
    let (length, rest) = note.strip_prefix(&END)?.split_first()?;
    let (details, message) = rest.split_at_checked(usize::from(*length))?;
    let (details, message) = (details.to_vec(), String::from_utf8_lossy(message));
    Some(Status { code: Code::Unavailable, message: escaped(&message).into_owned(), details })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_survives_its_encoding_and_a_call_is_none() {
        let status = Status { code: Code::Unavailable, message: "why".to_owned(), details: vec![7; 8] };
        assert_eq!(end_of(&encode(&status)), Some(status.clone()));
        let long = Status { message: "w".repeat(9_000), ..status };
        assert_eq!(encode(&long).len(), Notes::BYTES_MAX);
        assert_eq!(end_of(&[1; 40]), None);
        assert_eq!(end_of(&[END.as_slice(), &[9, 1]].concat()), None, "cut off");
    }
}
