//! Tests of the table of steps: their beginning, end, deferred requests and memory of ended steps.

#[path = "../../../../fabric-tcp/src/clock.rs"]
mod clock;

use futures::FutureExt;

use super::*;

pub(crate) use clock::Clock;

const PEER: &str = "/job:worker/replica:0/task:0";
const OTHER: &str = "/job:worker/replica:0/task:1";
const STEP: StepId = StepId(7);

fn settings(values_max: usize) -> StepSettings {
    let duplicates = DuplicatePolicy::Queue;
    StepSettings { values_max, duplicates, deferred_steps_max: 2, init_timeout: Duration::from_secs(60) }
}

/// A table for at most `cap` values.
pub(crate) fn table(cap: usize) -> StepTable {
    with_clock(cap).0
}

fn with_clock(cap: usize) -> (StepTable, Clock) {
    let clock = Clock::default();
    (StepTable::new("/job:ps/replica:0/task:0", settings(cap), Arc::new(clock.clone())), clock)
}

fn tensor(value: u32) -> Tensor {
    let pool = tensorwire_memory::Pool::new(tensorwire_memory::PoolConfig {
        block_bytes: 4096,
        ..tensorwire_memory::PoolConfig::new("test")
    });
    Tensor::from_values(&pool.unwrap(), &[], &[value]).unwrap()
}

fn send(table: &StepTable, step: &StepRef, tensor: Tensor) -> Result<(), SendRefused> {
    table.send(step, "k", SendArgs::default(), tensor)
}

fn number(taken: Result<(TakenValue, StepRef), Status>) -> u32 {
    taken.unwrap().0.value.tensor.values::<u32>().unwrap()[0]
}

fn known(table: &StepTable) -> usize {
    table.shared.steps.len()
}

fn refusal(table: &StepTable, step: StepId, peer: &str) -> Status {
    table.ask(step, peer).unwrap_err()
}

#[test]
fn a_step_without_users_and_values_is_forgotten() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let again = step.clone();
    drop(step);
    assert_eq!(table.live(), [STEP]);
    send(&table, &again, tensor(1)).unwrap();
    drop(again);
    assert_eq!(table.live(), [STEP], "it holds a value");
    let taken = table.ask(STEP, PEER).unwrap().take("k").now_or_never().unwrap();
    assert_eq!(table.live(), [STEP], "the value may come back");
    assert_eq!(number(taken), 1);
    assert_eq!(known(&table), 0);
}

#[test]
fn a_value_put_back_keeps_its_step() {
    let table = table(10);
    send(&table, &table.begin(STEP).unwrap(), tensor(1)).unwrap();
    let (value, step) = table.ask(STEP, PEER).unwrap().take("k").now_or_never().unwrap().unwrap();
    value.put_back();
    drop(step);
    assert_eq!(table.live(), [STEP]);
    table.drop_values(STEP, |key| *key == "k".into());
    assert_eq!(known(&table), 0);
}

#[test]
fn s2_7_a_request_before_its_step_waits_and_is_served_in_order() {
    let (table, clock) = with_clock(10);
    let [first, second] = std::array::from_fn(|_| table.ask(STEP, PEER).unwrap().take("k"));
    let (mut first, mut second) = (Box::pin(first), Box::pin(second));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    let step = table.begin(STEP).unwrap();
    // The step has begun, so no limit ends its requests.
    clock.pass(Duration::from_secs(3600));
    assert!(first.as_mut().now_or_never().is_none());
    for value in 1..=2 {
        send(&table, &step, tensor(value)).unwrap();
    }
    drop(step);
    assert_eq!((number(second.now_or_never().unwrap()), number(first.now_or_never().unwrap())), (2, 1));
    assert_eq!(known(&table), 0);
}

#[test]
fn s2_7_a_step_that_nobody_begins_ends_its_requests_and_is_forgotten() {
    let (table, clock) = with_clock(10);
    let mut waiting = Box::pin(table.ask(STEP, PEER).unwrap().take("k"));
    assert!(waiting.as_mut().now_or_never().is_none());
    clock.pass(Duration::from_secs(60) - Duration::from_nanos(1));
    assert!(waiting.as_mut().now_or_never().is_none());
    clock.pass(Duration::from_nanos(1));
    let status = waiting.now_or_never().unwrap().unwrap_err();
    assert_eq!(status.code, Code::DeadlineExceeded);
    for part in ["/job:ps/replica:0/task:0", "Worker::step(7)", "60000 ms", "step_init_timeout"] {
        assert!(status.message.contains(part), "{status}");
    }
    assert_eq!((known(&table), table.shared.deferred.count(PEER)), (0, 0));
}

#[test]
fn a_request_given_up_before_its_step_begins_leaves_nothing() {
    let table = table(10);
    drop(table.ask(STEP, PEER).unwrap().take("k"));
    let mut polled = Box::pin(table.ask(STEP, PEER).unwrap().take("k"));
    assert!(polled.as_mut().now_or_never().is_none());
    drop(polled);
    assert_eq!((known(&table), table.shared.deferred.count(PEER)), (0, 0));
}

#[test]
fn s4_a_peer_may_wait_for_so_many_steps_only() {
    let table = table(10);
    let mut waiting: Vec<_> =
        (0..4).map(|step| table.ask(StepId(step / 2), PEER).unwrap().take("k")).collect();
    let refused = refusal(&table, StepId(2), PEER);
    assert_eq!(refused.code, Code::ResourceExhausted);
    assert!(refused.message.contains(PEER) && refused.message.contains("deferred_steps_max"), "{refused}");
    assert_eq!(known(&table), 2, "what is refused leaves no step");
    let others = table.ask(StepId(2), OTHER).unwrap().take("k");
    // Dropping one of two requests of a step makes no room; dropping both does.
    waiting.truncate(3);
    assert_eq!(refusal(&table, StepId(2), PEER).code, Code::ResourceExhausted);
    waiting.truncate(2);
    waiting.push(table.ask(StepId(2), PEER).unwrap().take("k"));
    // A step that begins makes room, too, once.
    let begun = table.begin(StepId(0)).unwrap();
    let more = table.ask(StepId(3), PEER).unwrap().take("k");
    assert_eq!(refusal(&table, StepId(4), PEER).code, Code::ResourceExhausted);
    drop((waiting, others, more, begun));
    assert_eq!(table.shared.deferred.peers(), 0, "nobody is remembered for nothing");
    assert_eq!(
        (known(&table), table.shared.deferred.count(PEER), table.shared.deferred.count(OTHER)),
        (0, 0, 0)
    );
}

#[test]
fn s4_a_peer_that_gave_up_a_step_counts_again_when_it_asks_again() {
    let table = table(10);
    let _others = table.ask(STEP, OTHER).unwrap().take("k");
    drop(table.ask(STEP, PEER).unwrap().take("k"));
    assert_eq!(table.shared.deferred.count(PEER), 0);
    let _again = table.ask(STEP, PEER).unwrap().take("k");
    assert_eq!(table.shared.deferred.count(PEER), 1);
}

#[test]
fn all_steps_are_listed_in_order_and_aborted_at_once() {
    let table = table(10);
    let steps: Vec<_> = (0..20).rev().map(|step| table.begin(StepId(step)).unwrap()).collect();
    assert_eq!(table.live(), (0..20).map(StepId).collect::<Vec<_>>());
    let waiting = table.ask(StepId(3), PEER).unwrap().take("k");
    let status = Status::new(Code::Unavailable, "shutting down");
    table.abort_all(&status);
    assert_eq!(waiting.now_or_never().unwrap().unwrap_err(), status);
    assert!(steps.iter().all(|step| step.aborted() == Some(status.clone())));
}

#[test]
fn a_finished_step_is_remembered_for_ten_minutes() {
    let (table, clock) = with_clock(10);
    let step = table.begin(STEP).unwrap();
    table.cleanup(STEP);
    assert_eq!(step.aborted().unwrap().message, "Cleanup 7");
    drop(step);
    clock.pass(TOMBSTONE_AGE);
    let refused = refusal(&table, STEP, PEER);
    assert_eq!((refused.code, refused.message.as_str()), (Code::Aborted, "step 7 has been cleaned up"));
    assert!(table.begin(STEP).is_err());
    // Ending the step again does not prolong that.
    table.cleanup(STEP);
    clock.pass(Duration::from_nanos(1));
    drop(table.begin(STEP).unwrap());
    assert_eq!(known(&table), 0);
}

#[test]
fn old_tombstones_go_with_the_next() {
    let (table, clock) = with_clock(10);
    (0..5).for_each(|step| table.cleanup(StepId(step)));
    clock.pass(TOMBSTONE_AGE + Duration::from_nanos(1));
    // The step is in use again, so its tombstone is already removed.
    let revived = table.begin(StepId(0)).unwrap();
    table.cleanup(StepId(5));
    assert_eq!(known(&table), 2);
    assert_eq!(table.live(), [StepId(0)]);
    table.cleanup(StepId(0));
    assert!(revived.aborted().is_some());
    assert_eq!(refusal(&table, StepId(0), PEER).code, Code::Aborted);
}

#[test]
fn s4_so_many_finished_steps_are_remembered_only() {
    let table = table(10);
    (0..=TOMBSTONES_MAX as i64).for_each(|step| table.cleanup(StepId(step)));
    assert_eq!(known(&table), TOMBSTONES_MAX);
    assert!(table.begin(StepId(0)).is_ok(), "the oldest is forgotten");
    assert_eq!(refusal(&table, StepId(1), PEER).code, Code::Aborted);
}

#[test]
fn an_aborted_step_keeps_its_status_after_its_last_user() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    step.abort(&Status::new(Code::DataLoss, "spoilt"));
    assert_eq!(refusal(&table, STEP, PEER).message, "spoilt");
    drop(step);
    assert_eq!(refusal(&table, STEP, PEER), Status::new(Code::DataLoss, "spoilt"));
    assert_eq!((table.live().len(), known(&table)), (0, 1));
}

#[test]
fn an_aborted_step_that_is_cleaned_up_keeps_its_status() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let why = Status::new(Code::Unavailable, "rank 3 is lost");
    step.abort(&why);
    table.cleanup(STEP);
    assert_eq!(refusal(&table, STEP, PEER), why);
    drop(step);
    assert_eq!(table.begin(STEP).unwrap_err(), why);
}

#[test]
fn s4_an_aborted_step_is_remembered_no_longer_than_a_finished_one() {
    let (table, clock) = with_clock(10);
    let aborted = |id| {
        let step = table.begin(id).unwrap();
        step.abort(&Status::new(Code::DataLoss, "spoilt"));
    };
    [StepId(1), StepId(2)].into_iter().for_each(aborted);
    clock.pass(TOMBSTONE_AGE);
    assert_eq!(refusal(&table, StepId(1), PEER).message, "spoilt");
    clock.pass(Duration::from_nanos(1));
    drop(table.begin(StepId(1)).unwrap());
    table.cleanup(StepId(3));
    assert_eq!(known(&table), 1, "the other's tombstone has gone, without anybody asking for it");
}

#[test]
fn s2_9_11_an_abort_ends_requests_that_wait_for_their_step() {
    let table = table(10);
    let waiting = table.ask(STEP, PEER).unwrap().take("k");
    table.cleanup(STEP);
    assert_eq!(waiting.now_or_never().unwrap().unwrap_err().message, "Cleanup 7");
    assert_eq!(table.shared.deferred.count(PEER), 0);
}

#[test]
fn a_step_finished_again_is_remembered_from_then_on() {
    let (table, clock) = with_clock(10);
    table.cleanup(STEP);
    clock.pass(TOMBSTONE_AGE + Duration::from_nanos(1));
    table.cleanup(STEP);
    clock.pass(TOMBSTONE_AGE);
    assert_eq!(refusal(&table, STEP, PEER).code, Code::Aborted);
    table.cleanup(StepId(8));
    assert_eq!(known(&table), 2, "what is ten minutes old is not too old");
}

#[test]
fn an_aborted_step_goes_although_old_tombstones_go_with_it() {
    let (table, clock) = with_clock(10);
    // Steps in every part of the table.
    (0..1000).for_each(|step| table.cleanup(StepId(step)));
    clock.pass(TOMBSTONE_AGE + Duration::from_nanos(1));
    table.begin(StepId(1000)).unwrap().abort(&Status::new(Code::DataLoss, "spoilt"));
    assert_eq!(known(&table), 1);
}

#[test]
fn a_step_that_found_a_user_again_stays() {
    let table = table(10);
    let user = table.begin(STEP).unwrap();
    // As if the last user had left just before this one came.
    table.shared.forget_unused(STEP);
    assert_eq!(known(&table), 1);
    drop(user);
    assert_eq!(known(&table), 0);
}

#[test]
fn a_value_that_is_there_is_taken_without_a_wait_and_can_go_back() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    send(&table, &step, tensor(1)).unwrap();
    let ask = || table.ask(STEP, PEER).unwrap().take_or_wait("k", None);
    let Take::Now(Ok((value, _step))) = ask() else { panic!("the value is there") };
    let waits = ask();
    assert!(matches!(waits, Take::Later(_)), "the other has it");
    drop(waits);
    value.put_back();
    let Take::Now(taken) = ask() else { panic!("the value is there again") };
    assert_eq!(number(taken), 1);
}

#[test]
fn a_receive_is_told_when_its_step_is_aborted() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let spoilt = Status::new(Code::DataLoss, "spoilt");
    let mut receives: Vec<_> = (0..3).map(|_| Box::pin(std::future::pending::<()>())).collect();
    let mut watched: Vec<_> =
        receives.iter_mut().map(|receive| Box::pin(step.or_aborted(receive.as_mut()))).collect();
    for receive in &mut watched {
        assert!(receive.as_mut().now_or_never().is_none());
    }
    drop(watched.remove(1));
    step.abort(&spoilt);
    for receive in &mut watched {
        assert_eq!(receive.as_mut().now_or_never(), Some(Err(spoilt.clone())));
    }
}

#[test]
fn nothing_is_received_for_an_aborted_step() {
    let table = table(10);
    let step = table.begin(STEP).unwrap();
    let receive = |step: &StepRef| step.or_aborted(std::pin::pin!(std::future::ready(4))).now_or_never();
    assert_eq!(receive(&step), Some(Ok(4)));
    let spoilt = Status::new(Code::DataLoss, "spoilt");
    step.abort(&spoilt);
    assert_eq!(receive(&step), Some(Err(spoilt)));
}
