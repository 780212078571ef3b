//! A task that is woken only while it sleeps, under every interleaving that loom finds.

use std::task::{Wake, Waker};

use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use crate::{alarm_source::Alarm, model};

/// How often a task was woken.
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

fn alarm_and_task() -> (std::sync::Arc<Alarm>, std::sync::Arc<Woken>) {
    (std::sync::Arc::default(), std::sync::Arc::new(Woken(AtomicU64::new(0))))
}

#[test]
fn only_the_first_ring_after_it_was_set_wakes_the_task() {
    model(|| {
        let (alarm, woken) = alarm_and_task();
        let (rings, task) = (alarm.waker(), Waker::from(woken.clone()));
        let times = || woken.0.load(Ordering::Relaxed);
        rings.wake_by_ref();
        assert_eq!(times(), 0, "it was never set");
        assert!(alarm.set(&task), "it has rung before");
        rings.wake_by_ref();
        rings.wake_by_ref();
        assert_eq!(times(), 1);
        alarm.silence();
        assert!(!alarm.has_rung());
        rings.wake_by_ref();
        assert!(alarm.has_rung() && times() == 1, "the task is awake");
        alarm.silence();
        assert!(!alarm.set(&task), "the task has looked since");
        rings.wake();
        assert_eq!(times(), 2);
    });
}

#[test]
fn what_is_there_before_a_ring_is_seen_or_wakes_the_task() {
    model(|| {
        let (alarm, woken) = alarm_and_task();
        let has_work = Arc::new(AtomicBool::new(false));
        let other = {
            let (rings, has_work) = (alarm.waker(), has_work.clone());
            thread::spawn(move || {
                has_work.store(true, Ordering::Relaxed);
                rings.wake();
            })
        };
        // A task that polls once, and sleeps.
        alarm.silence();
        let mut is_seen = has_work.load(Ordering::Relaxed);
        let has_rung = alarm.set(&Waker::from(woken.clone()));
        is_seen |= has_rung && has_work.load(Ordering::Relaxed);
        other.join().unwrap();
        assert!(is_seen || woken.0.load(Ordering::Relaxed) == 1);
    });
}
