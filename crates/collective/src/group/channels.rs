//! The channels of [`Notes`] between the ranks of a small group. They carry call headers with short contents, tickets of longer ones, and
//! the end of the group. In a larger group these travel as values of the group's step.
//!
//! A rank has few notes that it has not received: every call is compared along the ring of ranks, so a rank is ahead of another
//! by at most one call of a lane for each rank between them.
//!
//! The end is sent in every lane, because calls wait in any of them. It does not arrive if the other rank has its channel in
//! another connection, or has not opened it; so a call that takes long also [requests](super::calling) it.

use std::sync::Arc;

use futures::{
    FutureExt as _,
    future::{join_all, try_join_all},
};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, Status, text::escaped};
use tensorwire_rendezvous::{Notes, WorkerError};

use super::{CALLS_UNDER_WAY, GroupState};

/// The size of the largest group that has channels. Each of its ranks connects to all others.
const RANKS_MAX: usize = 8;

/// The first bytes of a note with the end of the group. Call headers and tickets begin with others.
const END: [u8; 4] = *b"TWGe";

/// This rank's channels, in the order of the ranks. Its own entry is empty.
pub(super) struct Channels(Vec<Option<Notes>>);

impl Channels {
    /// Opens a channel to each other rank. `None` for a group that is too large.
    ///
    /// # Errors
    /// The rank whose channel could not be opened.
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

    /// Completes when every other rank has sent the end of the group, or is lost.
    pub(super) async fn all_have_left(&self) {
        let left = self.0.iter().flatten().map(|notes| async {
            while let Ok(note) = notes.recv(0).await
                && decode_end(&note).is_none()
            {}
        });
        join_all(left).await;
    }

    /// Sends `status`, the end of the group, to all other ranks.
    pub(super) fn announce_end(self: &Arc<Self>, status: &Status, runtime: &dyn Runtime) {
        let note = encode(status);
        for rank in 0..self.0.len() {
            let (channels, note) = (self.clone(), note.clone());
            let mut sent = Box::pin(async move {
                let Some(notes) = channels.with(rank) else { return };
                // A rank that it does not reach requests the end when a call takes long.
                let _sent = notes.send(Notes::EVERY_LANE, &[&note]).await;
            });
            if sent.as_mut().now_or_never().is_none() {
                runtime.spawn("announce the end of a group", sent);
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

/// The end of the group, if the note contains it.
pub(super) fn decode_end(note: &[u8]) -> Option<Status> {
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
        assert_eq!(decode_end(&encode(&status)), Some(status.clone()));
        let long = Status { message: "w".repeat(9_000), ..status };
        assert_eq!(encode(&long).len(), Notes::BYTES_MAX);
        assert_eq!(decode_end(&[1; 40]), None);
        assert_eq!(decode_end(&[END.as_slice(), &[9, 1]].concat()), None, "cut off");
    }
}
