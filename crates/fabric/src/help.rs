//! Polling by a task that awaits the peer, in place of the connection's driver: work that such a task finds itself
//! costs no wake-up. The bounds are the same for all fabrics.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use crate::{
    look::{Look, ROUNDS},
    wait::{Patience, Polling, Wait},
};

/// Consecutive finds after which the runtime's other tasks get a turn.
pub(crate) const FINDS_MAX: u32 = 64;

/// Like [`FINDS_MAX`], for finds on a board, which take a fraction of the time.
const BOARD_FINDS_MAX: u32 = 4 * FINDS_MAX;

/// State that a connection's driver and its helping tasks share. All of it is heuristic, so races between threads do
/// no harm.
#[derive(Debug, Default)]
pub struct Help {
    /// Unset for a fabric that does not poll.
    polling: OnceLock<Polling>,
    /// Whether polling pays off now, as the driver has measured.
    pays: AtomicBool,
    /// Consecutive finds.
    in_a_row: AtomicU32,
    /// Finds on the board since [`Help::other_tasks_are_due`] last returned true.
    on_board: AtomicU32,
    /// All finds.
    finds: AtomicU64,
    /// Whether something was posted since an arrival was last awaited.
    has_asked: AtomicBool,
    /// Whether a turn that was yielded to a peer on this CPU took too long. The driver takes this flag.
    was_late: AtomicBool,
}

impl Help {
    /// From now on waiting tasks poll as the driver with this `patience` does.
    pub(crate) fn begin(&self, patience: &Patience) {
        // A connection has one driver.
        let _ = self.polling.set(patience.polling());
    }

    /// Allows or forbids waiting tasks to poll.
    pub fn allow(&self, pays: bool) {
        if self.pays.load(Ordering::Relaxed) != pays {
            self.pays.store(pays, Ordering::Relaxed);
        }
    }

    /// Whether [`find`](Self::find) may poll now.
    pub(crate) fn is_allowed(&self) -> bool {
        self.pays.load(Ordering::Relaxed)
    }

    /// Whether this fabric's tasks ever poll.
    pub(crate) fn polls(&self) -> bool {
        self.polling.get().is_some_and(|polling| polling.wait != Wait::Sleep)
    }

    /// A number that changes whenever a task has found something.
    pub(crate) fn finds(&self) -> u64 {
        self.finds.load(Ordering::Relaxed)
    }

    /// Records that something was posted.
    pub(crate) fn asks(&self) {
        self.has_asked.store(true, Ordering::Relaxed);
    }

    /// Whether something was posted since the last call, so that an answer may be under way. A task that dispatches
    /// arrivals to other tasks awaits the next arrival before those have run. Polling then would be in vain: the next
    /// arrival can only come once they have run.
    pub(crate) fn awaits_answer(&self) -> bool {
        let asked = self.has_asked.load(Ordering::Relaxed);
        if asked {
            self.has_asked.store(false, Ordering::Relaxed);
        }
        asked
    }

    /// Whether a helping task yielded a turn that took too long, since the last call.
    pub(crate) fn takes_late_turn(&self) -> bool {
        self.was_late.load(Ordering::Relaxed) && self.was_late.swap(false, Ordering::Relaxed)
    }

    /// Polls for a few microseconds, if that is allowed. A peer on this CPU gets the CPU first, and then one look finds
    /// what the peer has done. Returns true if this found work and did all of it; otherwise the driver does the rest.
    pub(crate) fn find(&self, peer_is_here: impl FnOnce() -> bool, mut look: impl FnMut() -> Look) -> bool {
        let Some(polling) = self.polling.get().filter(|_| self.is_allowed()) else { return false };
        let in_a_row = self.in_a_row.load(Ordering::Relaxed);
        if in_a_row >= FINDS_MAX {
            self.in_a_row.store(0, Ordering::Relaxed);
            return false;
        }
        let Some(found) =
            self.look(polling, peer_is_here, || Some(look()).filter(|look| *look != Look::Idle))
        else {
            return false;
        };
        if found == Look::InVain {
            return false;
        }
        self.in_a_row.store(in_a_row + 1, Ordering::Relaxed);
        self.count_find();
        found == Look::Worked
    }

    /// Like [`find`](Self::find), for changes of the board.
    pub(crate) fn find_on_board(
        &self,
        peer_is_here: impl FnOnce() -> bool,
        mut found: impl FnMut() -> bool,
    ) -> bool {
        let Some(polling) = self.polling.get().filter(|_| self.is_allowed()) else { return false };
        self.look(polling, peer_is_here, || found().then_some(())).is_some()
    }

    /// Counts a find on the board.
    pub(crate) fn found_on_board(&self) {
        self.on_board.store(self.on_board.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        self.count_find();
    }

    /// Whether other tasks should run before a task polls the board again.
    pub(crate) fn other_tasks_are_due(&self) -> bool {
        let is_due = self.on_board.load(Ordering::Relaxed) >= BOARD_FINDS_MAX;
        if is_due {
            self.on_board.store(0, Ordering::Relaxed);
        }
        is_due
    }

    fn count_find(&self) {
        self.finds.store(self.finds().wrapping_add(1), Ordering::Relaxed);
    }

    fn look<T>(
        &self,
        polling: &Polling,
        peer_is_here: impl FnOnce() -> bool,
        mut finds: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if !peer_is_here() {
            return polling.looks.find(ROUNDS, finds);
        }
        if polling.gives_way() {
            self.was_late.store(true, Ordering::Relaxed);
            self.allow(false);
        }
        finds()
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Arc};

    use super::*;
    use crate::{
        Spinner,
        wait::{Patience, tests::Clock},
    };

    /// The peer has a CPU of its own.
    fn elsewhere() -> bool {
        false
    }

    /// The state of a fabric that looks six times in a round.
    fn help() -> Help {
        let patience = Patience::new(Spinner::new(Wait::Adaptive), Arc::<Clock>::default());
        let help = Help::default();
        help.begin(&patience.with_looks(6));
        help.allow(true);
        help
    }

    #[test]
    fn tasks_never_poll_a_fabric_that_always_sleeps() {
        for (wait, polls) in [(Wait::Sleep, false), (Wait::Adaptive, true), (Wait::Busy, true)] {
            let help = Help::default();
            assert!(!help.polls(), "it has no driver");
            help.begin(&Patience::new(Spinner::new(wait), Arc::<Clock>::default()));
            assert_eq!(help.polls(), polls, "{wait:?}");
        }
    }

    #[test]
    fn nobody_looks_unless_that_pays() {
        let help = help();
        help.allow(false);
        assert!(!help.find(elsewhere, || panic!("looked")));
        assert!(!Help::default().find(elsewhere, || panic!("a fabric without looks")));
        help.allow(true);
        assert!(help.find(elsewhere, || Look::Worked));
        assert_eq!(help.finds(), 1);
    }

    #[test]
    fn a_task_looks_for_a_few_goes_and_no_longer() {
        let (help, looks) = (help(), &Cell::new(0));
        let finds_at = |number| {
            move || {
                looks.set(looks.get() + 1);
                if looks.get() == number { Look::Worked } else { Look::Idle }
            }
        };
        assert!(help.find(elsewhere, finds_at(6 * ROUNDS)), "the last of its looks");
        assert!(!help.find(elsewhere, finds_at(u32::MAX)));
        assert_eq!((looks.get(), help.finds()), (2 * 6 * ROUNDS, 1));
    }

    #[test]
    fn what_is_left_and_what_another_task_does_are_the_drivers() {
        for found in [Look::More, Look::Busy, Look::Over] {
            let (help, mut looks) = (help(), 0);
            let look = || {
                looks += 1;
                found
            };
            assert!(!help.find(elsewhere, look), "{found:?}");
            assert_eq!(looks, 1, "{found:?}");
        }
    }

    #[test]
    fn a_look_in_vain_ends_the_looking_and_finds_nothing() {
        let (help, mut looks) = (help(), 0);
        let look = || {
            looks += 1;
            Look::InVain
        };
        assert!(!help.find(elsewhere, look));
        assert_eq!((looks, help.finds()), (1, 0));
    }

    #[test]
    fn a_peer_on_this_cpu_gets_it_before_the_one_look() {
        let (help, mut looks) = (help(), 0);
        let mut find = |found| {
            help.find(
                || true,
                || {
                    looks += 1;
                    found
                },
            )
        };
        assert!(!find(Look::Idle) && find(Look::Worked));
        assert_eq!((looks, help.finds()), (2, 1));
        assert!(!help.takes_late_turn(), "the test's clock stands still");
    }

    #[test]
    fn others_get_a_turn_however_much_is_found() {
        let help = help();
        for _ in 0..3 {
            assert!((0..FINDS_MAX).all(|_| help.find(elsewhere, || Look::Worked)));
            assert!(!help.find(elsewhere, || panic!("looked")));
        }
    }

    #[test]
    fn others_get_a_turn_after_many_finds_on_a_board_and_then_it_begins_anew() {
        let help = help();
        for _ in 0..2 {
            for _ in 0..BOARD_FINDS_MAX {
                assert!(!help.other_tasks_are_due());
                help.found_on_board();
            }
            assert!(help.other_tasks_are_due());
        }
        help.on_board.store(u32::MAX, Ordering::Relaxed);
        help.found_on_board();
        assert!(help.other_tasks_are_due(), "nobody has asked for long");
    }

    #[test]
    fn who_hands_an_arrival_on_does_not_look_before_the_others_have_answered_it() {
        let help = help();
        assert!(!help.awaits_answer());
        for _ in 0..2 {
            help.asks();
            assert!(help.awaits_answer());
            assert!(!help.awaits_answer(), "the others have not run");
        }
    }
}
