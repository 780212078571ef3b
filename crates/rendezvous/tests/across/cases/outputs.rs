//! Inputs and outputs of a step.

use std::collections::BTreeMap;

use futures::future::join;
use tensorwire_protocol::{Code, DataType, Key, Status};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};

use super::{Given, RECEIVER_CPU, SENDER_CPU, Two, long, number, value_of};

pub(crate) async fn s2_3_inputs_and_outputs_go_by_key(ground: Given) {
    let two = Two::new(&ground).await;
    let keys: Vec<Key> = ["c", "a", "b"].iter().map(|edge| two.key(edge)).collect();
    let inputs = keys.iter().cloned().zip([3, 1, 2].map(|value| long(&two.sender, value)));
    two.sender.shared_step(1).send_inputs(inputs).unwrap();
    // One of this worker's own beside those of a peer.
    let own = two.receiver.key(RECEIVER_CPU, RECEIVER_CPU, "own").unwrap();
    let step = two.receiver.shared_step(1);
    step.send_inputs([(own.clone(), number(&two.receiver, 4))]).unwrap();
    let asked: Vec<Key> = keys.iter().chain([&own]).cloned().collect();
    let outputs = step.recv_outputs(&asked).await.unwrap();
    let values: BTreeMap<&str, u64> =
        outputs.iter().map(|(key, tensor)| (key.edge(), value_of(tensor))).collect();
    assert_eq!(values, BTreeMap::from([("a", 1), ("b", 2), ("c", 3), ("own", 4)]));
    assert!(step.recv_outputs(&[]).await.unwrap().is_empty());
    let twice = step.recv_outputs(&[own.clone(), own.clone()]).await.unwrap_err();
    assert!(matches!(&twice, WorkerError::BadKey { key, .. } if *key == own.to_string()), "{twice}");
    // What is refused names its key; what comes before it is sent.
    let elsewhere = two.key("elsewhere");
    let inputs = [(own.clone(), number(&two.receiver, 5)), (elsewhere.clone(), number(&two.receiver, 6))];
    let refused = step.send_inputs(inputs).unwrap_err();
    assert!(
        matches!(&refused, WorkerError::WrongWorker { key, .. } if *key == elsewhere.to_string()),
        "{refused}"
    );
    assert_eq!(value_of(&step.recv(&own).await.unwrap()), 5);
    drop((step, outputs));
    two.end().await;
}

pub(crate) async fn s2_3_a_dead_output_is_an_error_that_names_its_key(ground: Given) {
    let two = Two::new(&ground).await;
    let (live, dead) = (two.key("live"), two.key("dead"));
    let own = two.receiver.key(RECEIVER_CPU, RECEIVER_CPU, "dead").unwrap();
    two.sender.shared_step(1).send(&live, long(&two.sender, 1)).unwrap();
    two.sender.shared_step(1).send(&dead, Tensor::dead(DataType::F32, &[]).unwrap()).unwrap();
    let step = two.receiver.shared_step(1);
    step.send(&own, Tensor::dead(DataType::F32, &[]).unwrap()).unwrap();
    for key in [&dead, &own] {
        let error = step.recv_outputs(&[live.clone(), key.clone()]).await.unwrap_err();
        assert!(
            matches!(&error, WorkerError::DeadOutput { key: named } if *named == key.to_string()),
            "{error}"
        );
        assert_eq!(error.code(), Code::InvalidArgument);
        // Nothing is lost by that.
        assert!(step.recv(key).await.unwrap().is_dead());
    }
    assert_eq!(value_of(&step.recv(&live).await.unwrap()), 1);
    drop(step);
    two.end().await;
}

pub(crate) async fn s2_5_a_root_cause_wins_over_what_follows_from_it(ground: Given) {
    const OTHER: &str = "/job:ps/replica:0/task:1";
    const OTHER_CPU: &str = "/job:ps/replica:0/task:1/device:CPU:0";
    let two = Two::new(&ground).await;
    let other = ground.start(Worker::builder(OTHER), None).await;
    two.receiver.peer_at(other.address()).await.unwrap();
    let keys = [two.receiver.key(OTHER_CPU, RECEIVER_CPU, "out").unwrap(), two.key("out")];
    assert!(keys[0] > keys[1] && two.receiver.key(SENDER_CPU, RECEIVER_CPU, "out").is_ok());
    for id in [1, 2] {
        let step = two.receiver.shared_step(id);
        // One worker ends the step because the other has failed, and its answer may well come first.
        let (follows, cause) = (other.shared_step(id), two.sender.shared_step(id));
        let end = async {
            let asked = || Two::peer_counters(&other).received.tensor_request;
            super::until(&ground, || asked() >= id as u64 && two.asked() >= id as u64).await;
            follows.abort(&Status::new(Code::Aborted, "the other has failed"));
            let answered = || Two::peer_counters(&other).sent.error_status;
            super::until(&ground, || answered() >= id as u64).await;
            if id == 1 {
                cause.abort(&Status::new(Code::DataLoss, "the disk is broken"));
            } else {
                cause.send(&keys[1], number(&two.sender, 1)).unwrap();
            }
        };
        let (outputs, ()) = join(step.recv_outputs(&keys), end).await;
        let error = outputs.unwrap_err();
        let WorkerError::Remote { transfer, status } = &error else { panic!("{error}") };
        if id == 1 {
            assert_eq!((transfer.peer.as_str(), status.code), (two.sender.name(), Code::DataLoss), "{error}");
        } else {
            // Nothing else has failed, so this is the error; the value that arrived can still be received.
            assert!(transfer.peer == OTHER && error.is_derived(), "{error}");
            assert_eq!(value_of(&step.recv(&keys[1]).await.unwrap()), 1);
        }
    }
    other.shutdown().await;
    two.end().await;
}
