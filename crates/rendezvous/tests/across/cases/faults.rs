//! Steps and peers that end in every state of a transfer, and queues that are full.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use futures::future::{join, join_all, join3};
use tensorwire_protocol::{Code, Counters, DataType, Key, Status};
use tensorwire_rendezvous::{CancellationToken, PeerLoss, Tensor, Worker, WorkerError};

use super::{
    Given, LONG, RECEIVER_CPU, SENDER, SENDER_CPU, Two,
    basics::{is_cancelled, with_token},
    long, number, polled, until, value_of,
};

/// Moments of a transfer at which something happens to it.
const MOMENTS: u32 = 40;

/// The step that goes on beside those that end.
const OTHER_STEP: i64 = 1_000_000;

/// The state of a transfer on both sides.
#[derive(Debug, Clone, Copy)]
enum Standing {
    /// Nothing was asked.
    New,
    /// The request is out.
    WaitAnswer,
    /// The sender has sent the metadata and waits.
    WaitReRequest,
    /// The receiver waits for the content.
    WaitContent,
    /// The content is written.
    Writing,
    Done,
}

impl Standing {
    const NAMES: [&str; 6] = ["New", "WaitAnswer", "WaitReRequest", "WaitContent", "Writing", "Done"];

    fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Of a transfer of unknown metadata that began when the counters of both sides were `before`.
    fn of(before: &[Counters; 2], now: &[Counters; 2]) -> Self {
        let [sender, receiver] = [0, 1].map(|end| {
            let (before, now) = (&before[end], &now[end]);
            move |count: fn(&Counters) -> u64| count(now) > count(before)
        });
        if receiver(|end| end.contents_received) {
            Self::Done
        } else if sender(|end| end.contents_sent) {
            Self::Writing
        } else if receiver(|end| end.sent.tensor_re_request) {
            Self::WaitContent
        } else if sender(|end| end.sent.meta_data_response) {
            Self::WaitReRequest
        } else if receiver(|end| end.sent.tensor_request) {
            Self::WaitAnswer
        } else {
            Self::New
        }
    }
}

fn ends(two: &Two) -> [Counters; 2] {
    [&two.sender, &two.receiver].map(Two::peer_counters)
}

/// How long a transfer of unknown metadata takes when nothing happens to it.
async fn length_of_a_transfer(two: &Two) -> Duration {
    let (key, runtime) = (two.key("measured"), two.ground.runtime());
    let mut longest = Duration::ZERO;
    for value in 0..4 {
        let key = if value == 0 { two.key("first") } else { key.clone() };
        two.sender.shared_step(0).send(&key, long(&two.sender, value)).unwrap();
        let began = runtime.now();
        two.receiver.shared_step(0).recv(&key).await.unwrap();
        // The first one connects.
        longest = if value == 0 { longest } else { longest.max(runtime.now() - began) };
    }
    longest
}

/// Aborts step after step, at one side, at each moment of a transfer in it. Another transfer goes on beside it.
async fn abort_in_each_state(ground: &Given, at_sender: bool) {
    ground.must_reach(&Standing::NAMES);
    let two = Two::new(ground).await;
    let whole = length_of_a_transfer(&two).await;
    for moment in 0..MOMENTS {
        let id = i64::from(moment) + 1;
        let key = two.key(&format!("{moment}"));
        let back = two.sender.key(RECEIVER_CPU, SENDER_CPU, &format!("{moment}")).unwrap();
        let (there, here) = (two.sender.shared_step(id), two.receiver.shared_step(id));
        // Every fourth value never comes, so its request waits at the sender.
        if moment % 4 > 0 {
            there.send(&key, long(&two.sender, 1)).unwrap();
        }
        let before = ends(&two);
        let abort = async {
            if moment > 3 {
                ground.moment(moment, whole * 3 * moment / MOMENTS).await;
            }
            if moment % 4 == 0 {
                two.until_asked(before[0].received.tensor_request + 1).await;
            }
            ground.reached(Standing::of(&before, &ends(&two)).name());
            let step = if at_sender { &there } else { &here };
            step.abort(&Status::new(Code::DataLoss, "enough"));
        };
        // The other way, in another step.
        let others = two.sender.shared_step(OTHER_STEP);
        two.receiver.shared_step(OTHER_STEP).send(&back.with_incarnation(0), long(&two.receiver, 2)).unwrap();
        let ((), received, beside) =
            join3(abort, here.recv(&key).into_future(), others.recv(&back).into_future()).await;
        match received {
            Ok(tensor) => assert!(moment % 4 > 0 && value_of(&tensor) == 1),
            Err(error) => {
                let right_kind = match &error {
                    WorkerError::Remote { status, .. } => at_sender && status.message == "enough",
                    WorkerError::Aborted { status, .. } => !at_sender && status.message == "enough",
                    _ => false,
                };
                assert!(right_kind && error.code() == Code::DataLoss, "{error}");
            }
        }
        assert_eq!(value_of(&beside.unwrap()), 2);
        two.sender.cleanup(id);
        two.receiver.cleanup(id);
    }
    two.end().await;
}

pub(crate) async fn s12_04_abort_at_the_sender_in_each_state(ground: Given) {
    abort_in_each_state(&ground, true).await;
}

pub(crate) async fn s12_04_abort_at_the_receiver_in_each_state(ground: Given) {
    abort_in_each_state(&ground, false).await;
}

/// Kills the sender at each moment of a transfer from it, while one from another worker goes on.
pub(crate) async fn s12_04_peer_killed_in_each_state(ground: Given) {
    const OTHER: &str = "/job:ps/replica:0/task:1";
    const OTHER_CPU: &str = "/job:ps/replica:0/task:1/device:CPU:0";
    const KILLS: u32 = 16;
    ground.must_reach(&Standing::NAMES);
    let two = Two::new(&ground).await;
    let whole = length_of_a_transfer(&two).await;
    let Two { receiver, mut sender, .. } = two;
    let other = ground.start(Worker::builder(OTHER), None).await;
    receiver.peer_at(other.address()).await.unwrap();
    for kill in 0..KILLS {
        let id = i64::from(kill) + 1;
        let key = receiver.key(SENDER_CPU, RECEIVER_CPU, &format!("{kill}")).unwrap();
        let others = receiver.key(OTHER_CPU, RECEIVER_CPU, &format!("{kill}")).unwrap();
        if kill > 0 {
            sender.shared_step(id).send(&key, long(&sender, 1)).unwrap();
        }
        other.shared_step(id).send(&others, long(&other, 2)).unwrap();
        let (address, before) = (sender.address().to_owned(), sender.incarnation());
        let step = receiver.shared_step(id);
        // The first end's connection goes on; of each later one nothing is counted before it stands.
        let counted = || [&sender, &receiver].map(live_counters);
        let start = counted();
        let killed = async {
            if kill > 1 {
                ground.moment(kill, whole * 3 * kill / KILLS).await;
            }
            ground.reached(Standing::of(&start, &counted()).name());
            ground.kill(sender.clone()).await;
        };
        let ((), received, beside) =
            join3(killed, step.recv(&key).into_future(), step.recv(&others).into_future()).await;
        match received {
            Ok(tensor) => assert!(kill > 0 && value_of(&tensor) == 1),
            Err(error) => assert!(is_loss(&error), "{error}"),
        }
        assert_eq!(value_of(&beside.unwrap()), 2);
        forgotten(&ground, &receiver, before).await;
        sender = ground.start(Worker::builder(SENDER), Some(&address)).await;
    }
    other.shutdown().await;
    Two { ground, sender, receiver }.end().await;
}

/// The counters of the connection that stands.
fn live_counters(worker: &Worker) -> Counters {
    let first = worker.peers().into_iter().next();
    first.filter(|peer| peer.transport.is_some()).map(|peer| peer.counters).unwrap_or_default()
}

/// What a receive gets whose sender is gone: killed, or shut down where nothing can be killed.
fn is_loss(error: &WorkerError) -> bool {
    match error {
        WorkerError::PeerLost { .. } | WorkerError::NoFabric { .. } | WorkerError::Control(_) => true,
        WorkerError::Remote { status, .. } => status.message == "Shutdown",
        _ => false,
    }
}

/// Runs until the receiver has seen that this life of its only sender is over.
pub(crate) async fn forgotten(ground: &Given, receiver: &Worker, life: u64) {
    let knows = || receiver.peers().iter().any(|peer| peer.name == SENDER && peer.incarnation == Some(life));
    until(ground, || !knows()).await;
}

pub(crate) async fn s12_04_restart_with_a_new_incarnation(ground: Given) {
    const OUTSTANDING: u64 = 50;
    let two = Two::new(&ground).await;
    let keys: Vec<Key> = (0..OUTSTANDING).map(|edge| two.key(&format!("{edge}"))).collect();
    let Two { receiver, sender, .. } = two;
    let (address, before) = (sender.address().to_owned(), sender.incarnation());
    let step = receiver.shared_step(1);
    let killed = async {
        until(&ground, || Two::peer_counters(&sender).received.tensor_request >= OUTSTANDING).await;
        ground.kill(sender.clone()).await;
    };
    let (received, ()) = join(join_all(keys.iter().map(|key| step.recv(key).into_future())), killed).await;
    let mut answered = 0;
    for error in received {
        let error = error.unwrap_err();
        assert!(is_loss(&error), "{error}");
        answered += u64::from(matches!(error, WorkerError::Remote { .. }));
    }
    forgotten(&ground, &receiver, before).await;
    let sender = ground.start(Worker::builder(SENDER), Some(&address)).await;
    let two = Two { ground, sender, receiver };
    for (value, key) in keys.iter().enumerate() {
        two.sender.shared_step(1).send(key, number(&two.sender, value as u64)).unwrap();
        two.sender.shared_step(2).send(key, number(&two.sender, value as u64)).unwrap();
    }
    // What was under way is over with this peer for good; everything else goes on. Who shuts down answers what it can before.
    match step.recv(&keys[0]).await {
        Err(WorkerError::PeerLost { loss: PeerLoss::StepBroken, .. }) => {}
        Ok(tensor) if answered == OUTSTANDING => assert_eq!(value_of(&tensor), 0),
        other => panic!("{other:?}"),
    }
    let values =
        join_all(keys.iter().map(|key| async { two.receiver.shared_step(2).recv(key).await.unwrap() })).await;
    assert!(values.iter().enumerate().all(|(value, tensor)| value_of(tensor) == value as u64));
    drop((step, values));
    two.end().await;
}

/// Queues of the least depth, one content at a time, and far more transfers than they hold, both ways.
pub(crate) async fn s12_04_exhausted_queues_delay_and_break_nothing(ground: Given) {
    const MANY: u64 = 200;
    let two = Two::with(&ground, |builder| {
        builder.flow(|flow| {
            flow.depth = 4;
            flow.contents_max = 1;
            flow.ring_bytes = 8 << 10;
        })
    })
    .await;
    let down: Vec<Key> = (0..MANY).map(|edge| two.key(&format!("{edge}"))).collect();
    let back = |edge: u64| two.sender.key(RECEIVER_CPU, SENDER_CPU, &format!("{edge}")).unwrap();
    let up: Vec<Key> = (0..MANY).map(back).collect();
    let mut ends = Vec::new();
    for (worker, sent, received) in [(&two.sender, &down, &up), (&two.receiver, &up, &down)] {
        let (worker, sent, received) = (worker.clone(), sent.clone(), received.clone());
        ends.push(ground.beside(Box::pin(async move {
            let step = worker.shared_step(1);
            let receives = join_all(received.iter().map(|key| step.recv(key).into_future()));
            let send = async {
                for (value, key) in sent.iter().enumerate() {
                    let own = key.with_incarnation(0);
                    step.send(&own, long(&worker, value as u64)).unwrap();
                }
            };
            for (value, received) in join(receives, send).await.0.into_iter().enumerate() {
                assert_eq!(value_of(&received.unwrap()), value as u64);
            }
        })));
    }
    join_all(ends).await;
    two.end().await;
}

/// Memory of the same size is in use the moment after a receive was given up: what comes late must not land there.
pub(crate) async fn s12_04_late_content_after_cancel_spoils_nothing(ground: Given) {
    let two = Two::new(&ground).await;
    let whole = length_of_a_transfer(&two).await;
    let key = two.key("late");
    for moment in 0..MOMENTS {
        two.sender.shared_step(1).send(&key, long(&two.sender, u64::from(moment))).unwrap();
        let step = two.receiver.shared_step(1);
        let received = {
            let mut receive = pin!(step.recv(&key).into_future());
            let mut end = ground.moment(moment, whole * 3 * moment / MOMENTS);
            poll_fn(|context| match receive.as_mut().poll(context) {
                Poll::Ready(received) => Poll::Ready(Some(received)),
                Poll::Pending => end.as_mut().poll(context).map(|()| None),
            })
            .await
        };
        let mut own = two.receiver.receive_pool().alloc(LONG * 8).await.unwrap();
        own.fill(0xA5);
        let tensor = match received {
            Some(received) => received.unwrap(),
            None => step.recv(&key).await.unwrap(),
        };
        assert_eq!(value_of(&tensor), u64::from(moment));
        assert!(own.iter().all(|byte| *byte == 0xA5), "late content came where it must not");
    }
    two.end().await;
}

/// Many requests at once, of which each fails or succeeds for itself.
pub(crate) async fn s12_05_a_failure_is_a_status_of_its_own_request_alone(ground: Given) {
    let limit = Duration::from_millis(300);
    let two = Two::with(&ground, |builder| builder.limits(|limits| limits.step_init_timeout = limit)).await;
    let (good, never, token) = (two.key("good"), two.key("never"), CancellationToken::new());
    let dead = two.key("dead");
    two.sender.shared_step(1).send(&dead, Tensor::dead(DataType::F32, &[]).unwrap()).unwrap();
    two.sender.cleanup(2);
    let (here, kept) = (two.receiver.shared_step(1), two.sender.shared_step(1));
    let (finished, unknown, aborted) =
        (two.receiver.shared_step(2), two.receiver.shared_step(3), two.sender.shared_step(4));
    let waiting = two.receiver.shared_step(4);
    let stale = good.with_incarnation(1);
    let goods = |edge: u64| two.key(&format!("good {edge}"));
    let bad = async {
        let steps = join3(
            finished.recv(&good).into_future(),
            unknown.recv(&good).into_future(),
            waiting.recv(&good).into_future(),
        );
        let answers =
            join3(steps, here.recv(&stale).into_future(), here.recv(&never).timeout(limit).into_future());
        let cancelled = here.recv(&never).with(with_token(&token)).into_future();
        let end = async {
            two.until_asked(6).await;
            token.cancel();
            aborted.abort(&Status::new(Code::DataLoss, "spoilt"));
        };
        join3(answers, cancelled, end).await
    };
    let fine = async {
        for value in 0..20 {
            kept.send(&goods(value), long(&two.sender, value)).unwrap();
            assert_eq!(value_of(&here.recv(&goods(value)).await.unwrap()), value);
        }
        assert!(here.recv(&dead).await.unwrap().is_dead());
    };
    let (((steps, stale, late), cancelled, ()), ()) = join(bad, fine).await;
    assert!(is_cancelled(&cancelled), "{cancelled:?}");
    let codes = [steps.0, steps.1, steps.2, stale, late].map(|answer| answer.unwrap_err().code());
    let (aborted, late) = (Code::Aborted, Code::DeadlineExceeded);
    assert_eq!(codes, [aborted, late, Code::DataLoss, aborted, late]);
    // Nobody else's value was taken by those that failed.
    two.send(&never, 9);
    assert_eq!(value_of(&here.recv(&never).await.unwrap()), 9);
    assert!(polled(pin!(here.recv(&never).into_future())).await.is_none());
    drop((here, kept, finished, unknown, waiting));
    two.end().await;
}
