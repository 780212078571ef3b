//! Interleavings of threads, explored by a scheduler: `scripts/check-models`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod models {
    use std::{
        future::Future,
        pin::pin,
        sync::Arc,
        task::{Context, Waker},
    };

    use shuttle::{future::block_on, thread};
    use tensorwire_memory::{Buf, BufMut, GrantEnd, MemoryError, Pool, PoolConfig, copy::CopyReason};

    /// Schedules tried per model: half drawn at random, half with few forced switches at random points.
    const SCHEDULES: usize = 4000;

    fn explore(model: impl Fn() + Send + Sync + 'static) {
        let model = Arc::new(model);
        let again = model.clone();
        shuttle::check_random(move || model(), SCHEDULES);
        shuttle::check_pct(move || again(), SCHEDULES, 3);
    }

    fn pool(cap_bytes: u64) -> Pool {
        Pool::new(PoolConfig { block_bytes: 4096, cap_bytes, ..PoolConfig::new("model") }).unwrap()
    }

    /// Writes a mark of its own, and checks that it is whole after others had their turn.
    fn use_alone(buffer: &mut BufMut, mark: u8) {
        buffer.fill(mark);
        thread::yield_now();
        assert!(buffer.iter().all(|byte| *byte == mark), "two owners of the same bytes");
    }

    #[test]
    fn everyone_who_waits_is_served_and_nobody_shares_bytes() {
        explore(|| {
            let pool = pool(128);
            let threads: Vec<_> = [64, 128, 64]
                .into_iter()
                .zip(1..)
                .map(|(length, mark)| {
                    let pool = pool.clone();
                    thread::spawn(move || {
                        for _ in 0..2 {
                            use_alone(&mut block_on(pool.alloc(length)).unwrap(), mark);
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let stats = pool.stats();
            assert_eq!((stats.used_bytes, stats.waiting), (0, 0));
        });
    }

    #[test]
    fn a_place_given_up_while_room_comes_goes_to_the_next_in_line() {
        explore(|| {
            let pool = pool(128);
            let held = pool.try_alloc(128).unwrap();
            let mut first = Box::pin(pool.alloc(128));
            assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let freeing = thread::spawn(move || drop(held));
            let next = {
                let pool = pool.clone();
                thread::spawn(move || use_alone(&mut block_on(pool.alloc(64)).unwrap(), 2))
            };
            let cancelling = thread::spawn(move || drop(first));
            // If a thread missed the room or the cancellation, this never ends, which the scheduler reports.
            [freeing, next, cancelling].into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!((pool.stats().used_bytes, pool.stats().waiting), (0, 0));
        });
    }

    #[test]
    fn those_who_cannot_wait_never_overtake_those_who_do() {
        explore(|| {
            let pool = pool(64);
            let held = pool.try_alloc(64).unwrap();
            let mut waiting = pin!(pool.alloc(64));
            assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let greedy = {
                let pool = pool.clone();
                thread::spawn(move || {
                    for attempt in [pool.try_alloc(64), pool.try_alloc_early(32)] {
                        assert!(matches!(attempt, Err(MemoryError::Exhausted { .. })), "{attempt:?}");
                    }
                })
            };
            let freeing = thread::spawn(move || drop(held));
            greedy.join().unwrap();
            freeing.join().unwrap();
            assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
        });
    }

    #[test]
    fn memory_taken_back_is_not_written_by_a_fabric_that_was_inside() {
        explore(|| {
            let pool = pool(128);
            let mut buffer = pool.try_alloc(64).unwrap();
            buffer.fill(0);
            let granted = buffer.grant();
            let place = granted.offset() as u64;
            let block = granted.block().unwrap().clone();
            let fabric = thread::spawn(move || {
                let Ok(target) = block.remote_target(place, 64) else { return };
                if let Ok(access) = target.access(0, 64) {
                    thread::yield_now();
                    // SAFETY: the access covers 64 bytes and lives.
                    unsafe { access.pointer().write_bytes(1, 64) };
                }
            });
            match granted.end(GrantEnd::Content) {
                Ok(mut memory) => {
                    let whole = memory.iter().all(|byte| *byte == memory[0]);
                    assert!(whole, "taken back in the middle of a write");
                    use_alone(&mut memory, 9);
                    fabric.join().unwrap();
                    assert!(memory.iter().all(|byte| *byte == 9));
                    assert_eq!(pool.stats().leaked_bytes, 0);
                }
                Err(MemoryError::GrantBusy { .. }) => {
                    use_alone(&mut pool.try_alloc(64).unwrap(), 9);
                    fabric.join().unwrap();
                    assert_eq!((pool.stats().leaked_bytes, pool.stats().used_bytes), (64, 64));
                }
                Err(error) => panic!("{error}"),
            }
        });
    }

    #[test]
    fn an_answer_and_the_end_of_a_grant_give_the_early_share_back_once() {
        explore(|| {
            let pool = pool(256);
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let pool = pool.clone();
                    thread::spawn(move || match pool.try_alloc_early(64) {
                        Ok(buffer) => {
                            let granted = buffer.grant();
                            assert!(pool.stats().early_bytes <= 128);
                            granted.answered();
                            let mut memory = granted.end(GrantEnd::Content).unwrap();
                            use_alone(&mut memory, 1);
                        }
                        Err(error) => assert!(matches!(error, MemoryError::EarlyExhausted { .. }), "{error}"),
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!((pool.stats().early_bytes, pool.stats().used_bytes), (0, 0));
        });
    }

    #[test]
    fn bytes_that_a_peer_found_stay_while_their_exposure_and_owner_go() {
        explore(|| {
            let pool = pool(64);
            let mut buffer = pool.try_alloc(64).unwrap();
            buffer.fill(5);
            let buffer: Buf = buffer.freeze();
            let exposure = buffer.expose();
            let (block, offset) = (buffer.block().unwrap().clone(), buffer.offset() as u64);
            let reading = thread::spawn(move || {
                let Ok(found) = block.exposed(offset, 64) else { return };
                thread::yield_now();
                assert!(found.iter().all(|byte| *byte == 5), "given out again while a peer reads");
            });
            let owning = thread::spawn(move || {
                drop(buffer);
                drop(exposure);
            });
            let using = {
                let pool = pool.clone();
                thread::spawn(move || use_alone(&mut block_on(pool.alloc(64)).unwrap(), 6))
            };
            [reading, owning, using].into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(pool.stats().used_bytes, 0);
        });
    }

    #[test]
    fn retired_bytes_come_back_once_whoever_releases_last() {
        explore(|| {
            let pool = pool(64);
            let buffer = pool.try_alloc(64).unwrap().freeze();
            let leases = [buffer.clone().retire(), buffer.clone().retire()];
            let threads = leases.map(|lease| thread::spawn(move || lease.release()));
            drop(buffer);
            use_alone(&mut block_on(pool.alloc(64)).unwrap(), 3);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let stats = pool.stats();
            assert_eq!((stats.retired_bytes, stats.leaked_bytes, stats.used_bytes), (0, 0, 0));
        });
    }

    #[test]
    fn a_ring_that_ends_while_it_is_written_and_read_leaks_or_is_quiet() {
        explore(|| {
            let pool = pool(64);
            let granted = pool.try_alloc(64).unwrap().grant();
            let target = granted.block().unwrap().remote_target(granted.offset() as u64, 64).unwrap();
            let writers: Vec<_> = (1..3)
                .map(|mark| {
                    let target = target.clone();
                    thread::spawn(move || target.write_at(0, &[mark; 64], CopyReason::SimPiece).is_ok())
                })
                .collect();
            let ended = granted.end(GrantEnd::QueuePairDrained);
            for writer in writers {
                let _landed: bool = writer.join().unwrap();
            }
            assert!(target.access(0, 0).is_err(), "reached after the end");
            assert_eq!(pool.stats().leaked_bytes, if ended.is_ok() { 0 } else { 64 });
        });
    }
}
