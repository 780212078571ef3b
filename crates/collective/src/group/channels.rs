//! The channels of [`Notes`] between the ranks of a group. They carry call headers with short contents, tickets of longer ones, and the
//! end of the group.
//!
//! Two ranks *meet* when a call of both first needs it: each opens its channel and then says so in the group's step, because a note that
//! comes before its channel is open is lost.
//!
//! A rank has few notes that it has not received: every call is compared along a ring of ranks
//! ([`ComparedRanks`](crate::schedule::ComparedRanks)), so a rank is ahead of another by at most one call of a lane for each rank between them.
//!
//! The end is sent in every lane, because calls wait in any of them. It does not arrive if the other rank has its channel in
//! another connection, or has not opened it; so a call that takes long also [requests](super::calling) it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, future::join_all};
use tensorwire_fabric::Runtime;
use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, DataType, Status, text::escaped};
use tensorwire_rendezvous::{Notes, Peer, Step, Tensor, WorkerError};
use tokio::sync::OnceCell;

use super::CALLS_UNDER_WAY;

/// The first bytes of a note with the end of the group. Call headers and tickets begin with others.
const END: [u8; 4] = *b"TWGe";

/// The key under which a rank says in the group's step that it has opened its channel.
const MET: &str = "met";

/// This rank's channels, in the order of the ranks. Its own stays closed.
pub(super) struct Channels {
    channels: Vec<Channel>,
    /// How many ranks this one has met.
    met: AtomicUsize,
}

#[derive(Default)]
struct Channel {
    opened: OnceCell<Notes>,
    /// The other rank has opened its own.
    met: OnceCell<()>,
}

impl Channels {
    /// For a group of `size` ranks.
    pub(super) fn new(size: usize) -> Arc<Self> {
        let channels = (0..size).map(|_| Channel::default()).collect();
        Arc::new(Self { channels, met: AtomicUsize::new(0) })
    }

    /// Meets `rank`, which is `peer` and does the same within `limit`, unless they have met.
    pub(super) async fn meet(
        &self,
        step: &Step,
        (rank, peer): (usize, &Peer),
        limit: Duration,
    ) -> Result<&Notes, WorkerError> {
        let channel = &self.channels[rank];
        let open = || peer.notes(step.id() as u64, CALLS_UNDER_WAY as u16);
        let opened = channel.opened.get_or_try_init(open).await?;
        let met = channel.met.get_or_try_init(|| async {
            step.to(peer).send(MET, Tensor::shared(Buf::empty(), DataType::U8, &[0])?)?;
            step.from(peer).recv(MET).timeout(limit).await?;
            self.met.fetch_add(1, Ordering::Relaxed);
            Ok::<_, WorkerError>(())
        });
        met.await?;
        Ok(opened)
    }

    /// The channel to a rank that this one has met.
    pub(super) fn with(&self, rank: usize) -> Option<&Notes> {
        let channel = self.channels.get(rank)?;
        channel.opened.get().filter(|_| channel.met.initialized())
    }

    pub(super) fn has_met_all(&self) -> bool {
        self.met.load(Ordering::Relaxed) + 1 >= self.channels.len()
    }

    /// The channels that are open on this side.
    fn opened(&self) -> impl Iterator<Item = (usize, &Notes)> {
        self.channels.iter().enumerate().filter_map(|(rank, channel)| Some((rank, channel.opened.get()?)))
    }

    /// Completes when every rank with which a channel is open has sent the end of the group, or is lost.
    pub(super) async fn all_have_left(&self) {
        let left = self.opened().map(|(_, notes)| async {
            while let Ok(note) = notes.recv(0).await
                && decode_end(&note).is_none()
            {}
        });
        join_all(left).await;
    }

    /// Sends `status`, the end of the group, through all channels that are open.
    pub(super) fn announce_end(self: &Arc<Self>, status: &Status, runtime: &dyn Runtime) {
        let note = encode(status);
        for (rank, _) in self.opened() {
            let (channels, note) = (self.clone(), note.clone());
            let mut sent = Box::pin(async move {
                let Some(notes) = channels.channels.get(rank).and_then(|channel| channel.opened.get()) else {
                    return;
                };
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
