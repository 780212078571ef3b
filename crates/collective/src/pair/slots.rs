//! The slots in use on this rank.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::oneshot;

use crate::error::GroupError;

/// The other rank, and the number of the slot.
pub(super) type SlotId = (usize, u64);

/// The slots in use.
#[derive(Debug, Default)]
pub(super) struct Slots {
    sending: BTreeSet<SlotId>,
    receiving: BTreeMap<SlotId, Receiving>,
    /// The number of receiving tasks for each rank. A rank without tasks has no entry.
    tasks: BTreeMap<usize, usize>,
    /// How many receive buffers were made so far.
    buffers: u64,
    /// Ranks from which buffers receive nothing more, with the error. It is unknown which of their send buffers have ended, so a
    /// new receive buffer could receive messages of an earlier one.
    lost: BTreeMap<usize, GroupError>,
}

/// The latest receive buffer of a slot.
#[derive(Debug)]
struct Receiving {
    buffer: u64,
    /// Whether the user has the buffer.
    is_held: bool,
    /// Completes when its task ends. `None` if it has ended, or the next task awaits it.
    ended: Option<oneshot::Receiver<()>>,
}

/// A new receive buffer.
#[derive(Debug)]
pub(super) struct Opened {
    /// Its number among all receive buffers.
    pub(super) buffer: u64,
    /// Dropped when its task ends.
    pub(super) running: oneshot::Sender<()>,
    /// Completes when the task of the slot's earlier buffer has ended.
    pub(super) before: Option<oneshot::Receiver<()>>,
}

impl Slots {
    /// Takes the slot for a send buffer.
    pub(super) fn open_sending(&mut self, id: SlotId) -> Result<(), GroupError> {
        if self.sending.insert(id) { Ok(()) } else { Err(in_use(id)) }
    }

    pub(super) fn close_sending(&mut self, id: SlotId) {
        self.sending.remove(&id);
    }

    /// Takes the slot for a receive buffer. `most` limits those for one rank.
    pub(super) fn open_receiving(&mut self, id: SlotId, most: usize) -> Result<Opened, GroupError> {
        self.check_lost(id.0)?;
        let tasks = self.tasks.get(&id.0).copied().unwrap_or_default();
        if tasks >= most {
            return Err(GroupError::Argument {
                field: "slot",
                value: id.1.to_string(),
                remedy: format!(
                    "{tasks} receive buffers await rank {}, the maximum is {most}: drop some on both sides",
                    id.0
                ),
            });
        }
        let before = match self.receiving.get_mut(&id) {
            Some(Receiving { is_held: true, .. }) => return Err(in_use(id)),
            Some(earlier) => earlier.ended.take(),
            None => None,
        };
        let (running, ended) = oneshot::channel();
        self.buffers += 1;
        let buffer = self.buffers;
        self.receiving.insert(id, Receiving { buffer, is_held: true, ended: Some(ended) });
        *self.tasks.entry(id.0).or_default() += 1;
        Ok(Opened { buffer, running, before })
    }

    /// The error of all receive buffers for `rank`, if they receive nothing more.
    pub(super) fn check_lost(&self, rank: usize) -> Result<(), GroupError> {
        self.lost.get(&rank).map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Buffers receive nothing more from `rank`.
    pub(super) fn lose(&mut self, rank: usize, why: &GroupError) {
        self.lost.entry(rank).or_insert_with(|| why.clone());
    }

    /// The user has dropped a receive buffer.
    pub(super) fn close_receiving(&mut self, id: SlotId, buffer: u64) {
        self.change(id, buffer, |receiving| receiving.is_held = false);
    }

    /// The task of a receive buffer has ended.
    pub(super) fn task_ended(&mut self, id: SlotId, buffer: u64) {
        self.change(id, buffer, |receiving| receiving.ended = None);
        if let Some(tasks) = self.tasks.get_mut(&id.0) {
            *tasks -= 1;
            if *tasks == 0 {
                self.tasks.remove(&id.0);
            }
        }
    }

    /// Changes the latest receive buffer of a slot, if it is `buffer`. Removes it once neither the user nor a task has it.
    fn change(&mut self, id: SlotId, buffer: u64, change: impl FnOnce(&mut Receiving)) {
        let Some(receiving) = self.receiving.get_mut(&id).filter(|latest| latest.buffer == buffer) else {
            return;
        };
        change(receiving);
        if !receiving.is_held && receiving.ended.is_none() {
            self.receiving.remove(&id);
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.sending.is_empty() && self.receiving.is_empty() && self.tasks.is_empty()
    }
}

fn in_use((rank, slot): SlotId) -> GroupError {
    GroupError::Argument {
        field: "slot",
        value: slot.to_string(),
        remedy: format!(
            "a buffer of this direction uses it with rank {rank}: drop that buffer, or use another slot"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: SlotId = (1, 7);

    #[test]
    fn a_slot_is_free_again_once_buffer_and_task_have_ended() {
        for task_ends_first in [false, true] {
            let mut slots = Slots::default();
            let Opened { buffer, running, before } = slots.open_receiving(SLOT, 2).unwrap();
            assert!(before.is_none() && slots.open_receiving(SLOT, 2).is_err());
            if task_ends_first {
                slots.task_ended(SLOT, buffer);
                drop(running);
                assert!(slots.open_receiving(SLOT, 2).is_err());
                slots.close_receiving(SLOT, buffer);
            } else {
                slots.close_receiving(SLOT, buffer);
                let next = slots.open_receiving(SLOT, 2).unwrap();
                assert!(slots.open_receiving((1, 8), 2).is_err(), "two tasks are the maximum");
                let mut before = next.before.unwrap();
                assert!(before.try_recv() == Err(oneshot::error::TryRecvError::Empty));
                slots.task_ended(SLOT, buffer);
                drop(running);
                assert!(before.try_recv() == Err(oneshot::error::TryRecvError::Closed));
                slots.close_receiving(SLOT, next.buffer);
                slots.task_ended(SLOT, next.buffer);
            }
            assert!(slots.is_empty(), "{slots:?}");
        }
    }

    #[test]
    fn a_rank_that_is_lost_has_no_more_receive_buffers() {
        let mut slots = Slots::default();
        slots.lose(SLOT.0, &in_use(SLOT));
        assert!(slots.open_receiving((SLOT.0, 99), 2).is_err() && slots.is_empty());
        slots.open_receiving((SLOT.0 + 1, SLOT.1), 2).unwrap();
    }

    #[test]
    fn a_slot_has_one_send_buffer_at_a_time() {
        let mut slots = Slots::default();
        slots.open_sending(SLOT).unwrap();
        let error = slots.open_sending(SLOT).unwrap_err().to_string();
        assert!(error.starts_with("slot = `7`: ") && error.contains("rank 1"), "{error}");
        slots.close_sending(SLOT);
        slots.open_sending(SLOT).unwrap();
    }
}
