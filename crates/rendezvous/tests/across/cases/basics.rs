//! The cases of TensorFlow's rendezvous, from one worker to another.

use std::{sync::Arc, time::Duration};

use futures::future::{join, join_all};
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::{Code, Key, Status};
use tensorwire_rendezvous::{
    AllocatorAttributes, CancellationToken, DeviceContext, RecvArgs, SendArgs, Step, Tensor, WorkerError,
};

use super::{Given, Numbers, RECEIVER_CPU, SENDER_CPU, Two, long, number, until, value_of};

const CANCELLED: &str = "[_Derived_]RecvAsync is cancelled.";

/// A context that is only looked at.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) u32);

impl DeviceContext for Stream {
    fn to_host(&self, _: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(async { panic!("nothing is on this device") })
    }

    fn to_device(&self, _: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(async { panic!("nothing is on this device") })
    }
}

pub(crate) fn stream(context: &Arc<dyn DeviceContext>) -> Option<u32> {
    (&**context as &dyn std::any::Any).downcast_ref::<Stream>().map(|stream| stream.0)
}

pub(crate) fn with_token(token: &CancellationToken) -> RecvArgs {
    RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() }
}

pub(crate) fn is_cancelled<T>(ended: &Result<T, WorkerError>) -> bool {
    let cancelled = |error: &WorkerError| matches!(error, WorkerError::Cancelled { status, .. } if status.message == CANCELLED);
    ended
        .as_ref()
        .is_err_and(|error| cancelled(error) && error.code() == Code::Cancelled && error.is_derived())
}

pub(crate) async fn s2_9_02_send_recv(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    two.send(&key, 7);
    // Not dead either.
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 7);
    two.end().await;
}

pub(crate) async fn s2_9_03_recv_send(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    let step = two.receiver.shared_step(1);
    let send = async {
        two.until_asked(1).await;
        two.send(&key, 8);
    };
    let (received, ()) = join(step.recv(&key).into_future(), send).await;
    assert_eq!(value_of(&received.unwrap()), 8);
    two.end().await;
}

pub(crate) async fn s2_9_04_ping_pong(ground: Given) {
    let two = Two::new(&ground).await;
    let ping = two.key("foo");
    let pong = two.sender.key(RECEIVER_CPU, SENDER_CPU, "bar").unwrap();
    let answer = {
        let (step, ping) = (two.receiver.shared_step(1), ping.clone());
        let pong = two.receiver.key(RECEIVER_CPU, SENDER_CPU, "bar").unwrap();
        ground.beside(Box::pin(async move {
            let received = step.recv(&ping).await.unwrap();
            step.send(&pong, received).unwrap();
        }))
    };
    two.sender.shared_step(1).send(&ping, long(&two.sender, 9)).unwrap();
    let step = two.sender.shared_step(1);
    let (received, ()) = join(step.recv(&pong).into_future(), answer).await;
    assert_eq!(value_of(&received.unwrap()), 9);
    drop(step);
    two.end().await;
}

pub(crate) async fn s2_9_05_cancel_before_recv(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (two.key("foo"), CancellationToken::new());
    token.cancel();
    let received = two.receiver.shared_step(1).recv(&key).with(with_token(&token)).await;
    assert!(is_cancelled(&received), "{received:?}");
    two.send(&key, 1);
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 1);
    two.end().await;
}

pub(crate) async fn s2_9_06_cancel_after_recv(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (two.key("foo"), CancellationToken::new());
    let step = two.receiver.shared_step(1);
    let cancel = async {
        two.until_asked(1).await;
        token.cancel();
    };
    let (received, ()) = join(step.recv(&key).with(with_token(&token)).into_future(), cancel).await;
    assert!(is_cancelled(&received), "{received:?}");
    // Nothing of it is left: the next receive gets the value.
    two.send(&key, 2);
    assert_eq!(value_of(&step.recv(&key).await.unwrap()), 2);
    two.end().await;
}

pub(crate) async fn s2_9_07_cancel_empty_queue(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (two.key("foo"), CancellationToken::new());
    two.send(&key, 3);
    let received = two.receiver.shared_step(1).recv(&key).with(with_token(&token)).await;
    token.cancel();
    assert_eq!(value_of(&received.unwrap().tensor), 3);
    two.send(&key, 4);
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 4);
    two.end().await;
}

/// The sender alone knows whether there is a value, in memory or on its way.
pub(crate) async fn s2_5_a_value_that_waits_wins_over_a_cancelled_token(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (two.key("foo"), CancellationToken::new());
    token.cancel();
    let step = two.receiver.shared_step(1);
    // Short ones travel inside a message, long ones do not; what is known of the key grows.
    for round in 0..3 {
        two.sender.shared_step(1).send(&key, number(&two.sender, round)).unwrap();
        two.sender.shared_step(1).send(&key, long(&two.sender, round + 10)).unwrap();
        for expected in [round, round + 10] {
            let received = step.recv(&key).with(with_token(&token)).await;
            assert_eq!(value_of(&received.unwrap().tensor), expected);
        }
        let received = step.recv(&key).with(with_token(&token)).await;
        assert!(is_cancelled(&received), "{received:?}");
    }
    // A step that the sender has not begun has no values; nothing of the receives is left.
    let received = two.receiver.shared_step(2).recv(&key).with(with_token(&token)).await;
    assert!(is_cancelled(&received), "{received:?}");
    two.send(&key, 4);
    assert_eq!(value_of(&step.recv(&key).await.unwrap()), 4);
    two.end().await;
}

pub(crate) async fn s2_9_08_cancel_multiple(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (two.key("foo"), CancellationToken::new());
    let step = two.receiver.shared_step(1);
    let args = |number| if number % 2 == 0 { with_token(&token) } else { RecvArgs::default() };
    let mut receives: Vec<_> =
        (1..=4).map(|number| Box::pin(step.recv(&key).with(args(number)).into_future())).collect();
    for index in 0..receives.len() {
        two.ask(&mut receives[index..=index], index as u64 + 1).await;
    }
    let send = async {
        token.cancel();
        // Until the CANCELs have arrived, the sender may still answer with a value.
        until(&ground, || Two::peer_counters(&two.receiver).received.cancel_ack >= 2).await;
        two.send(&key, 5);
        two.send(&key, 6);
    };
    let (received, ()) = join(join_all(receives), send).await;
    let [one, two_, three, four] = <[_; 4]>::try_from(received).unwrap();
    assert!(is_cancelled(&two_) && is_cancelled(&four), "{two_:?} {four:?}");
    let mut values = [one, three].map(|received| value_of(&received.unwrap().tensor));
    values.sort_unstable();
    assert_eq!(values, [5, 6]);
    two.end().await;
}

/// Moves 100 values in random order, from 16 tasks at each side.
pub(crate) async fn s2_9_09_random_send_recv(ground: Given) {
    const TASKS: usize = 16;
    let two = Two::new(&ground).await;
    let keys: Vec<(u64, Key)> = (0..100).map(|value| (value, two.key(&format!("random {value}")))).collect();
    let mut tasks = Vec::new();
    for (end, worker) in [two.sender.clone(), two.receiver.clone()].into_iter().enumerate() {
        let shuffled = Numbers::new(end as u64).shuffled(keys.clone());
        for (task, mine) in shuffled.chunks(keys.len().div_ceil(TASKS)).enumerate() {
            let (worker, mine, runtime) = (worker.clone(), mine.to_vec(), ground.runtime());
            let mut numbers = Numbers::new((end * 100 + task) as u64);
            tasks.push(ground.beside(Box::pin(async move {
                let step = worker.shared_step(1);
                for (value, key) in mine {
                    runtime.sleep(Duration::from_micros(100 + numbers.below(1000))).await;
                    if end == 0 {
                        let tensor =
                            if value % 2 == 0 { number(&worker, value) } else { long(&worker, value) };
                        step.send(&key, tensor).unwrap();
                    } else {
                        assert_eq!(value_of(&step.recv(&key).await.unwrap()), value);
                    }
                }
            })));
        }
    }
    join_all(tasks).await;
    two.end().await;
}

pub(crate) async fn s2_9_10_multi_sends(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("many");
    let task = |step: Step, seed: u64| {
        let (key, runtime, mut numbers) = (key.clone(), ground.runtime(), Numbers::new(seed));
        let sender = (seed == 0).then(|| two.sender.clone());
        ground.beside(Box::pin(async move {
            for value in 0..100 {
                if numbers.below(3) == 0 {
                    runtime.sleep(Duration::from_micros(numbers.below(500))).await;
                }
                match &sender {
                    Some(sender) => step.send(&key, number(sender, value)).unwrap(),
                    None => assert_eq!(value_of(&step.recv(&key).await.unwrap()), value),
                }
            }
        }))
    };
    join(task(two.sender.shared_step(1), 0), task(two.receiver.shared_step(1), 1)).await;
    two.end().await;
}

/// Aborts a step at either end while a receive waits in it, and gives what the receive got.
async fn aborted(two: &Two, key: &Key, (id, at_sender): (i64, bool), pause: Duration) -> WorkerError {
    let (here, there) = (two.receiver.shared_step(id), two.sender.shared_step(id));
    let asked = two.asked();
    let abort = async {
        if pause.is_zero() {
            two.until_asked(asked + 1).await;
        } else {
            two.ground.runtime().sleep(pause).await;
        }
        let step = if at_sender { &there } else { &here };
        step.abort(&Status::new(Code::Aborted, "enough"));
    };
    join(here.recv(key).into_future(), abort).await.0.unwrap_err()
}

fn is_abort(error: &WorkerError, at_sender: bool) -> bool {
    let enough = |status: &Status| status.message == "[_Derived_]enough" && status.code == Code::Aborted;
    match error {
        WorkerError::Remote { status, .. } => at_sender && enough(status),
        WorkerError::Aborted { status, .. } => !at_sender && enough(status),
        _ => false,
    }
}

pub(crate) async fn s2_9_11_recv_abort(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    for (id, at_sender) in [(1, false), (2, true)] {
        let error = aborted(&two, &key, (id, at_sender), Duration::ZERO).await;
        assert!(is_abort(&error, at_sender), "{error}");
    }
    two.end().await;
}

pub(crate) async fn s2_9_12_recv_sleep_abort(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    for (id, at_sender) in [(1, false), (2, true)] {
        let error = aborted(&two, &key, (id, at_sender), Duration::from_secs(1)).await;
        assert!(is_abort(&error, at_sender), "{error}");
    }
    two.end().await;
}

pub(crate) async fn s2_9_13_abort_then_recv_or_send(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    two.sender.shared_step(1).abort(&Status::new(Code::Aborted, "first"));
    let refused = two.sender.shared_step(1).send(&key, number(&two.sender, 1)).unwrap_err();
    assert!(matches!(&refused, WorkerError::Aborted { status, .. } if status.message == "[_Derived_]first"));
    let error = two.receiver.shared_step(1).recv(&key).await.unwrap_err();
    assert!(matches!(&error, WorkerError::Remote { .. }) && error.code() == Code::Aborted, "{error}");
    // And at the receiver: the first status stays.
    let step = two.receiver.shared_step(2);
    step.abort(&Status::new(Code::Aborted, "first"));
    step.abort(&Status::new(Code::Cancelled, "second"));
    two.sender.shared_step(2).send(&key, number(&two.sender, 1)).unwrap();
    for error in
        [step.recv(&key).await.unwrap_err(), two.receiver.shared_step(2).recv(&key).await.unwrap_err()]
    {
        assert!(
            matches!(&error, WorkerError::Aborted { status, .. } if status.message == "[_Derived_]first"),
            "{error}"
        );
    }
    two.sender.cleanup(2);
    drop(step);
    two.end().await;
}

/// From another worker the receiver sees its own context alone: the sender's is an object of another process.
pub(crate) async fn s2_9_14_transfer_dummy_device_context(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    let context = |number| Some(Arc::new(Stream(number)) as Arc<dyn DeviceContext>);
    let args = SendArgs { device_context: context(123), ..SendArgs::default() };
    two.sender.shared_step(1).send_with(&key, args, number(&two.sender, 5)).unwrap();
    let args = RecvArgs { device_context: context(1), ..RecvArgs::default() };
    let delivered = two.receiver.shared_step(1).recv(&key).with(args).await.unwrap();
    assert_eq!(value_of(&delivered.tensor), 5);
    assert!(delivered.send_args.device_context.is_none());
    assert_eq!(delivered.recv_args.device_context.as_ref().and_then(stream), Some(1));
    drop(delivered);
    two.end().await;
}
