//! Lives of a worker, apart from its keys.

use futures::future::join;
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{Worker, WorkerError};

use super::{Given, SENDER, SENDER_CPU, Two, faults::forgotten, long, number, value_of};

pub(crate) async fn s3_5_a_stale_incarnation_is_aborted_and_both_are_named(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("foo");
    two.send(&key, 1);
    let stale = key.with_incarnation(0xbad);
    let (here, there) = (
        two.sender.shared_step(1).send(&stale, number(&two.sender, 2)),
        two.receiver.shared_step(1).recv(&stale).await,
    );
    let own = two.sender.key(SENDER_CPU, SENDER_CPU, "own").unwrap().with_incarnation(0xbad);
    let own = two.sender.shared_step(1).recv(&own).await;
    let now = format!("{:016x}", two.sender.incarnation());
    for error in [here.unwrap_err(), there.unwrap_err(), own.unwrap_err()] {
        assert_eq!(error.code(), Code::Aborted, "{error}");
        let text = error.to_string();
        assert!(text.contains("0000000000000bad") && text.contains(&now) && text.contains(SENDER), "{text}");
    }
    // The key of no particular life, and that of this one, are served.
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), 1);
    two.send(&key, 2);
    let current = key.with_incarnation(two.sender.incarnation());
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&current).await.unwrap()), 2);
    two.end().await;
}

/// Ends the sender while a receive waits at it, starts it again, and uses the old key.
async fn restarted(ground: Given, at_same_address: bool) {
    let two = Two::new(&ground).await;
    let (key, received_key) = (two.key("foo"), two.key("received"));
    let before = two.sender.incarnation();
    two.sender.shared_step(1).send(&received_key, long(&two.sender, 1)).unwrap();
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&received_key).await.unwrap()), 1);
    let step = two.receiver.shared_step(2);
    let asked = two.asked();
    let Two { receiver, sender, .. } = two;
    let address = sender.address().to_owned();
    let killed = async {
        super::until(&ground, || Two::peer_counters(&sender).received.tensor_request > asked).await;
        ground.kill(sender.clone()).await;
    };
    let (lost, ()) = join(step.recv(&key).into_future(), killed).await;
    let lost = lost.unwrap_err();
    assert!(matches!(lost, WorkerError::PeerLost { .. } | WorkerError::Remote { .. }), "{lost}");
    drop(sender);
    forgotten(&ground, &receiver, before).await;
    let sender = ground.start(Worker::builder(SENDER), at_same_address.then_some(address.as_str())).await;
    assert_ne!(sender.incarnation(), before);
    if !at_same_address {
        receiver.peer_at(sender.address()).await.unwrap();
    }
    let two = Two { ground, sender, receiver };
    // The old key, of the step that was not under way, and of a new one.
    for id in [1, 3] {
        two.sender.shared_step(id).send(&key, long(&two.sender, 7)).unwrap();
        assert_eq!(value_of(&two.receiver.shared_step(id).recv(&key).await.unwrap()), 7);
    }
    // One that names the life before is refused, and both are named.
    let stale = two.receiver.shared_step(3).recv(&key.with_incarnation(before)).await.unwrap_err();
    let text = stale.to_string();
    assert!(matches!(&stale, WorkerError::Remote { status, .. } if status.code == Code::Aborted), "{text}");
    assert!(text.contains(&format!("{before:016x}")), "{text}");
    assert!(text.contains(&format!("{:016x}", two.sender.incarnation())), "{text}");
    drop(step);
    two.end().await;
}

pub(crate) async fn d_restart_at_the_same_address_keeps_keys_working(ground: Given) {
    restarted(ground, true).await;
}

pub(crate) async fn d_restart_at_another_address_keeps_keys_working(ground: Given) {
    restarted(ground, false).await;
}
