//! The cases of TensorFlow's remote rendezvous manager. What the manager receives for itself comes out of the
//! worker's own table here, and what it receives for a peer by that peer's request.

use std::{sync::Arc, time::Duration};

use futures::future::{join, join_all};
use tensorwire_protocol::{Code, Key, Status};
use tensorwire_rendezvous::{CancellationToken, DeviceContext, RecvArgs, SendArgs, WorkerError};

use super::{
    Given, RECEIVER, SENDER, SENDER_CPU, Two,
    basics::{Stream, is_cancelled, stream, with_token},
    long, number, value_of,
};

/// The key of an edge between two devices of the sender.
fn own_key(two: &Two, edge: &str) -> Key {
    two.sender.key(SENDER_CPU, SENDER_CPU, edge).unwrap()
}

pub(crate) async fn s2_9_m01_local_send_recv(ground: Given) {
    let two = Two::new(&ground).await;
    let (own, across) = (own_key(&two, "foo"), two.key("foo"));
    let step = two.sender.shared_step(123);
    step.send(&own, number(&two.sender, 1)).unwrap();
    step.send(&across, number(&two.sender, 2)).unwrap();
    assert_eq!(value_of(&two.sender.shared_step(123).recv(&own).await.unwrap()), 1);
    assert_eq!(value_of(&two.receiver.shared_step(123).recv(&across).await.unwrap()), 2);
    two.end().await;
}

pub(crate) async fn s2_9_m02_local_abort(ground: Given) {
    let two = Two::new(&ground).await;
    let key = own_key(&two, "foo");
    for (id, cleans_up) in [(123, false), (321, true)] {
        let step = two.sender.shared_step(id);
        let end = async {
            ground.runtime().sleep(Duration::from_millis(100)).await;
            if cleans_up {
                two.sender.cleanup(id);
            } else {
                two.sender.shared_step(id).abort(&Status::new(Code::Aborted, "enough"));
            }
        };
        let (received, ()) = join(step.recv(&key).into_future(), end).await;
        let error = received.unwrap_err();
        assert!(matches!(&error, WorkerError::Aborted { step, .. } if *step == id), "{error}");
        assert_eq!(error.code(), Code::Aborted);
    }
    two.end().await;
}

pub(crate) async fn s2_9_m03_local_cancel(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (own_key(&two, "foo"), CancellationToken::new());
    let step = two.sender.shared_step(123);
    let cancel = async {
        ground.runtime().sleep(Duration::from_millis(10)).await;
        token.cancel();
    };
    let (received, ()) = join(step.recv(&key).with(with_token(&token)).into_future(), cancel).await;
    assert!(is_cancelled(&received), "{received:?}");
    two.end().await;
}

pub(crate) async fn s2_9_m04_cancel_after_received(ground: Given) {
    let two = Two::new(&ground).await;
    let (key, token) = (own_key(&two, "foo"), CancellationToken::new());
    let step = two.sender.shared_step(123);
    step.send(&key, number(&two.sender, 4)).unwrap();
    let received = step.recv(&key).with(with_token(&token)).await;
    token.cancel();
    assert_eq!(value_of(&received.unwrap().tensor), 4);
    two.end().await;
}

pub(crate) async fn s2_9_m05_transfer_dummy_device_context(ground: Given) {
    let two = Two::new(&ground).await;
    let key = own_key(&two, "foo");
    let context = |number| Some(Arc::new(Stream(number)) as Arc<dyn DeviceContext>);
    let args = SendArgs { device_context: context(123), ..SendArgs::default() };
    let step = two.sender.shared_step(123);
    step.send_with(&key, args, number(&two.sender, 5)).unwrap();
    let args = RecvArgs { device_context: context(1), ..RecvArgs::default() };
    let delivered = step.recv(&key).with(args).await.unwrap();
    assert_eq!(value_of(&delivered.tensor), 5);
    assert_eq!(delivered.send_args.device_context.as_ref().and_then(stream), Some(123));
    two.end().await;
}

pub(crate) async fn s2_9_m06_cleanup_all(ground: Given) {
    let two = Two::new(&ground).await;
    let (own, across) = (own_key(&two, "foo"), two.key("foo"));
    for id in [1, 2] {
        two.sender.shared_step(id).send(&own, number(&two.sender, 1)).unwrap();
        two.sender.shared_step(id).send(&across, number(&two.sender, 2)).unwrap();
    }
    two.sender.cleanup_all();
    assert_eq!(two.sender.pool().stats().used_bytes, 0, "buffered values are dropped");
    for id in [1, 2] {
        let here = two.sender.shared_step(id).recv(&own).await.unwrap_err();
        let there = two.receiver.shared_step(id).recv(&across).await.unwrap_err();
        assert_eq!((here.code(), there.code()), (Code::Aborted, Code::Aborted), "{here} {there}");
        assert!(there.to_string().contains(&format!("step {id}")), "{there}");
    }
    // Steps that nobody has used are not concerned.
    two.sender.shared_step(3).send(&across, number(&two.sender, 3)).unwrap();
    assert_eq!(value_of(&two.receiver.shared_step(3).recv(&across).await.unwrap()), 3);
    two.end().await;
}

pub(crate) async fn s2_9_m07_remote_recv_one(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    assert_ne!(SENDER.split('/').nth(1), RECEIVER.split('/').nth(1), "the source is in another job");
    two.sender.shared_step(123).send(&key, long(&two.sender, 6)).unwrap();
    assert_eq!(value_of(&two.receiver.shared_step(123).recv(&key).await.unwrap()), 6);
    two.end().await;
}

pub(crate) async fn s2_9_m08_remote_recv_async_many(ground: Given) {
    const MANY: u64 = 10_000;
    let two = Two::with(&ground, |builder| builder.flow(|flow| flow.requests_max = 1000)).await;
    let keys: Vec<Key> = (0..MANY).map(|edge| two.key(&format!("{edge}"))).collect();
    let step = two.receiver.shared_step(123);
    let receives = join_all(keys.iter().map(|key| step.recv(key).into_future()));
    let send = async {
        two.until_asked(1).await;
        let step = two.sender.shared_step(123);
        for (value, key) in keys.iter().enumerate() {
            step.send(key, number(&two.sender, value as u64)).unwrap();
        }
    };
    let (received, ()) = join(receives, send).await;
    for (value, received) in received.into_iter().enumerate() {
        assert_eq!(value_of(&received.unwrap()), value as u64);
    }
    two.end().await;
}
