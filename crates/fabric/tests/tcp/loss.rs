//! Streams that end, stop or stall.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::{
    FabricError, Immediate, LossCause, RegionGeneration, RegionId, RemoteRange, RemoteRegion, Runtime,
    TokioRuntime,
};
use tensorwire_memory::{
    GrantEnd,
    copy::{CopyReason, count},
};

use super::raw::{Frame, Local, RawPeer, aside};
use crate::contract::{
    Flavour, Setup, bounded,
    pair::{Pair, end_of, immediate, pattern, step, yield_once},
};

const MIB: usize = 1 << 20;

fn cause(error: &FabricError) -> LossCause {
    match error {
        FabricError::PeerLost { cause, .. } => *cause,
        other => panic!("unexpected: {other}"),
    }
}

/// A region that only the raw peer claims to have.
fn claimed(length: u64) -> (RemoteRegion, RemoteRange) {
    let (region, generation) = (RegionId(3), RegionGeneration(4));
    (
        RemoteRegion { region, generation, base: 0, length, key: 5 },
        RemoteRange { region, generation, offset: 0, length },
    )
}

#[test]
fn an_end_of_file_is_a_loss_wherever_it_comes() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let grant = local.receive.grant(100);
        let bytes = [
            Frame::notify(1).encode(),
            Frame::write(&grant, 100).with_immediate(2).with_body(&pattern(100, 1)),
        ]
        .concat();
        for cut in [0, 1, 39, 40, 41, 79, 80, 81, 179, 180] {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&bytes[..cut]);
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            // Writes that had arrived completely are still reported.
            for expected in [(1, 0, 40), (2, 100, 180)] {
                if cut >= expected.2 {
                    let arrival = local.step("an arrival", queue_pair.next_arrival()).await.unwrap();
                    assert_eq!(immediate(arrival), (expected.0, expected.1));
                }
            }
            let error = end_of(&local.runtime, &queue_pair).await;
            assert_eq!(cause(&error), LossCause::EndOfFile, "cut at {cut}");
            let error = queue_pair.notify(Immediate(1)).await.unwrap_err();
            assert_eq!(cause(&error), LossCause::EndOfFile);
        }
        assert_eq!(grant.take()[..], pattern(100, 1)[..]);
    });
}

#[test]
fn a_reset_is_a_loss() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, raw) = local.connect().await;
        local.step("a notification", queue_pair.notify(Immediate(1))).await.unwrap();
        // Because of unread bytes the kernel answers the close with a reset.
        raw.stream.peek(&mut [0; 40]).unwrap();
        drop(raw);
        assert_eq!(cause(&end_of(&local.runtime, &queue_pair).await), LossCause::Reset);
    });
}

#[test]
fn a_reset_ends_every_operation_under_way() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, raw) = local.connect().await;
        let (region, range) = claimed(16 << 20);
        queue_pair.add_remote_region(region);
        let source = local.source.filled(16 * MIB, 1);
        let writes: Vec<_> = (0..8).map(|_| queue_pair.write(source.clone(), range)).collect();
        drop(source);
        raw.stream.peek(&mut [0; 40]).unwrap();
        drop(raw);
        for write in writes {
            let error = local.step("a write", write).await.unwrap_err();
            assert_eq!(cause(&error), LossCause::Reset);
        }
        assert_eq!(local.source.pool.stats().used_bytes, 0);
    });
}

#[test]
fn words_sent_before_a_reset_are_heard() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        local.step("a notification", queue_pair.notify(Immediate(1))).await.unwrap();
        let grant = local.receive.grant(100);
        raw.say(&Frame::write(&grant, 100).with_immediate(2).with_body(&pattern(100, 1)));
        raw.stream.peek(&mut [0; 40]).unwrap();
        drop(raw);
        let arrival = local.step("an arrival", queue_pair.next_arrival()).await.unwrap();
        assert_eq!(immediate(arrival), (2, 100));
        assert_eq!(grant.take()[..], pattern(100, 1)[..]);
        assert_eq!(cause(&end_of(&local.runtime, &queue_pair).await), LossCause::Reset);
    });
}

/// Reads frames and bodies until `frames` of them have come.
fn read_frames(raw: &mut RawPeer, frames: usize) -> Vec<(Frame, Vec<u8>)> {
    let mut read = Vec::new();
    while read.len() < frames {
        let frame = raw.hear_frame();
        let body = raw.hear(frame.length as usize);
        read.push((frame, body));
    }
    read
}

#[test]
fn a_dropped_future_never_leaves_half_a_frame() {
    for flavour in [Flavour::CurrentThread, Flavour::TwoWorkers] {
        bounded(flavour, |runtime| async move {
            let local = Local::new(runtime);
            let (queue_pair, mut raw) = local.connect().await;
            let (region, range) = claimed(16 << 20);
            queue_pair.add_remote_region(region);
            // Far more than the sockets hold, so the drop comes in the middle.
            let write = queue_pair.write_imm(local.source.filled(16 * MIB, 8), range, Immediate(9));
            yield_once().await;
            drop(write);
            drop(queue_pair.notify(Immediate(10)));
            let frames = aside(&local.runtime, move || read_frames(&mut raw, 17)).await;
            let whole = pattern(16 * MIB, 8);
            for (index, (frame, body)) in frames[..16].iter().enumerate() {
                let expected = Frame {
                    kind: if index == 15 { 2 } else { 1 },
                    region: 3,
                    generation: 4,
                    key: 5,
                    immediate: if index == 15 { 9 } else { 0 },
                    length: MIB as u32,
                    offset: (index * MIB) as u64,
                    rest: ((16 - index) * MIB) as u64,
                    reason: 0,
                };
                assert_eq!(*frame, expected);
                assert!(body[..] == whole[index * MIB..][..MIB], "frame {index}");
            }
            assert_eq!(frames[16], (Frame::notify(10), vec![]));
            assert_eq!(local.source.pool.stats().used_bytes, 0);
        });
    }
}

#[test]
fn a_goodbye_follows_the_frame_under_way() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        let (region, range) = claimed(64 << 20);
        queue_pair.add_remote_region(region);
        let write = queue_pair.write_imm(local.source.filled(64 * MIB, 8), range, Immediate(9));
        // The middle of the write: the sockets hold a few MiB.
        let (first, mut raw) = aside(&local.runtime, move || (read_frames(&mut raw, 1), raw)).await;
        assert_eq!(first[0].0.rest, 64 << 20);
        let rest = aside(&local.runtime, move || {
            let mut frames = 1;
            loop {
                let frame = raw.hear_frame();
                if frame.kind == 3 {
                    return (frame, frames, raw.hear_end());
                }
                raw.hear(frame.length as usize);
                frames += 1;
            }
        });
        let (close, (goodbye, frames, after)) =
            local.step("the close", futures::future::join(queue_pair.close(), rest)).await;
        let () = close;
        assert_eq!(goodbye, Frame { kind: 3, ..Frame::default() });
        assert!(frames < 64, "the whole write went out");
        assert!(after.is_empty());
        let error = local.step("the write", write).await.unwrap_err();
        assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
        assert_eq!(local.source.pool.stats().used_bytes, 0);
    });
}

#[test]
fn closing_on_a_peer_that_reads_nothing_ends_in_bounded_time() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime.clone());
        let (queue_pair, raw) = local.connect().await;
        let (region, range) = claimed(64 << 20);
        queue_pair.add_remote_region(region);
        let write = queue_pair.write(local.source.filled(64 * MIB, 8), range);
        raw.stream.peek(&mut [0; 40]).unwrap();
        let before = runtime.now();
        local.step("the close", queue_pair.close()).await;
        assert!(runtime.now() - before < Duration::from_secs(5));
        let error = local.step("the write", write).await.unwrap_err();
        assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
        assert_eq!(local.source.pool.stats().used_bytes, 0);
        drop(raw);
    });
}

#[test]
fn nothing_lands_after_close_though_the_peer_goes_on_sending() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let (queue_pair, mut raw) = local.connect().await;
        let grant = local.receive.grant(MIB);
        let bytes = Frame::write(&grant, MIB as u32).with_body(&vec![1; MIB]);
        raw.say(&bytes[..1000]);
        while queue_pair.stats().bytes_received == 0 {
            yield_once().await;
        }
        local.step("the close", queue_pair.close()).await;
        let mut memory = grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
        memory.fill(0xAA);
        let goodbye = aside(&local.runtime, move || {
            raw.say(&bytes[1000..]);
            let goodbye = raw.hear_frame();
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(raw.hear_end().is_empty());
            goodbye
        })
        .await;
        assert_eq!(goodbye.kind, 3);
        assert!(memory.iter().all(|&byte| byte == 0xAA), "written after the close");
    });
}

#[test]
fn a_peer_that_stalls_in_a_frame_blocks_nobody_else() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let local = Local::new(runtime);
        let (stalled, mut staller) = local.connect().await;
        let grant = local.receive.grant(1000);
        staller.say(&Frame::write(&grant, 1000).with_body(&[1; 10]));
        let (region, range) = claimed(64 << 20);
        stalled.add_remote_region(region);
        let write = stalled.write(local.source.filled(64 * MIB, 8), range);
        for value in 0..50 {
            let (queue_pair, mut raw) = local.connect().await;
            raw.say(&Frame::notify(value).encode());
            let arrival = local.step("an arrival", queue_pair.next_arrival()).await.unwrap();
            assert_eq!(immediate(arrival), (value, 0));
        }
        assert!(stalled.failure().is_none());
        drop(staller);
        local.step("the write", write).await.unwrap_err();
    });
}

#[test]
fn payload_is_copied_nowhere_in_user_space() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        // The tests themselves copy with the reason `Local` to read memory.
        let reasons = [
            CopyReason::Import,
            CopyReason::ShmPayload,
            CopyReason::ShmMessage,
            CopyReason::SimPiece,
            CopyReason::Message,
        ];
        let before = reasons.map(count);
        let setup = Setup { fabric: crate::tcp::fabric, peer_address: Some(crate::tcp::CONTROL) };
        let pair = Arc::new(Pair::new(setup, runtime).await);
        for length in [1, 8, 4096, 3 * MIB + 1, 16 * MIB] {
            let grant = pair.grant_right(length);
            let address = grant.address;
            let source = pair.left.source.filled(length, 6);
            let write = pair.to_right.write_imm(source, grant.range, Immediate(1));
            assert_eq!(pair.arrival_at_right().await, (1, length as u64));
            pair.step("the write", write).await.unwrap();
            let landed = grant.take();
            assert_eq!(landed.as_ptr() as usize, address, "not where it was granted");
            assert!(landed[..] == pattern(length, 6)[..]);
        }
        assert_eq!(reasons.map(count), before);
    });
}

#[test]
fn a_runtime_that_shuts_down_ends_its_connections() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let other = other.unwrap();
        let doomed: Arc<dyn Runtime> = {
            let _inside = other.enter();
            Arc::new(TokioRuntime::current().unwrap())
        };
        let local = Local::new(doomed);
        let (other, local, queue_pair, raw) = aside(&runtime, move || {
            let (queue_pair, raw) = other.block_on(local.connect());
            (other, local, queue_pair, raw)
        })
        .await;
        let (region, range) = claimed(64 << 20);
        queue_pair.add_remote_region(region);
        let write = queue_pair.write(local.source.filled(64 * MIB, 8), range);
        other.shutdown_background();
        let error = step(&runtime, "the write", write).await.unwrap_err();
        assert_eq!(cause(&error), LossCause::DeviceLost);
        assert_eq!(cause(&end_of(&runtime, &queue_pair).await), LossCause::DeviceLost);
        step(&runtime, "the close", queue_pair.close()).await;
        assert_eq!(local.source.pool.stats().used_bytes, 0);
        drop(raw);
    });
}
