//! The in-memory control plane: frames arrive in order, their number is bounded, and sessions end in every way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::control::{ControlError, ControlPlane, ControlSession};
use tensorwire_sim::{Fault, Handle, Node, SimControl, World};

struct Ends {
    nodes: [Node; 2],
    planes: [Arc<SimControl>; 2],
    left: ControlSession,
    right: ControlSession,
}

async fn connected(handle: &Handle) -> Ends {
    let nodes = ["left:1", "right:1"].map(|address| handle.start_node(address).unwrap());
    let planes = [nodes[0].control_plane(), nodes[1].control_plane()];
    let (left, right) = join(planes[0].dial("right:1"), planes[1].accept()).await;
    Ends { left: left.unwrap(), right: right.unwrap(), nodes, planes }
}

/// Runs `scenario` under several seeds.
fn on_seeds<F: Future<Output = ()>>(scenario: impl Fn(Handle) -> F) {
    for seed in 0..20 {
        let world = World::new(seed);
        world.run(scenario(world.handle())).unwrap();
        world.finish().unwrap();
    }
}

#[test]
fn frames_come_whole_and_in_order_both_ways() {
    on_seeds(|handle| async move {
        let Ends { mut left, mut right, .. } = connected(&handle).await;
        let frame = |number: u8| vec![number; number as usize];
        let there = async {
            for number in 0..50 {
                left.sender.send(frame(number)).await.unwrap();
            }
        };
        let back = async {
            for number in 0..50 {
                assert_eq!(right.receiver.recv().await.unwrap(), Some(frame(number)));
                right.sender.send(frame(number + 100)).await.unwrap();
            }
        };
        let echoes = async {
            for number in 0..50 {
                assert_eq!(left.receiver.recv().await.unwrap(), Some(frame(number + 100)));
            }
        };
        join(join(there, back), echoes).await;
    });
}

#[test]
fn a_sender_waits_for_a_slow_peer() {
    on_seeds(|handle| async move {
        let Ends { left, mut right, nodes, .. } = connected(&handle).await;
        let sent = Arc::new(AtomicUsize::new(0));
        let (sender, counter) = (left.sender.clone(), sent.clone());
        nodes[0].spawn("sender", async move {
            for _ in 0..100 {
                sender.send(vec![1]).await.unwrap();
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        handle.runtime().sleep(Duration::from_millis(500)).await;
        assert!(sent.load(Ordering::Relaxed) < 20, "buffering is bounded");
        for _ in 0..100 {
            assert_eq!(right.receiver.recv().await.unwrap(), Some(vec![1]));
        }
        drop(left);
    });
}

#[test]
fn dropping_both_halves_ends_a_session_after_its_last_frame() {
    on_seeds(|handle| async move {
        let Ends { left, mut right, .. } = connected(&handle).await;
        let ControlSession { sender, receiver, .. } = left;
        sender.send(b"last".to_vec()).await.unwrap();
        drop(receiver);
        sender.send(b"very last".to_vec()).await.unwrap();
        drop(sender);
        assert_eq!(right.receiver.recv().await.unwrap(), Some(b"last".to_vec()));
        assert_eq!(right.receiver.recv().await.unwrap(), Some(b"very last".to_vec()));
        assert_eq!(right.receiver.recv().await.unwrap(), None);
        assert!(matches!(right.sender.send(vec![1]).await, Err(ControlError::Lost { .. })));
    });
}

#[test]
fn a_crash_loses_the_session_of_the_peer_but_no_delivered_frame() {
    on_seeds(|handle| async move {
        let Ends { left, mut right, nodes, .. } = connected(&handle).await;
        left.sender.send(b"first".to_vec()).await.unwrap();
        assert_eq!(right.receiver.recv().await.unwrap(), Some(b"first".to_vec()));
        left.sender.send(b"perhaps".to_vec()).await.unwrap();
        nodes[0].crash();
        let mut frames = 0;
        let end = loop {
            match right.receiver.recv().await {
                Ok(Some(frame)) => {
                    assert_eq!(frame, b"perhaps");
                    frames += 1;
                }
                end => break end,
            }
        };
        assert!(frames <= 1 && matches!(end, Err(ControlError::Lost { .. })), "{frames} {end:?}");
        assert!(matches!(right.sender.send(vec![1]).await, Err(ControlError::Lost { .. })));
    });
}

#[test]
fn a_lost_control_link_ends_both_ends_and_a_new_session_can_be_dialled() {
    on_seeds(|handle| async move {
        let Ends { mut left, mut right, nodes, planes } = connected(&handle).await;
        handle.inject(Fault::LoseControl(nodes[0].id(), nodes[1].id()));
        let ends = join(left.receiver.recv(), right.receiver.recv()).await;
        assert!(matches!(ends, (Err(ControlError::Lost { .. }), Err(ControlError::Lost { .. }))));
        let (again, accepted) = join(planes[0].dial("right:1"), planes[1].accept()).await;
        again.unwrap().sender.send(vec![7]).await.unwrap();
        assert_eq!(accepted.unwrap().receiver.recv().await.unwrap(), Some(vec![7]));
    });
}

#[test]
fn closing_a_plane_ends_its_sessions_and_refuses_new_ones() {
    on_seeds(|handle| async move {
        let Ends { mut left, mut right, planes, .. } = connected(&handle).await;
        let waiting = async { planes[1].accept().await };
        let close = async {
            handle.runtime().sleep(Duration::from_millis(1)).await;
            planes[1].close().await;
        };
        let (refused, ()) = join(waiting, close).await;
        assert!(matches!(refused, Err(ControlError::Closed)));
        assert!(matches!(right.sender.send(vec![1]).await, Err(ControlError::Closed)));
        assert!(matches!(right.receiver.recv().await, Err(ControlError::Closed)));
        assert!(matches!(left.receiver.recv().await, Ok(None)));
        assert!(matches!(planes[0].dial("right:1").await, Err(ControlError::Unreachable { .. })));
    });
}

#[test]
fn dialling_nobody_a_dead_node_or_nonsense_says_so() {
    on_seeds(|handle| async move {
        let Ends { planes, nodes, .. } = connected(&handle).await;
        assert!(matches!(planes[0].dial("nobody:1").await, Err(ControlError::Unreachable { .. })));
        for address in ["", "nobody", "nobody:", "nobody:port", "nobody:70000"] {
            let error = planes[0].dial(address).await.unwrap_err();
            assert!(matches!(error, ControlError::BadAddress { .. }), "{address}");
        }
        nodes[1].crash();
        assert!(matches!(planes[0].dial("right:1").await, Err(ControlError::Unreachable { .. })));
        // The next incarnation can be reached again.
        let plane = handle.start_node("right:1").unwrap().control_plane();
        let (dialled, accepted) = join(planes[0].dial("right:1"), plane.accept()).await;
        assert!(dialled.is_ok() && accepted.is_ok());
    });
}

#[test]
fn sessions_that_nobody_accepts_are_bounded() {
    on_seeds(|handle| async move {
        let Ends { planes, .. } = connected(&handle).await;
        let mut held = Vec::new();
        let refused = loop {
            match planes[0].dial("right:1").await {
                Ok(session) => held.push(session),
                Err(error) => break error,
            }
            assert!(held.len() < 100);
        };
        assert!(matches!(refused, ControlError::Unreachable { .. }), "{refused}");
        // Accepting makes room.
        let accepted = planes[1].accept().await.unwrap();
        planes[0].dial("right:1").await.unwrap();
        drop(accepted);
    });
}

#[test]
fn a_frame_over_the_limit_is_refused_and_the_session_lives() {
    on_seeds(|handle| async move {
        let Ends { left, mut right, .. } = connected(&handle).await;
        let limit = tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;
        assert!(left.sender.send(vec![0; limit + 1]).await.is_err());
        left.sender.send(vec![0; limit]).await.unwrap();
        assert_eq!(right.receiver.recv().await.unwrap().unwrap().len(), limit);
    });
}
