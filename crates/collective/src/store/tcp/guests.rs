//! The connections of a server, and the bytes that they hold outside of the board.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::channel::oneshot;

/// The connections of a server.
///
/// Clients reconnect when their connection is closed, so the server closes one that does nothing to make room for another.
#[derive(Debug, Default)]
pub(super) struct Guests(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    all: HashMap<u64, Guest>,
    next: u64,
    /// The sum over `all`.
    held: usize,
}

#[derive(Debug)]
struct Guest {
    /// When it came, or did something.
    since: Duration,
    has_asked: bool,
    waits: usize,
    held: usize,
    /// Closes the connection when dropped.
    _close: oneshot::Sender<()>,
}

impl Guests {
    /// Adds a connection that came at `now`. The receiver completes when it must be closed.
    pub(super) fn enter(self: &Arc<Self>, now: Duration) -> (Arc<Seat>, oneshot::Receiver<()>) {
        let (close, closed) = oneshot::channel();
        let mut inner = self.lock();
        inner.next += 1;
        let guest = Guest { since: now, has_asked: false, waits: 0, held: 0, _close: close };
        let id = inner.next;
        inner.all.insert(id, guest);
        (Arc::new(Seat { guests: Arc::clone(self), id }), closed)
    }

    /// Closes the oldest connection without a request, or else the one without a wait that has done nothing for longest, and at
    /// least for `idle`. Returns whether there was one.
    pub(super) fn make_room(&self, now: Duration, idle: Duration) -> bool {
        let mut inner = self.lock();
        let is_idle =
            |guest: &Guest| guest.waits == 0 && (!guest.has_asked || now.saturating_sub(guest.since) >= idle);
        let idle = inner.all.iter().filter(|(_, guest)| is_idle(guest));
        let first = idle.min_by_key(|(_, guest)| (guest.has_asked, guest.since)).map(|(id, _)| *id);
        first.is_some_and(|id| inner.remove(id))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn remove(&mut self, id: u64) -> bool {
        let removed = self.all.remove(&id);
        self.held -= removed.as_ref().map_or(0, |guest| guest.held);
        removed.is_some()
    }

    /// Closes those that hold more than `id` until `bytes` more are at most `most`. Returns whether they are.
    fn make_bytes(&mut self, id: u64, bytes: usize, most: usize) -> bool {
        let Some(own) = self.all.get(&id).map(|own| own.held + bytes) else { return false };
        while self.held + bytes > most {
            let Some((largest, guest)) = self.all.iter().max_by_key(|(_, guest)| guest.held) else {
                return false;
            };
            if guest.held <= own {
                return false;
            }
            let largest = *largest;
            self.remove(largest);
        }
        true
    }
}

/// The place of a connection among the others, which ends with it.
#[derive(Debug)]
pub(super) struct Seat {
    guests: Arc<Guests>,
    id: u64,
}

impl Seat {
    /// The connection did something, and has `waits` waits now.
    pub(super) fn active(&self, now: Duration, waits: usize) {
        if let Some(guest) = self.guests.lock().all.get_mut(&self.id) {
            (guest.since, guest.has_asked, guest.waits) = (now, true, waits);
        }
    }

    /// Counts `bytes` that the connection holds. If all together are more than `most`, connections that hold more than this one
    /// are closed. `None` if there is none.
    pub(super) fn hold(self: &Arc<Self>, bytes: usize, most: usize) -> Option<Held> {
        let mut inner = self.guests.lock();
        if !inner.make_bytes(self.id, bytes, most) {
            return None;
        }
        inner.held += bytes;
        inner.all.get_mut(&self.id)?.held += bytes;
        Some(Held { seat: Arc::clone(self), bytes })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.guests.lock().remove(self.id);
    }
}

/// Bytes that a connection holds until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    seat: Arc<Seat>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut inner = self.seat.guests.lock();
        let Some(guest) = inner.all.get_mut(&self.seat.id) else { return };
        guest.held -= self.bytes;
        inner.held -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_room_first_and_those_that_wait_never() {
        let guests = Arc::new(Guests::default());
        let seconds = Duration::from_secs;
        let room = |now| guests.make_room(seconds(now), seconds(10));
        let (waits, mut waits_closed) = guests.enter(seconds(0));
        waits.active(seconds(0), 1);
        let (asked, mut asked_closed) = guests.enter(seconds(1));
        asked.active(seconds(1), 0);
        let (_first, mut first_closed) = guests.enter(seconds(2));
        let (_second, mut second_closed) = guests.enter(seconds(3));
        let mut closed = || {
            let all = [&mut waits_closed, &mut asked_closed, &mut first_closed, &mut second_closed];
            all.map(|closed| closed.try_recv().is_err())
        };
        assert!(room(3));
        assert_eq!(closed(), [false, false, true, false]);
        assert!(room(3));
        assert_eq!(closed(), [false, false, true, true]);
        assert!(!room(10), "a client may do nothing for a while");
        assert!(room(11) && !room(1000));
        assert_eq!(closed(), [false, true, true, true]);
    }

    #[test]
    fn bytes_are_taken_from_those_that_hold_most_and_come_back() {
        let guests = Arc::new(Guests::default());
        let ((large, mut large_closed), (small, mut small_closed)) =
            (guests.enter(Duration::ZERO), guests.enter(Duration::ZERO));
        assert!(large.hold(101, 100).is_none());
        let held = large.hold(80, 100).unwrap();
        assert!(small.hold(90, 100).is_none(), "it would hold most");
        for _ in 0..10 {
            drop(small.hold(20, 100).unwrap());
        }
        let _small = small.hold(30, 100).unwrap();
        assert!(large_closed.try_recv().is_err() && small_closed.try_recv().is_ok());
        drop(held);
        assert!(large.hold(1, 100).is_none(), "it is closed");
        drop(large);
        assert_eq!(guests.lock().held, 30);
    }
}
