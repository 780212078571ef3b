use std::{collections::BTreeSet, task::Waker};

use proptest::prelude::*;

use super::*;
use crate::{Parameters, Scope};

const CAPACITY: u32 = 3;
const MOST: usize = CAPACITY as usize + OWED_SLACK;

#[derive(Debug, Clone)]
enum Op {
    Open,
    Described,
    ReRequest,
    Cancel,
    StartWriting,
    Close(bool),
    PostOwed,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Open),
        1 => Just(Op::Described),
        1 => Just(Op::ReRequest),
        1 => Just(Op::Cancel),
        1 => Just(Op::StartWriting),
        1 => any::<bool>().prop_map(Op::Close),
        1 => Just(Op::PostOwed),
    ]
}

fn responses() -> Responses {
    let parameters = Parameters { requests_max: CAPACITY, ..Parameters::default() };
    Responses::new(Agreed::of(&parameters, &parameters))
}

fn request(index: u32) -> TensorRequest {
    let (key, known) = ("a".into(), Default::default());
    TensorRequest {
        index: RequestIndex(index),
        scope: Scope::Published,
        key,
        known,
        want: Want::Eager,
        arguments: None,
    }
}

fn destination() -> Option<Destination> {
    Some(Destination { region: 0, generation: 0, offset: 0, capacity: 8, result: None })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// An honest peer counts a request as outstanding until it is answered, and a cancel until it is
    /// acknowledged. With at most as many as agreed it is never refused, whatever happens here.
    #[test]
    fn s4_what_is_owed_is_what_an_honest_peer_waits_for(
        ops in proptest::collection::vec((op(), 0usize..4), 0..120),
    ) {
        let mut responses = responses();
        let mut next = 0;
        // Requests the peer waits for, by index; whether it has cancelled them.
        let mut outstanding: BTreeSet<(u32, bool)> = BTreeSet::new();
        let mut open: Vec<u32> = Vec::new();
        let mut writing: BTreeSet<u32> = BTreeSet::new();
        for (op, which) in ops {
            let chosen = open.get(which).copied();
            match (op, chosen) {
                (Op::Open, _) if outstanding.len() < CAPACITY as usize => {
                    prop_assert_eq!(responses.open(&request(next)), Ok(()));
                    outstanding.insert((next, false));
                    open.push(next);
                    next += 1;
                }
                (Op::Described, Some(index)) if !writing.contains(&index) => {
                    responses.described(RequestIndex(index), 8);
                }
                (Op::ReRequest, Some(index)) => {
                    // Legal or not: no panic, no change of what is owed.
                    let _ = responses.re_request(RequestIndex(index), destination());
                }
                (Op::Cancel, _) => {
                    let uncancelled = outstanding.iter().copied().filter(|&(_, cancelled)| !cancelled);
                    let Some((index, _)) = uncancelled.clone().nth(which % uncancelled.count().max(1)) else {
                        continue;
                    };
                    prop_assert!(responses.cancel(RequestIndex(index)).is_ok());
                    outstanding.remove(&(index, false));
                    outstanding.insert((index, true));
                }
                (Op::StartWriting, Some(index)) if !writing.contains(&index) => {
                    let may_write = responses.start_writing(RequestIndex(index));
                    prop_assert_eq!(may_write, outstanding.contains(&(index, false)));
                    if may_write {
                        writing.insert(index);
                        outstanding.remove(&(index, false));
                    }
                }
                (Op::Close(is_answered), Some(index)) => {
                    responses.close(RequestIndex(index), is_answered);
                    open.retain(|&other| other != index);
                    if is_answered {
                        outstanding.remove(&(index, false));
                    }
                }
                (Op::PostOwed, _) => match responses.next_owed() {
                    Some(Message::CancelAck(RequestIndex(index))) => {
                        prop_assert!(outstanding.remove(&(index, true)));
                        responses.owed_posted();
                    }
                    Some(Message::ErrorStatus(ErrorStatus { index: RequestIndex(index), .. })) => {
                        // A cancel that has come meanwhile is answered on its own.
                        outstanding.remove(&(index, false));
                        responses.owed_posted();
                    }
                    other => prop_assert!(other.is_none(), "{:?}", other),
                },
                _ => {}
            }
            let (entries, owed) = responses.len();
            let unanswered = responses.entries.values().filter(|entry| entry.is_unanswered()).count();
            prop_assert_eq!(responses.unanswered, unanswered + owed);
            prop_assert!(responses.unanswered <= MOST && entries <= open.len());
        }
    }
}

#[test]
fn a_late_cancel_of_a_content_being_written_is_acknowledged_after_it() {
    let mut responses = responses();
    let index = RequestIndex(9);
    responses.open(&request(index.0)).unwrap();
    assert!(responses.start_writing(index));
    responses.cancel(index).unwrap();
    assert!(!responses.has_owed());
    responses.close(index, true);
    assert_eq!(responses.next_owed(), Some(Message::CancelAck(index)));
}

#[test]
fn watching_tells_what_has_happened() {
    let mut responses = responses();
    let index = RequestIndex(9);
    responses.open(&request(index.0)).unwrap();
    assert_eq!(responses.watch(index, Waker::noop()).0, ResponseState::Open);
    responses.described(index, 8);
    assert!(responses.re_request(index, destination()).unwrap().is_some());
    assert_eq!(responses.watch(index, Waker::noop()).0, ResponseState::ReRequested(destination()));
    responses.cancel(index).unwrap();
    assert_eq!(responses.watch(index, Waker::noop()).0, ResponseState::Cancelled);
    assert_eq!(responses.watch(RequestIndex(1), Waker::noop()).0, ResponseState::Open);
}
