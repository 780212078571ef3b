//! Each time that a user may set, at its ends: it works, or it is refused by its name. None ends a thread of the worker.

use std::time::Duration;

use futures::future::{Either, select};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlError, ControlPlane, GrpcConfig, GrpcPlane},
};

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

type PlaneRow = (&'static str, fn(GrpcConfig, Duration) -> GrpcConfig);

const PLANE: [PlaneRow; 4] = [
    ("dial_limit", |config, time| config.dial_limit(time)),
    ("arrival_limit", |config, time| config.arrival_limit(time)),
    ("keepalive, interval", |config, time| config.keepalive(time, LIMIT)),
    ("keepalive, timeout", |config, time| config.keepalive(LIMIT, time)),
];

/// A frame from `from` to `to`, unless the session ends before.
async fn passes(from: &GrpcPlane, to: &GrpcPlane) -> Result<(), ControlError> {
    let mut dialled = from.dial(&to.local_address()).await?;
    let mut accepted = match select(to.accept(), dialled.receiver.recv()).await {
        Either::Left((accepted, _)) => accepted?,
        Either::Right((ended, _)) => return Err(ended.err().unwrap_or(ControlError::Closed)),
    };
    dialled.sender.send(vec![7]).await?;
    let passed = accepted.receiver.recv().await?.ok_or(ControlError::Closed)?;
    assert_eq!(passed, [7]);
    Ok(())
}

#[test]
fn each_time_of_a_plane_is_usable_at_its_ends() {
    bounded(LIMIT, async {
        for (field, set) in PLANE {
            for time in ENDS {
                let bind = |config| GrpcPlane::bind(config).unwrap();
                let plane = bind(set(GrpcConfig::new("127.0.0.1:0"), time));
                let usual = bind(GrpcConfig::new("127.0.0.1:0"));
                for passed in [passes(&plane, &usual).await, passes(&usual, &plane).await] {
                    if let Err(error) = passed {
                        assert!(time < Duration::MAX, "{field} = {time:?}: {error}");
                    }
                }
                futures::join!(plane.close(), usual.close());
            }
        }
    });
}
