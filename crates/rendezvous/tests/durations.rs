//! Each time that a user may set, at its ends: it works, or it is refused by its name. None ends a thread of the worker.

use std::time::Duration;

use futures::{
    FutureExt,
    future::{Either, join, join_all, select, try_join},
};
use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{
    IntraProcessRendezvous, LocalRendezvous, RecvArgs, SendArgs, Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlError, ControlPlane, GrpcConfig, GrpcPlane, handshake},
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
            let offer = server.offer(tensor(&server));
            let ended = [
                peer.fetch("t").timeout(time).await.err(),
                peer.fetch_many(["t"]).timeout(time).await.err(),
                peer.list().timeout(time).await.err(),
                remote.clone().timeout(time).fetch().await.err(),
                from.recv("one").timeout(time).await.err(),
                from.recv_many(["two"]).timeout(time).await.err(),
                peer.fetch_offered(offer.ticket(), time).await.err(),
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

#[test]
fn the_limit_of_a_handshake_is_usable_at_its_ends() {
    bounded(LIMIT, async {
        let [dialling, accepting] =
            [(); 2].map(|()| GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap());
        let runtime = TokioRuntime::current().unwrap();
        let introduction = |worker: &str| handshake::Introduction {
            worker: worker.to_owned(),
            incarnation: 1,
            listen_address: None,
            fabrics: Vec::new(),
        };
        let (one, other, address) = (introduction("one"), introduction("other"), accepting.local_address());
        let secret = dialling.ambient_secret(&address).await.unwrap();
        for time in ENDS {
            let mut sessions = try_join(dialling.dial(&address), accepting.accept()).await.unwrap();
            let (secret, here) = (secret.as_ref(), &mut sessions.0);
            let dialled = handshake::dial(here, &one, secret, &runtime, time, &address);
            let accepted = handshake::accept(&mut sessions.1, &other, secret, &runtime, time);
            if let Err(error) = try_join(dialled, accepted).await {
                assert!(time < Duration::MAX, "{time:?}: {error}");
            }
        }
        futures::join!(dialling.close(), accepting.close());
    });
}

#[test]
fn the_time_of_a_receive_within_a_process_is_usable_at_its_ends() {
    bounded(LIMIT, async {
        let worker = Worker::client().start().await.unwrap();
        let key = worker.key("one", "other", "edge").unwrap();
        let (local, process) = (LocalRendezvous::new(), IntraProcessRendezvous::new());
        for time in ENDS {
            // A value that is there is returned, however short the time is.
            local.send(&key, SendArgs::default(), tensor(&worker)).unwrap();
            process.send(&key, SendArgs::default(), tensor(&worker)).unwrap();
            local.recv_timeout(&key, RecvArgs::default(), time).await.unwrap();
            process.recv_timeout(&key, RecvArgs::default(), time).await.unwrap();
            // One that comes later is returned if there is time.
            let later = async {
                local.send(&key, SendArgs::default(), tensor(&worker)).unwrap();
                process.send(&key, SendArgs::default(), tensor(&worker)).unwrap();
            };
            let received = [
                local.recv_timeout(&key, RecvArgs::default(), time).boxed(),
                process.recv_timeout(&key, RecvArgs::default(), time).boxed(),
            ];
            for (ended, again) in join(join_all(received), later).await.0.into_iter().zip([true, false]) {
                if let Err(status) = ended {
                    assert!(
                        time < Duration::MAX && status.code == Code::DeadlineExceeded,
                        "{time:?}: {status}"
                    );
                    let forever = LIMIT;
                    match again {
                        true => local.recv_timeout(&key, RecvArgs::default(), forever).await.unwrap(),
                        false => process.recv_timeout(&key, RecvArgs::default(), forever).await.unwrap(),
                    };
                }
            }
        }
        worker.shutdown().await;
    });
}
