//! Long copies that two threads share.

use std::{os::fd::AsFd, sync::Arc, thread};

use tensorwire_fabric::PeerViolation;
use tensorwire_memory::{GrantEnd, RemoteTarget, copy::CopyReason};

use super::{Rig, sealed_block};
use crate::{
    helper::{HelpedCopy, Segment, Shared, SharedCopy},
    limits::HELP_BYTES,
    sys::Mapping,
};

const BYTES: usize = 3 * HELP_BYTES + 5;

/// A sealed block filled with 7.
pub(super) fn source(length: usize) -> Arc<Mapping> {
    Arc::new(Mapping::new(sealed_block(length).as_fd(), length, false).unwrap())
}

pub(super) fn target(rig: &Rig, length: usize) -> (tensorwire_memory::Granted, RemoteTarget) {
    let (granted, range, key) = rig.lend(length);
    let (target, _) = rig.regions.write_target(&range, key).unwrap();
    (granted, target)
}

/// Steps until the copy is complete; returns the bytes that the task itself copied.
fn finish(copy: &mut HelpedCopy) -> Result<usize, PeerViolation> {
    let mut own = 0;
    loop {
        match copy.step()? {
            Shared::Copied(bytes) => own += bytes,
            Shared::HelperIsAtIt => {}
            Shared::Done => return Ok(own),
        }
    }
}

fn begin(mapping: &Arc<Mapping>, target: &RemoteTarget) -> Option<(HelpedCopy, Arc<SharedCopy>)> {
    let segment = Segment::new(mapping.clone(), 0, target.clone())?;
    let copy = Arc::new(SharedCopy::new(vec![segment], (CopyReason::ShmPayload, true))?);
    Some((HelpedCopy::of(copy.clone()), copy))
}

#[tokio::test]
async fn a_copy_of_two_threads_is_whole() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    for _ in 0..20 {
        let (granted, target) = target(&rig, BYTES);
        let (mut copy, shared) = begin(&mapping, &target).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| shared.help());
            finish(&mut copy).unwrap();
        });
        drop(copy);
        assert!(granted.end(GrantEnd::Content).unwrap().iter().all(|&byte| byte == 7));
    }
}

#[tokio::test]
async fn either_thread_can_copy_everything() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    for helper_comes in [false, true] {
        let (granted, target) = target(&rig, BYTES);
        let (mut copy, shared) = begin(&mapping, &target).unwrap();
        if helper_comes {
            shared.help();
        }
        assert_eq!(finish(&mut copy).unwrap(), if helper_comes { 0 } else { BYTES });
        shared.help();
        drop(copy);
        assert!(granted.end(GrantEnd::Content).unwrap().iter().all(|&byte| byte == 7));
    }
}

#[tokio::test]
async fn a_copy_that_is_given_up_leaves_the_memory() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    for steps in 0..40 {
        let (granted, target) = target(&rig, BYTES);
        let (mut copy, shared) = begin(&mapping, &target).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| shared.help());
            for _ in 0..steps % 8 {
                copy.step().unwrap();
            }
            drop(copy);
            // Not GrantBusy: the helper has left the grant, although its thread may still run.
            let mut taken = granted.end(GrantEnd::QueuePairDrained).unwrap();
            taken.fill(9);
            shared.help();
            assert!(taken.iter().all(|&byte| byte == 9));
        });
    }
    assert_eq!(rig.pool.stats().leaked_bytes, 0);
}

#[tokio::test]
async fn a_grant_that_ends_refuses_both_threads() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    for helper_comes in [false, true] {
        let (granted, target) = target(&rig, BYTES);
        let (mut copy, shared) = begin(&mapping, &target).unwrap();
        drop(granted.end(GrantEnd::Content).unwrap());
        if helper_comes {
            shared.help();
        }
        assert_eq!(finish(&mut copy).unwrap_err(), PeerViolation::NotGranted);
    }
}

#[tokio::test]
async fn a_payload_past_its_block_is_not_shared() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    let (_granted, target) = target(&rig, BYTES);
    for offset in [1, BYTES, usize::MAX] {
        assert!(Segment::new(mapping.clone(), offset, target.clone()).is_none(), "at {offset}");
    }
}

#[tokio::test]
async fn short_copies_are_made_alone() {
    let (rig, mapping) = (Rig::new(), source(BYTES));
    let (_granted, target) = target(&rig, HELP_BYTES - 1);
    let segment = Segment::new(mapping, 0, target).unwrap();
    assert!(HelpedCopy::begin(vec![segment], (CopyReason::ShmPayload, false)).is_none());
}
