//! Steps between workers: how they begin and end.

use std::time::Duration;

use futures::future::{join, join_all};
use tensorwire_protocol::{Code, Key, Status};
use tensorwire_rendezvous::{DuplicatePolicy, KeyEnd, Worker, WorkerError};

use super::{Given, RECEIVER_CPU, SENDER, SENDER_CPU, Two, number, until, value_of};

/// What a peer answered to a request.
fn answer(error: &WorkerError) -> &Status {
    match error {
        WorkerError::Remote { status, .. } => status,
        other => panic!("{other}"),
    }
}

pub(crate) async fn s2_7_requests_before_the_step_are_served_in_their_order(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, other) = (two.key("foo"), two.key("bar"));
    let step = two.receiver.shared_step(5);
    let mut order = Vec::new();
    let mut receives = [&key, &key, &other].map(|key| Box::pin(step.recv(key).into_future()));
    for asked in 0..receives.len() {
        two.ask(&mut receives[asked..=asked], asked as u64 + 1).await;
    }
    let begun = two.sender.shared_step(5);
    for value in [1, 2] {
        begun.send(&key, number(&two.sender, value)).unwrap();
    }
    begun.send(&other, number(&two.sender, 3)).unwrap();
    for received in join_all(receives).await {
        order.push(value_of(&received.unwrap()));
    }
    assert_eq!(order, [1, 2, 3]);
    drop((begun, step));
    two.end().await;
}

pub(crate) async fn s2_7_a_step_that_nobody_begins_ends_its_requests(ground: Given) {
    let limit = Duration::from_millis(200);
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.step_init_timeout = limit)).await;
    let key = two.key("foo");
    let step = two.receiver.shared_step(5);
    let began = ground.runtime().now();
    let errors = join(step.recv(&key).into_future(), step.recv(&key).into_future()).await;
    assert!(ground.runtime().now() - began >= limit);
    for error in [errors.0.unwrap_err(), errors.1.unwrap_err()] {
        let status = answer(&error);
        assert_eq!(status.code, Code::DeadlineExceeded);
        for part in [SENDER, "step 5", "Worker::step(5)", "200 ms", "step_init_timeout"] {
            assert!(status.message.contains(part), "{status}");
        }
    }
    // It can still begin; and once it has, its requests wait for longer.
    let begun = two.sender.shared_step(5);
    let send = async {
        ground.runtime().sleep(2 * limit).await;
        begun.send(&key, number(&two.sender, 4)).unwrap();
    };
    let (received, ()) = join(step.recv(&key).into_future(), send).await;
    assert_eq!(value_of(&received.unwrap()), 4);
    two.end().await;
}

pub(crate) async fn s2_7_a_receive_cancelled_before_the_step_leaves_nothing(ground: Given) {
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.deferred_steps_max = 1)).await;
    let key = two.key("foo");
    for id in 1..=3 {
        let step = two.receiver.shared_step(id);
        let asked = two.asked();
        let mut receive = [Box::pin(step.recv(&key).into_future())];
        two.ask(&mut receive, asked + 1).await;
        drop(receive);
        until(&ground, || Two::peer_counters(&two.receiver).received.cancel_ack >= id as u64).await;
        // There is room for one step alone, so the next would be refused had this one left anything.
    }
    two.send(&key, 9);
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 9);
    two.end().await;
}

pub(crate) async fn s2_7_a_peer_may_wait_for_so_many_steps_only(ground: Given) {
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.deferred_steps_max = 2)).await;
    let key = two.key("foo");
    let steps: Vec<_> = (0..3).map(|id| two.receiver.shared_step(id)).collect();
    let mut waiting: Vec<_> = steps[..2].iter().map(|step| Box::pin(step.recv(&key).into_future())).collect();
    two.ask(&mut waiting, 2).await;
    let error = steps[2].recv(&key).await.unwrap_err();
    let status = answer(&error);
    assert_eq!(status.code, Code::ResourceExhausted);
    assert!(status.message.contains("2 steps") && status.message.contains("deferred_steps_max"), "{status}");
    // One that begins makes room; those that waited are not concerned.
    for id in [0, 2, 1] {
        two.sender.shared_step(id).send(&key, number(&two.sender, id as u64)).unwrap();
    }
    assert_eq!(value_of(&steps[2].recv(&key).await.unwrap()), 2);
    let values: Vec<u64> = join_all(waiting).await.into_iter().map(|got| value_of(&got.unwrap())).collect();
    assert_eq!(values, [0, 1]);
    two.end().await;
}

pub(crate) async fn s2_7_the_status_of_a_step_comes_before_the_check_of_its_devices(ground: Given) {
    let two = Two::new(&ground).await;
    // Its source is the receiver, whose incarnation is not that of the sender.
    let wrong = two.receiver.key(RECEIVER_CPU, SENDER_CPU, "foo").unwrap();
    let over = two.receiver.shared_step(1);
    over.abort(&Status::new(Code::DataLoss, "spoilt"));
    let aborted = over.recv(&wrong).await.unwrap_err();
    assert!(
        matches!(&aborted, WorkerError::Aborted { status, .. } if status.message == "spoilt"),
        "{aborted}"
    );
    let refused = two.receiver.shared_step(2).recv(&wrong).await.unwrap_err();
    assert!(matches!(&refused, WorkerError::WrongWorker { end: KeyEnd::Destination, .. }), "{refused}");
    two.end().await;
}

/// The parts of device names are compared, not their texts.
pub(crate) async fn s2_7_task_1_is_not_task_10(ground: Given) {
    let names = ["/job:w/replica:0/task:1", "/job:w/replica:0/task:10"];
    let cpus = names.map(|name| format!("{name}/device:CPU:0"));
    let one = ground.start(Worker::builder(names[0]), None).await;
    let ten = ground.start(Worker::builder(names[1]), None).await;
    ten.peer_at(one.address()).await.unwrap();
    let key = one.key(&cpus[1], &cpus[0], "foo").unwrap();
    let refused = one.shared_step(1).send(&key, number(&one, 1)).unwrap_err();
    assert!(matches!(refused, WorkerError::WrongWorker { end: KeyEnd::Source, .. }), "{refused}");
    let from_one = one.key(&cpus[0], &cpus[1], "foo").unwrap();
    one.shared_step(1).send(&from_one, number(&one, 2)).unwrap();
    assert_eq!(value_of(&ten.shared_step(1).recv(&from_one).await.unwrap()), 2);
    let refused = ten.shared_step(1).recv(&key).await.unwrap_err();
    assert!(matches!(refused, WorkerError::WrongWorker { end: KeyEnd::Destination, .. }), "{refused}");
    ten.shutdown().await;
    one.shutdown().await;
}

pub(crate) async fn s2_7_a_key_works_at_its_two_ends_only(ground: Given) {
    const OTHER: &str = "/job:worker/replica:0/task:1";
    let two = Two::new(&ground).await;
    let other = ground.start(Worker::builder(OTHER), None).await;
    other.peer_at(two.sender.address()).await.unwrap();
    let key = two.key("foo");
    two.send(&key, 1);
    // Not its destination: refused at once, and the value stays for the one that is.
    let refused = other.shared_step(1).recv(&key).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let text = refused.to_string();
    assert!(text.starts_with(&format!("Invalid rendezvous key (dst): {key} @ {OTHER}")), "{text}");
    let refused = two.receiver.shared_step(1).send(&key, number(&two.receiver, 1)).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let text = refused.to_string();
    assert!(
        text.starts_with(&format!("Invalid rendezvous key (src): {key} @ {}", two.receiver.name())),
        "{text}"
    );
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 1);
    // A source that is not named is the worker itself.
    let own = Key::builder().destination(SENDER_CPU).edge("foo").build().unwrap();
    two.sender.shared_step(1).send(&own, number(&two.sender, 2)).unwrap();
    assert_eq!(value_of(&two.sender.shared_step(1).recv(&own).await.unwrap()), 2);
    other.shutdown().await;
    two.end().await;
}

pub(crate) async fn s2_8_a_late_request_gets_the_tombstones_answer(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    // One that was used, one that was not known, and one that was aborted and forgotten by all who used it.
    two.send(&key, 1);
    two.sender.cleanup(1);
    two.sender.cleanup(2);
    two.sender.shared_step(3).abort(&Status::new(Code::DataLoss, "spoilt"));
    for (id, code, text) in
        [(1, Code::Aborted, "step 1"), (2, Code::Aborted, "step 2"), (3, Code::DataLoss, "spoilt")]
    {
        let error = two.receiver.shared_step(id).recv(&key).await.unwrap_err();
        assert!(answer(&error).code == code && answer(&error).message.contains(text), "{error}");
        let refused = two.sender.shared_step(id).send(&key, number(&two.sender, 1)).unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
    two.end().await;
}

pub(crate) async fn s2_8_a_step_that_is_used_up_is_gone_and_begins_again(ground: Given) {
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.deferred_steps_max = 1)).await;
    let key = two.key("foo");
    for round in 0..3 {
        // Nobody keeps the step, but its value does until it is received.
        two.send(&key, round);
        assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), round);
    }
    // It is unused now, and a request for it waits until it begins once more.
    let step = two.receiver.shared_step(1);
    let send = async {
        two.until_asked(4).await;
        two.send(&key, 7);
    };
    let (received, ()) = join(step.recv(&key).into_future(), send).await;
    assert_eq!(value_of(&received.unwrap()), 7);
    two.end().await;
}

pub(crate) async fn s2_8_a_step_ends_with_its_last_clone(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, other) = (two.key("foo"), two.key("bar"));
    let (here, there) = (two.sender.step(1), two.receiver.step(1));
    let clone = here.clone();
    here.send(&key, number(&two.sender, 1)).unwrap();
    drop(here);
    assert_eq!(value_of(&there.recv(&key).await.unwrap()), 1);
    // Values that were not received are dropped, receives that wait end, and the step does not begin again.
    clone.send(&key, number(&two.sender, 2)).unwrap();
    let (waiting, ()) = join(there.recv(&other).into_future(), async {
        ground.moment(20, Duration::from_millis(50)).await;
        drop(clone);
    })
    .await;
    for error in [waiting.unwrap_err(), there.recv(&key).await.unwrap_err()] {
        assert_eq!(answer(&error).code, Code::Aborted, "{error}");
    }
    let refused = two.sender.step(1).send(&key, number(&two.sender, 3)).unwrap_err();
    assert!(matches!(refused, WorkerError::Aborted { step: 1, .. }), "{refused}");
    // At the receiver the step went on; a shared one goes on at the sender, too.
    two.sender.shared_step(2).send(&key, number(&two.sender, 4)).unwrap();
    assert_eq!(value_of(&two.receiver.step(2).recv(&key).await.unwrap()), 4);
    two.end().await;
}

pub(crate) async fn s4_a_full_table_names_its_cap(ground: Given) {
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.values_max = 3)).await;
    let key = two.key("foo");
    // The cap is the worker's, not the step's.
    for id in 1..=3 {
        two.sender.shared_step(id).send(&key, number(&two.sender, id as u64)).unwrap();
    }
    let refused = two.sender.shared_step(4).send(&key, number(&two.sender, 4)).unwrap_err();
    assert!(matches!(&refused, WorkerError::TableFull { waiting: 3, cap: 3 }), "{refused}");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(
        refused.to_string().contains("the maximum is 3") && refused.to_string().contains("values_max"),
        "{refused}"
    );
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 1);
    two.sender.shared_step(4).send(&key, number(&two.sender, 4)).unwrap();
    two.sender.cleanup_all();
    two.end().await;
}

/// The sender's policy decides; the cases of each are those of the local table.
pub(crate) async fn s12_01_both_eras_of_duplicates_can_be_chosen(ground: Given) {
    let policies = [DuplicatePolicy::Queue, DuplicatePolicy::Report, DuplicatePolicy::Tolerate];
    for (policy, second) in policies.into_iter().zip([Ok(2), Err("recv"), Ok(1)]) {
        let two = Two::with(&ground, |builder| builder.duplicates(policy)).await;
        let key = two.key("foo");
        two.send(&key, 1);
        let again = two.sender.shared_step(1).send(&key, number(&two.sender, 2));
        let duplicated = |what: &str| format!("Duplicated {what}: {}", key.table_key());
        match again {
            Ok(()) => assert_eq!(policy, DuplicatePolicy::Queue),
            Err(error) => {
                assert!(error.code() == Code::Aborted && error.to_string().contains(&duplicated("send")));
            }
        }
        assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 1);
        match (two.receiver.shared_step(1).recv(&key).await, second) {
            (Ok(tensor), Ok(value)) => assert_eq!(value_of(&tensor), value),
            (Err(error), Err(what)) => {
                assert_eq!(
                    (answer(&error).code, &answer(&error).message),
                    (Code::Aborted, &duplicated(what))
                );
            }
            (received, _) => panic!("{policy:?}: {received:?}"),
        }
        two.sender.cleanup(1);
        two.end().await;
    }
}
