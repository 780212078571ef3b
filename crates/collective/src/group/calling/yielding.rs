//! Lets other ranks run while a call waits, where a machine has more ranks than CPUs.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::atomic::Ordering,
    task::{Context, Poll, Waker},
    thread,
};

use tensorwire_protocol::EagerContent;
use tensorwire_rendezvous::{Notes, WorkerError};

use super::{Calling, Ranks};
use crate::group::crowd::{TURN_MAX, WAIT_MAX};

impl Calling {
    /// Runs `work`. In a [`Crowd`](crate::group::crowd::Crowd), yields the CPU between polls for some time before the task sleeps.
    pub(super) async fn yielding<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            if self.group.crowd.other_tasks_are_due() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut poll_awake = || {
                self.is_awake.store(true, Ordering::Relaxed);
                // No waker is needed, because another poll follows.
                let polled = work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                self.is_awake.store(false, Ordering::Relaxed);
                polled
            };
            let polled = if self.may_yield() {
                self.yield_until(poll_awake)
            } else if tensorwire_testpoints::chance!("a rank polls again before it sleeps") {
                poll_awake()
            } else {
                Poll::Pending
            };
            if polled.is_ready() { polled } else { work.as_mut().poll(context) }
        })
        .await
    }

    /// Whether [`yield_until`](Self::yield_until) is better than a sleep.
    pub(super) fn may_yield(&self) -> bool {
        self.group.crowd.may_yield() && self.met().next().is_some_and(Notes::polls)
    }

    /// The channels to the ranks that this one has met.
    pub(super) fn met(&self) -> impl Iterator<Item = &Notes> {
        self.others().filter_map(|rank| self.group.notes(rank))
    }

    /// Calls `poll` until it is ready, and yields the CPU in between. Pending if that is of no use: no message comes for a time, the
    /// CPU has work that awaits no rank, or this rank has posted contents, which the connections' drivers send.
    pub(super) fn yield_until<T>(&self, mut poll: impl FnMut() -> Poll<T>) -> Poll<T> {
        let (crowd, clock) = (&self.group.crowd, self.group.runtime());
        let (mut since, mut before, mut has_yielded) = (clock.now(), 0, false);
        loop {
            if let Poll::Ready(done) = poll() {
                crowd.completed(has_yielded);
                return Poll::Ready(done);
            }
            let Some(messages) = self.received_by_notes() else { return Poll::Pending };
            let begun = clock.now();
            if messages != before {
                (since, before) = (begun, messages);
            } else if begun.saturating_sub(since) > WAIT_MAX {
                crowd.missed();
                return Poll::Pending;
            }
            thread::yield_now();
            has_yielded = true;
            if clock.now().saturating_sub(begun) > TURN_MAX {
                crowd.is_busy();
                return Poll::Pending;
            }
            self.poll_awaited();
        }
    }

    /// The number of messages received so far; `None` if this rank has posted contents.
    fn received_by_notes(&self) -> Option<u32> {
        let contacts = self.contacts();
        let has_posted = contacts.iter().any(|contact| contact.has_posted);
        (!has_posted).then(|| contacts.iter().map(|contact| contact.messages).sum())
    }

    /// Polls the connections of the ranks that this one awaits.
    fn poll_awaited(&self) {
        let awaited: Ranks = {
            let contacts = self.contacts();
            (0..)
                .zip(contacts.iter())
                .filter(|(_, contact)| contact.awaited > 0)
                .map(|(rank, _)| rank)
                .collect()
        };
        for notes in awaited.into_iter().filter_map(|rank| self.group.notes(rank)) {
            notes.poll_once();
        }
    }

    /// The next note. This rank does not park the lane while it polls again before it sleeps.
    pub(super) async fn await_note(
        &self,
        notes: &Notes,
        may_look: bool,
    ) -> Result<EagerContent, WorkerError> {
        let lane = self.group.lane(&self.call).number;
        let note = async { if may_look { notes.recv(lane).await } else { notes.recv_beside(lane).await } };
        let mut note = pin!(note);
        poll_fn(|context| {
            if !self.is_awake.load(Ordering::Relaxed) {
                return note.as_mut().poll(context);
            }
            let next = notes.next(lane).transpose();
            if next.is_none() {
                // A set of futures polls only those that were woken.
                context.waker().wake_by_ref();
            }
            next.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
