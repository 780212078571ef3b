use std::{collections::BTreeMap, task::Waker};

use proptest::prelude::*;

use super::{arrivals::ArrivedResult, *};
use crate::{Code, DataType, MetaDataResponse, Scope, Shape};

fn agreed(requests_max: u32) -> Agreed {
    let parameters = crate::Parameters { requests_max, ..crate::Parameters::default() };
    Agreed::of(&parameters, &parameters)
}

fn metadata(length: u64) -> Metadata {
    Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
}

fn status() -> Status {
    Status::new(Code::NotFound, "no")
}

fn request(index: RequestIndex, known: Option<u64>) -> TensorRequest {
    let known = known.map(metadata).into_iter().collect();
    TensorRequest {
        index,
        scope: Scope::Published,
        key: "a".into(),
        known,
        want: Want::Write(None),
        arguments: None,
    }
}

fn description(index: RequestIndex, length: u64) -> MetaDataResponse {
    let metadata = metadata(length);
    MetaDataResponse { index, metadata, content: None, loan_follows: false, checksum: None }
}

/// Gives the receive up.
fn release(requests: &mut Requests<u32>, index: RequestIndex) {
    requests.release(index, &mut After::new());
}

#[test]
fn s12_a_slot_goes_through_all_generations_and_starts_over() {
    let mut requests: Requests<u32> = Requests::new(agreed(2));
    let first = requests.open(None).unwrap();
    let other = requests.open(None).unwrap();
    assert_eq!(requests.open(None), None);
    let mut index = first;
    for _ in 0..(1 << 16) - 2 {
        release(&mut requests, index);
        let next = requests.open(None).unwrap();
        assert_eq!(next.slot(), index.slot());
        assert_eq!(next.generation(), index.generation() + 1);
        assert!(!next.is_reserved() && next != other);
        index = next;
    }
    release(&mut requests, index);
    assert_eq!(requests.open(None), Some(first));
}

#[test]
fn arrivals_for_an_earlier_generation_are_ignored() {
    let mut requests: Requests<u32> = Requests::new(agreed(1));
    let old = requests.open(None).unwrap();
    release(&mut requests, old);
    let new = requests.open(None).unwrap();
    assert_ne!(old, new);
    requests.asked(&request(new, None));
    assert!(requests.content(old, 0, 0).unwrap().is_ignored);
    assert!(requests.meta_data_response(description(old, 1)).unwrap().is_ignored);
    assert!(requests.error_status(old, status()).unwrap().is_ignored);
    assert!(requests.cancel_ack(old).unwrap().is_ignored);
    assert!(!requests.error_status(new, status()).unwrap().is_ignored);
}

#[test]
fn only_a_request_that_is_alone_after_others_that_were_may_help() {
    let mut requests: Requests<u32> = Requests::new(agreed(4));
    let first = requests.open(None).unwrap();
    assert!(requests.may_help(first));
    let second = requests.open(None).unwrap();
    assert!(!requests.may_help(first) && !requests.may_help(second));
    release(&mut requests, first);
    release(&mut requests, second);
    for may_help in [false, true, true] {
        let next = requests.open(None).unwrap();
        assert_eq!(requests.may_help(next), may_help, "others may follow the first, but none did");
        release(&mut requests, next);
    }
}

#[derive(Debug, Clone)]
enum Op {
    Open,
    Keep,
    Ask(Option<u64>),
    AskAgain,
    PollReply,
    TakeEnded,
    Content(u64),
    MetaDataResponse(u64),
    ErrorStatus,
    CancelAck,
    Release,
    NextReturn,
    PostCancel,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        Just(Op::Open),
        Just(Op::Keep),
        proptest::option::of(Just(8u64)).prop_map(Op::Ask),
        Just(Op::AskAgain),
        Just(Op::PollReply),
        Just(Op::TakeEnded),
        Just(Op::Content(8)),
        Just(Op::MetaDataResponse(8)),
        Just(Op::ErrorStatus),
        Just(Op::CancelAck),
        Just(Op::Release),
        Just(Op::NextReturn),
        Just(Op::PostCancel),
    ]
}

/// What the test knows of one request.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    is_awaited: bool,
    is_asked: bool,
    lent: Option<u32>,
    /// The peer knows of the memory and has not answered.
    is_exposed: bool,
}

#[derive(Default)]
struct Model {
    requests: BTreeMap<RequestIndex, Known>,
    /// Memory that is inside the table.
    inside: Vec<u32>,
    next_lent: u32,
}

impl Model {
    fn returned(&mut self, lent: u32) {
        let at = self.inside.iter().position(|&inside| inside == lent);
        self.inside.remove(at.expect("memory comes out once"));
        let known = self.requests.values_mut().find(|known| known.lent == Some(lent)).unwrap();
        assert!(!known.is_exposed, "memory came out while the peer could write it");
        known.lent = None;
    }

    /// The peer has answered `index`.
    fn answered(&mut self, index: RequestIndex, result: ArrivedResult<u32>) -> bool {
        let Ok(arrived) = result else { return false };
        if !arrived.is_ignored {
            self.requests.get_mut(&index).unwrap().is_exposed = false;
        }
        if let Some((lent, _)) = arrived.returned {
            self.returned(lent);
        }
        true
    }
}

/// Applies `op` to the request `index`; false when the peer would be refused.
fn apply(requests: &mut Requests<u32>, model: &mut Model, op: &Op, index: RequestIndex) -> bool {
    let known = model.requests.get(&index).copied().unwrap_or_default();
    match *op {
        Op::Open => {
            if let Some(index) = requests.open(None) {
                let before = model.requests.insert(index, Known { is_awaited: true, ..Known::default() });
                assert!(before.is_none(), "an index in use was given again");
            }
        }
        Op::Keep if known.is_awaited && known.lent.is_none() => {
            model.next_lent += 1;
            model.inside.push(model.next_lent);
            model.requests.get_mut(&index).unwrap().lent = Some(model.next_lent);
            requests.store_memory(index, model.next_lent);
        }
        Op::Ask(length) if known.is_awaited && !known.is_asked => {
            requests.asked(&request(index, length));
            let known = model.requests.get_mut(&index).unwrap();
            (known.is_asked, known.is_exposed) = (true, known.lent.is_some());
        }
        Op::AskAgain if known.is_awaited && requests.is_described(index) => {
            requests.asked_again(index);
            model.requests.get_mut(&index).unwrap().is_exposed = known.lent.is_some();
        }
        Op::PollReply if known.is_awaited => {
            let reply = requests.take_reply(index);
            let _ = requests.store_waker(index, Waker::noop());
            if let Some(Reply::Content(Landed { content: Content::Lent(lent), .. })) = reply {
                model.returned(lent);
            }
        }
        Op::TakeEnded if known.is_awaited => {
            if let Some((lent, _)) = requests.take_ended(index) {
                model.returned(lent);
            }
        }
        Op::Content(length) => return model.answered(index, requests.content(index, 0, length)),
        Op::MetaDataResponse(length) => {
            let result = requests.meta_data_response(description(index, length));
            return model.answered(index, result);
        }
        Op::ErrorStatus => return model.answered(index, requests.error_status(index, status())),
        Op::CancelAck => return model.answered(index, requests.cancel_ack(index)),
        Op::Release if known.is_awaited => {
            release(requests, index);
            model.requests.get_mut(&index).unwrap().is_awaited = false;
        }
        Op::NextReturn => {
            if let Some((lent, _)) = requests.next_return() {
                model.returned(lent);
            }
        }
        Op::PostCancel => {
            if let Some(index) = requests.next_cancel() {
                requests.cancel_posted(index);
            }
        }
        _ => {}
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn s1_memory_comes_out_once_and_never_while_the_peer_can_write_it(
        capacity in 1u32..4, ops in proptest::collection::vec((op(), 0usize..5), 0..80),
    ) {
        let mut requests = Requests::new(agreed(capacity));
        let mut model = Model::default();
        for (op, which) in &ops {
            let unknown = RequestIndex(0xFFFF_FFEF);
            let index = model.requests.keys().rev().nth(*which).copied().unwrap_or(unknown);
            if !apply(&mut requests, &mut model, op, index) {
                break;
            }
            prop_assert!(requests.len() <= capacity as usize);
        }
        // The connection ends: what is exposed comes out of drain, the rest by the release of its owner.
        let awaited: Vec<_> = model.requests.iter().filter(|(_, known)| known.is_awaited).collect();
        let awaited: Vec<_> = awaited.into_iter().map(|(&index, _)| index).collect();
        let mut out = requests.drain();
        awaited.into_iter().for_each(|index| release(&mut requests, index));
        out.extend(std::iter::from_fn(|| requests.next_return()).map(|(lent, _)| lent));
        out.sort_unstable();
        prop_assert_eq!(out, model.inside);
    }
}
