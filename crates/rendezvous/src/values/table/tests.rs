//! Tests of the queues of a step: order, cancellation and duplicates.

use futures::FutureExt;
use tensorwire_memory::{Pool, PoolConfig};
use tensorwire_protocol::StepId;

use super::*;
use crate::values::steps::tests::table;

const STEP: StepId = StepId(7);

fn tensor(value: u32) -> Tensor {
    let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("test") }).unwrap();
    Tensor::from_values(&pool, &[], &[value]).unwrap()
}

fn number(taken: &TakenValue) -> u32 {
    taken.value.tensor.values::<u32>().unwrap()[0]
}

fn take_now(step: &Arc<StepQueues>, key: &str) -> Option<Result<u32, Status>> {
    step.take(key).now_or_never().map(|taken| taken.map(|value| number(&value)))
}

#[test]
fn s2_9_02_send_then_receive() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    table.send(&step, "foo", SendArgs::default(), tensor(1)).unwrap();
    assert_eq!(take_now(&step, "foo"), Some(Ok(1)));
    assert_eq!(take_now(&step, "foo"), None);
}

#[test]
fn values_and_receivers_of_one_key_are_first_in_first_out() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let (first, second) = (step.take("k"), step.take("k"));
    for value in 1..=3 {
        table.send(&step, "k", SendArgs::default(), tensor(value)).unwrap();
    }
    assert_eq!(number(&second.now_or_never().unwrap().unwrap()), 2);
    assert_eq!(number(&first.now_or_never().unwrap().unwrap()), 1);
    assert_eq!(take_now(&step, "k"), Some(Ok(3)));
}

#[test]
fn s2_9_08_dropped_receivers_are_passed_over() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let [one, two, three, four] = std::array::from_fn(|_| step.take("k"));
    drop((two, four));
    table.send(&step, "k", SendArgs::default(), tensor(1)).unwrap();
    table.send(&step, "k", SendArgs::default(), tensor(2)).unwrap();
    assert_eq!(number(&one.now_or_never().unwrap().unwrap()), 1);
    assert_eq!(number(&three.now_or_never().unwrap().unwrap()), 2);
}

#[test]
fn receivers_are_served_in_the_order_they_came_also_in_places_of_those_that_left() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let token = CancellationToken::new();
    let [one, two, three, four] = std::array::from_fn(|_| step.take("k"));
    let (cancelled, six) = (step.take_unless("k", Some(&token)), step.take("k"));
    // The first receiver in the line, one in its middle, and later its last. New receivers reuse their entries, the
    // last freed first.
    drop(two);
    drop(one);
    let [seven, eight, nine] = std::array::from_fn(|_| step.take("k"));
    token.cancel();
    drop(cancelled);
    drop(nine);
    let ten = step.take("k");
    let left = [three, four, six, seven, eight, ten];
    for value in 0..left.len() as u32 {
        table.send(&step, "k", SendArgs::default(), tensor(value)).unwrap();
    }
    let got = left.map(|receiver| number(&receiver.now_or_never().unwrap().unwrap()));
    assert_eq!(got, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_value_given_to_a_dropped_receiver_goes_back_to_its_place() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let receiver = step.take("k");
    table.send(&step, "k", SendArgs::default(), tensor(1)).unwrap();
    table.send(&step, "k", SendArgs::default(), tensor(2)).unwrap();
    drop(receiver);
    assert_eq!(take_now(&step, "k"), Some(Ok(1)));
    assert_eq!(take_now(&step, "k"), Some(Ok(2)));
}

#[test]
fn a_value_put_back_after_its_queue_was_emptied_keeps_its_place() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    table.send(&step, "k", SendArgs::default(), tensor(1)).unwrap();
    let taken = step.take("k").now_or_never().unwrap().unwrap();
    table.send(&step, "k", SendArgs::default(), tensor(2)).unwrap();
    taken.put_back();
    assert_eq!(take_now(&step, "k"), Some(Ok(1)));
    assert_eq!(take_now(&step, "k"), Some(Ok(2)));
}

#[test]
fn a_key_has_its_own_values_where_the_queue_of_another_was() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let send = |key, value| table.send(&step, key, SendArgs::default(), tensor(value)).unwrap();
    send("first", 1);
    send("second", 2);
    let taken = step.take("first").now_or_never().unwrap().unwrap();
    let receiver = step.take("third");
    taken.put_back();
    send("third", 3);
    assert_eq!(number(&receiver.now_or_never().unwrap().unwrap()), 3);
    for (key, value) in [("first", 1), ("second", 2)] {
        assert_eq!(take_now(&step, key), Some(Ok(value)));
        assert_eq!(take_now(&step, key), None);
    }
}

#[test]
fn s2_9_13_after_an_abort_sends_and_receives_get_the_first_status() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let pending = step.take("k");
    step.abort(&Status::new(Code::Aborted, "first"));
    step.abort(&Status::new(Code::Cancelled, "second"));
    let refused = table.send(&step, "k", SendArgs::default(), tensor(1)).unwrap_err();
    assert!(matches!(refused, SendRefused::Aborted(status) if status.message == "first"));
    assert_eq!(pending.now_or_never().unwrap().unwrap_err().message, "first");
    assert_eq!(take_now(&step, "k").unwrap().unwrap_err().message, "first");
}

#[test]
fn a_finished_step_answers_late_requests() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let pending = step.take("k");
    table.cleanup(STEP);
    assert_eq!(pending.now_or_never().unwrap().unwrap_err().message, "Cleanup 7");
    assert_eq!(table.begin(STEP).unwrap_err().code, Code::Aborted);
}

#[test]
fn the_cap_counts_values_that_nobody_has_received() {
    let table = table(2);
    let step = table.begin(STEP).unwrap();
    for value in 0..2 {
        table.send(&step, "k", SendArgs::default(), tensor(value)).unwrap();
    }
    let refused = table.send(&step, "k", SendArgs::default(), tensor(2)).unwrap_err();
    assert!(matches!(refused, SendRefused::Full { waiting: 2, cap: 2 }));
    assert_eq!(take_now(&step, "k"), Some(Ok(0)));
    table.send(&step, "k", SendArgs::default(), tensor(3)).unwrap();
    table.cleanup(STEP);
    let other = table.begin(StepId(8)).unwrap();
    table.send(&other, "k", SendArgs::default(), tensor(4)).unwrap();
}
