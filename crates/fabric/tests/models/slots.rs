//! The slot table under every interleaving of a few threads that loom finds: the table's own source, compiled with
//! loom's locks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use futures::task::noop_waker;
use loom::{
    future::block_on,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};
use tensorwire_fabric::{FabricError, Immediate, WorkRequest};
use tensorwire_memory::Buf;

use crate::{
    model,
    slot::{LinePosition, Reserve, SlotKey, SlotTable},
};

fn request() -> WorkRequest {
    WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(1)) }
}

fn reserved(table: &SlotTable, weight: u64) -> SlotKey {
    match table.reserve(&request(), weight) {
        Reserve::Reserved(key) => key,
        Reserve::InLine(_) | Reserve::Full => panic!("no room"),
        Reserve::Failed(error) => panic!("{error}"),
    }
}

/// Like an operation's future.
async fn reserve_in_turn(table: &SlotTable, weight: u64) -> Result<SlotKey, FabricError> {
    let mut position = LinePosition::default();
    poll_fn(|context| match table.reserve_or_wait(&request(), weight, &mut position, context.waker()) {
        Reserve::Reserved(key) => Poll::Ready(Ok(key)),
        Reserve::InLine(_) | Reserve::Full => Poll::Pending,
        Reserve::Failed(error) => Poll::Ready(Err(error)),
    })
    .await
}

/// Like an operation's future.
async fn done(table: &SlotTable, key: SlotKey) -> Result<(), FabricError> {
    poll_fn(|context| match table.take_done(key) {
        Some(result) => Poll::Ready(result),
        None => table.poll_done(key, context),
    })
    .await
}

fn in_line(table: &SlotTable, weight: u64) -> SlotKey {
    match table.post(&request(), weight) {
        Reserve::InLine(key) => key,
        _ => panic!("there was room"),
    }
}

/// Like a queue pair.
fn submit_line(table: &SlotTable, submitted: &Mutex<Vec<SlotKey>>) {
    while let Some((key, _)) = table.next_in_line() {
        submitted.lock().unwrap().push(key);
        table.submitted();
    }
}

/// Runs `act` on a thread of its own.
fn on_thread<T: 'static>(
    table: &Arc<SlotTable>,
    act: impl FnOnce(&SlotTable) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let table = table.clone();
    thread::spawn(move || act(&table))
}

/// The operation completes, and its future is dropped.
fn end(table: &SlotTable, key: SlotKey) {
    assert!(table.complete(key, Ok(())));
    table.ignore(key);
}

/// The operation's future is dropped, and it completes.
fn end_ignored(table: &SlotTable, key: SlotKey) {
    table.ignore(key);
    assert!(table.complete(key, Ok(())));
}

/// Checks that the whole depth is free again.
fn assert_free(table: &SlotTable) {
    assert_eq!(table.outstanding(), 0);
    let key = reserved(table, u64::from(table.depth()));
    assert!(table.complete(key, Ok(())));
}

#[test]
fn a_completion_reaches_whoever_waits_for_it() {
    model(|| {
        let table = Arc::new(SlotTable::new(1));
        let key = reserved(&table, 1);
        let device = on_thread(&table, move |table| assert!(table.complete(key, Ok(()))));
        block_on(done(&table, key)).unwrap();
        device.join().unwrap();
        assert_free(&table);
    });
}

#[test]
fn a_future_dropped_at_its_completion_frees_the_slot_once() {
    model(|| {
        let table = Arc::new(SlotTable::new(1));
        let key = reserved(&table, 1);
        let device = on_thread(&table, move |table| assert!(table.complete(key, Ok(()))));
        table.ignore(key);
        device.join().unwrap();
        assert!(!table.complete(key, Ok(())), "a late completion ended someone else's operation");
        assert_free(&table);
    });
}

#[test]
fn an_operation_ends_once_when_its_completion_meets_a_failure() {
    model(|| {
        let table = Arc::new(SlotTable::new(2));
        let keys = [reserved(&table, 1), reserved(&table, 1)];
        let completions = Arc::new(AtomicU32::new(0));
        let counted = completions.clone();
        let device = on_thread(&table, move |table| {
            counted.fetch_add(u32::from(table.complete(keys[0], Ok(()))), Ordering::Relaxed);
        });
        let close = on_thread(&table, |table| table.fail(&FabricError::Closed));
        let first = block_on(done(&table, keys[0]));
        assert!(matches!(block_on(done(&table, keys[1])), Err(FabricError::Closed)));
        device.join().unwrap();
        close.join().unwrap();
        assert_eq!(first.is_ok(), completions.load(Ordering::Relaxed) == 1);
        assert_eq!(table.outstanding(), 0);
        assert!(matches!(table.reserve(&request(), 1), Reserve::Failed(FabricError::Closed)));
    });
}

#[test]
fn room_reaches_whoever_waits_for_it() {
    model(|| {
        let table = Arc::new(SlotTable::new(1));
        let key = reserved(&table, 1);
        let holder = on_thread(&table, move |table| end(table, key));
        let next = block_on(reserve_in_turn(&table, 1)).unwrap();
        holder.join().unwrap();
        end(&table, next);
        assert_free(&table);
    });
}

#[test]
fn a_heavy_operation_and_a_light_one_both_find_room() {
    model(|| {
        let table = Arc::new(SlotTable::new(2));
        let held = reserved(&table, 2);
        let heavy = on_thread(&table, |table| end(table, block_on(reserve_in_turn(table, 2)).unwrap()));
        let light =
            on_thread(&table, |table| end_ignored(table, block_on(reserve_in_turn(table, 1)).unwrap()));
        end(&table, held);
        heavy.join().unwrap();
        light.join().unwrap();
        assert_free(&table);
    });
}

#[test]
fn a_place_given_up_goes_to_the_next() {
    model(|| {
        let table = Arc::new(SlotTable::new(2));
        let held = reserved(&table, 1);
        // The first in the queue does not fit beside the posted operation; the second would.
        let mut position = LinePosition::default();
        let gave_up = table.reserve_or_wait(&request(), 2, &mut position, &noop_waker());
        assert!(matches!(gave_up, Reserve::Full));
        let next = on_thread(&table, |table| block_on(reserve_in_turn(table, 1)).unwrap());
        table.leave(&mut position);
        let key = next.join().unwrap();
        [held, key].into_iter().for_each(|key| end_ignored(&table, key));
        assert_free(&table);
    });
}

#[test]
fn what_stands_in_line_is_submitted_once_and_in_order() {
    model(|| {
        let table = Arc::new(SlotTable::new(2));
        let held = reserved(&table, 2);
        let line = [in_line(&table, 1), in_line(&table, 1)];
        let submitted = Arc::new(Mutex::new(Vec::new()));
        let other = {
            let submitted = submitted.clone();
            on_thread(&table, move |table| submit_line(table, &submitted))
        };
        end(&table, held);
        submit_line(&table, &submitted);
        other.join().unwrap();
        // The other thread may have been submitting the first when this one looked, and the first may have had no room
        // then.
        submit_line(&table, &submitted);
        assert_eq!(*submitted.lock().unwrap(), line);
        line.into_iter().for_each(|key| end_ignored(&table, key));
        assert_free(&table);
    });
}

#[test]
fn room_reaches_the_task_that_submits_the_line() {
    model(|| {
        let table = Arc::new(SlotTable::new(1));
        let held = reserved(&table, 1);
        let line = in_line(&table, 1);
        let holder = on_thread(&table, move |table| end(table, held));
        let submitted = block_on(poll_fn(|context: &mut Context<'_>| {
            table.leave_poster(context.waker());
            match table.next_in_line() {
                Some((key, _)) => Poll::Ready(key),
                None => Poll::Pending,
            }
        }));
        table.submitted();
        assert_eq!(submitted, line);
        holder.join().unwrap();
        end(&table, line);
        assert_free(&table);
    });
}

#[test]
fn a_failure_ends_every_wait() {
    model(|| {
        let table = Arc::new(SlotTable::new(1));
        let key = reserved(&table, 1);
        let waiter = on_thread(&table, |table| {
            let error = block_on(reserve_in_turn(table, 1)).unwrap_err();
            assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
        });
        let line = in_line(&table, 1);
        let in_line = on_thread(&table, move |table| block_on(done(table, line)));
        table.fail(&FabricError::Closed);
        block_on(poll_fn(|context: &mut Context<'_>| table.poll_idle(context)));
        waiter.join().unwrap();
        assert!(matches!(in_line.join().unwrap(), Err(FabricError::Closed)));
        assert!(matches!(block_on(done(&table, key)), Err(FabricError::Closed)));
    });
}

#[test]
fn a_drain_waits_for_the_last_completion() {
    model(|| {
        let table = Arc::new(SlotTable::new(2));
        let keys = [reserved(&table, 1), reserved(&table, 1)];
        table.refuse(&FabricError::Closed);
        let ended = Arc::new(AtomicU32::new(0));
        let device = keys.map(|key| {
            let ended = ended.clone();
            on_thread(&table, move |table| {
                ended.fetch_add(1, Ordering::Relaxed);
                assert!(table.complete(key, Ok(())));
            })
        });
        block_on(poll_fn(|context: &mut Context<'_>| table.poll_idle(context)));
        assert_eq!(ended.load(Ordering::Relaxed), 2);
        device.into_iter().for_each(|thread| thread.join().unwrap());
        keys.into_iter().for_each(|key| table.ignore(key));
    });
}
