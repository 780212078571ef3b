//! Each time that a user may set, at its ends: it works, or it is refused by its name. None ends a thread of the worker.

use std::time::Duration;

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Tensor, Worker, WorkerBuilder, WorkerError};

use crate::bounded::bounded;

const LIMIT: Duration = Duration::from_secs(30);

/// The ends of a duration, and whether a worker with this setting starts. One that starts serves, and is served if the setting
/// leaves time for it.
type Row = (&'static str, fn(WorkerBuilder, Duration) -> WorkerBuilder, [bool; 3]);

const ENDS: [Duration; 3] = [Duration::ZERO, Duration::from_nanos(1), Duration::MAX];

const BUILDER: [Row; 4] = [
    ("timeout", |builder, time| builder.timeout(time), [false, true, true]),
    ("shutdown_grace", |builder, time| builder.shutdown_grace(time), [true, true, true]),
    ("liveness", |builder, time| builder.liveness(time), [false, false, true]),
    (
        "step_init_timeout",
        |builder, time| builder.limits(|limits| limits.step_init_timeout = time),
        [false, true, true],
    ),
];

fn tensor(worker: &Worker) -> Tensor {
    Tensor::from_values(worker.pool(), &[1], &[7_u8]).unwrap()
}

/// Fetches both ways. With a deadline that cannot be kept that is the error.
async fn serves_and_is_served(field: &str, time: Duration, worker: &Worker, kind: FabricKind) {
    let other = Worker::client().fabrics([kind]).start().await.unwrap();
    for holder in [worker, &other] {
        holder.publish("t", tensor(holder)).unwrap();
    }
    // Sessions are dialled within the worker's deadline, too.
    let hasty = field == "timeout" && time < Duration::from_secs(1);
    let fetched = async {
        let (to, back) = (other.peer_at(worker.address()).await?, worker.peer_at(other.address()).await?);
        to.fetch("t").await?;
        back.fetch("t").await
    };
    match fetched.await {
        Ok(tensor) => assert_eq!(tensor.bytes(), [7]),
        Err(error) => assert!(hasty, "{field} = {time:?} over {kind}: {error}"),
    }
    other.shutdown().await;
}

#[test]
fn each_time_of_a_worker_is_usable_at_its_ends_or_refused_by_its_name() {
    bounded(LIMIT, async {
        for (field, set, starts) in BUILDER {
            for (time, starts) in ENDS.into_iter().zip(starts) {
                for kind in [FabricKind::SHM, FabricKind::TCP] {
                    match set(Worker::builder("timed").fabrics([kind]), time).start().await {
                        Ok(worker) => {
                            assert!(starts, "{field} = {time:?} is refused");
                            serves_and_is_served(field, time, &worker, kind).await;
                            worker.shutdown().await;
                        }
                        Err(WorkerError::Config { field: named, .. }) => {
                            assert_eq!((named, starts), (field, false), "{time:?}");
                        }
                        Err(error) => panic!("{field} = {time:?}: {error}"),
                    }
                }
            }
        }
    });
}

#[test]
fn each_time_of_an_operation_is_usable_at_its_ends() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").start().await.unwrap();
        let client = Worker::builder("client").start().await.unwrap();
        server.publish("t", tensor(&server)).unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        let (sending, receiving) = (server.step(1), client.step(1));
        let to = server.peer_at(client.address()).await.unwrap();
        let remote = peer.tensor("t").unwrap();
        peer.fetch("t").await.unwrap();
        for time in ENDS {
            for name in ["one", "two"] {
                sending.to(&to).send(name, tensor(&server)).unwrap();
            }
            let from = receiving.from(&peer);
            let ended = [
                peer.fetch("t").timeout(time).await.err(),
                peer.fetch_many(["t"]).timeout(time).await.err(),
                peer.list().timeout(time).await.err(),
                remote.clone().timeout(time).fetch().await.err(),
                from.recv("one").timeout(time).await.err(),
                from.recv_many(["two"]).timeout(time).await.err(),
            ];
            let late = |error: &WorkerError| matches!(error, WorkerError::DeadlineExceeded { .. });
            for (index, error) in
                ended.iter().enumerate().filter_map(|(at, error)| Some((at, error.as_ref()?)))
            {
                assert!(time < Duration::MAX && late(error), "operation {index} within {time:?}: {error}");
            }
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}
