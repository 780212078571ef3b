//! The same through a worker's steps: from its own table, and from another worker.

use std::{future::Future, sync::Arc, time::Duration};

use futures::{FutureExt, poll};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::copy::{CopyReason, count};
use tensorwire_protocol::{Code, DataType, Key};
use tensorwire_rendezvous::{
    AllocatorAttributes, CancellationToken, DuplicatePolicy, RecvArgs, SendArgs, Sharing, Tensor, Worker,
    WorkerBuilder, WorkerError,
};

use crate::family::{
    device::{Masked, Stream, Way},
    support::{number, pool, read_number, run, until},
};

const PS: &str = "/job:ps/replica:0/task:0";
const WORKER: &str = "/job:worker/replica:0/task:0";

fn of(name: &str) -> WorkerBuilder {
    Worker::builder(name).timeout(Duration::from_secs(20))
}

fn key(worker: &Worker, source: &str, destination: &str) -> Key {
    worker.key(&format!("{PS}/{source}"), &format!("{PS}/{destination}"), "edge").unwrap()
}

/// Runs `case` with two workers, on each fabric.
fn between_two<F: Future<Output = ()>>(case: impl Fn(Worker, Worker, Key) -> F) {
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        run(async {
            let (ps, worker) = (of(PS).require(kind), of(WORKER).require(kind));
            let (ps, worker) = (ps.start().await.unwrap(), worker.start().await.unwrap());
            worker.peer_at(ps.address()).await.unwrap();
            let (source, destination) = (format!("{PS}/device:GPU:0"), format!("{WORKER}/device:GPU:0"));
            let key = ps.key(&source, &destination, "edge").unwrap();
            case(ps.clone(), worker.clone(), key).await;
            worker.shutdown().await;
            ps.shutdown().await;
        });
    }
}

#[test]
fn s2_6_a_receiver_on_the_same_worker_sees_the_senders_context() {
    run(async {
        let worker = of(PS).start().await.unwrap();
        let (step, key) = (worker.shared_step(1), key(&worker, "CPU:0", "CPU:0"));
        let (sent, own) = (Stream::new(123), Stream::new(1));
        let args = SendArgs { device_context: Some(sent.clone()), ..SendArgs::default() };
        step.send_with(&key, args, number(7)).unwrap();
        let args = RecvArgs { device_context: Some(own.clone()), ..RecvArgs::default() };
        let got = step.recv(&key).with(args).await.unwrap();
        assert!(Arc::ptr_eq(&got.send_args.device_context.unwrap(), &(sent as _)));
        assert!(Arc::ptr_eq(&got.recv_args.device_context.unwrap(), &(own as _)));
        assert_eq!(read_number(&got.tensor), 7);
        worker.shutdown().await;
    });
}

#[test]
fn s2_5_a_token_ends_a_receive_from_the_own_worker() {
    run(async {
        let worker = of(PS).start().await.unwrap();
        let (step, key, token) =
            (worker.shared_step(1), key(&worker, "CPU:0", "CPU:0"), CancellationToken::new());
        let mut waiting = Box::pin(step.recv(&key).with(until(&token)).into_future());
        assert!(poll!(&mut waiting).is_pending());
        token.cancel();
        for ended in [
            waiting.await,
            step.recv(&key).with(until(&token)).into_future().now_or_never().expect("at once"),
        ] {
            let Err(WorkerError::Cancelled { status, .. }) = ended else { panic!("{ended:?}") };
            assert_eq!(
                (status.code, status.message.as_str()),
                (Code::Cancelled, "[_Derived_]RecvAsync is cancelled.")
            );
        }
        step.send(&key, number(7)).unwrap();
        assert_eq!(read_number(&step.recv(&key).with(until(&token)).await.unwrap().tensor), 7);
        worker.shutdown().await;
    });
}

#[test]
fn s2_7_every_receive_of_a_device_value_on_the_same_worker_gets_it_where_it_is_wanted() {
    run(async {
        let worker = of(PS).start().await.unwrap();
        let (step, key, device) = (worker.shared_step(1), key(&worker, "GPU:0", "GPU:1"), Masked::new(0x55));
        let plain = Tensor::from_values(worker.pool(), &[4], &[1u8, 2, 3, 4]).unwrap();
        for _ in 0..4 {
            step.send_with(&key, device.from(), device.convert(&plain)).unwrap();
        }
        assert_eq!(step.recv(&key).await.unwrap().bytes(), plain.bytes());
        assert_eq!(step.recv_many(std::slice::from_ref(&key)).await.unwrap()[0].bytes(), plain.bytes());
        let buffer = worker.receive_pool().try_alloc(4).unwrap();
        assert_eq!(
            step.recv(&key).into_buffer(buffer).dtype(DataType::U8).await.unwrap().bytes(),
            plain.bytes()
        );
        let other = Masked::new(0x0F);
        let got = step.recv(&key).with(other.to()).await.unwrap();
        assert_eq!(got.tensor.bytes(), other.masked(plain.bytes()));
        assert_eq!((device.copies().len(), other.copies().len()), (4, 1));
        worker.shutdown().await;
    });
}

#[test]
fn s2_7_host_values_on_the_same_worker_are_shared() {
    run(async {
        let worker = of(PS).start().await.unwrap();
        let (step, key) = (worker.shared_step(1), key(&worker, "CPU:0", "GPU:0"));
        let sent = number(7);
        let before = count(CopyReason::Local);
        step.send(&key, sent.clone()).unwrap();
        step.send(&key, sent.clone()).unwrap();
        let got =
            [step.recv(&key).await.unwrap(), step.recv(&key).with(RecvArgs::default()).await.unwrap().tensor];
        assert!(got.iter().all(|got| got.bytes().as_ptr() == sent.bytes().as_ptr()));
        assert_eq!(count(CopyReason::Local), before);
        worker.shutdown().await;
    });
}

#[test]
fn s2_7_what_cannot_be_copied_on_the_same_worker_is_an_error_and_stays() {
    run(async {
        let worker = of(PS).start().await.unwrap();
        let (step, key, device) = (worker.shared_step(1), key(&worker, "CPU:0", "GPU:0"), Masked::new(0x55));
        let words = Tensor::from_strings(worker.pool(), &[], &["word"]).unwrap();
        step.send(&key, words).unwrap();
        match step.recv(&key).with(device.to()).await {
            Err(WorkerError::Local { status, .. }) => assert_eq!(status.code, Code::InvalidArgument),
            other => panic!("{other:?}"),
        }
        assert_eq!(step.recv(&key).await.unwrap().strings().unwrap(), ["word"]);
        worker.shutdown().await;
    });
}

#[test]
fn s2_4_a_worker_reports_or_tolerates_duplicates() {
    run(async {
        let duplicated = |what, ended: Option<WorkerError>| match ended {
            Some(WorkerError::Aborted { status, .. }) => {
                assert_eq!(status.code, Code::Aborted);
                assert!(status.message.starts_with(&format!("Duplicated {what}: ")), "{status}");
            }
            other => panic!("{other:?}"),
        };
        let worker = of(PS).duplicates(DuplicatePolicy::Report).start().await.unwrap();
        let (step, edge) = (worker.shared_step(1), key(&worker, "CPU:0", "CPU:0"));
        step.send(&edge, number(7)).unwrap();
        duplicated("send", step.send(&edge, number(8)).err());
        assert_eq!(read_number(&step.recv(&edge).await.unwrap()), 7);
        duplicated("recv", step.recv(&edge).await.err());
        // Of one step.
        worker.shared_step(2).send(&edge, number(9)).unwrap();
        worker.shutdown().await;

        let worker = of(PS).duplicates(DuplicatePolicy::Tolerate).start().await.unwrap();
        let (step, edge) = (worker.shared_step(1), key(&worker, "CPU:0", "CPU:0"));
        step.send(&edge, number(7)).unwrap();
        duplicated("send", step.send(&edge, number(8)).err());
        for _ in 0..3 {
            assert_eq!(read_number(&step.recv(&edge).await.unwrap()), 7);
        }
        worker.shutdown().await;
    });
}

#[test]
fn s2_4_a_peer_receives_a_tolerated_value_again() {
    run(async {
        let ps = of(PS).duplicates(DuplicatePolicy::Tolerate).start().await.unwrap();
        let worker = of(WORKER).start().await.unwrap();
        worker.peer_at(ps.address()).await.unwrap();
        let key = ps.key(&format!("{PS}/CPU:0"), &format!("{WORKER}/CPU:0"), "edge").unwrap();
        ps.shared_step(1).send(&key, Tensor::from_values(ps.pool(), &[], &[7u32]).unwrap()).unwrap();
        for _ in 0..3 {
            assert_eq!(read_number(&worker.shared_step(1).recv(&key).await.unwrap()), 7);
        }
        worker.shutdown().await;
        ps.shutdown().await;
    });
}

#[test]
fn s2_3_a_value_of_another_worker_has_blank_send_args() {
    between_two(|ps, worker, key| async move {
        let pinned = AllocatorAttributes { gpu_compatible: true, ..AllocatorAttributes::default() };
        let device = Masked::new(0x55);
        let plain = Tensor::from_values(ps.pool(), &[4], &[1u8, 2, 3, 4]).unwrap();
        let args = SendArgs { attributes: pinned, ..device.from() };
        ps.shared_step(1).send_with(&key, args, device.convert(&plain)).unwrap();
        let got = worker.shared_step(1).recv(&key).with(RecvArgs::default()).await.unwrap();
        assert!(got.send_args.device_context.is_none());
        assert_eq!(got.send_args.attributes, AllocatorAttributes::default());
        // It was copied to memory of the host that the network reaches.
        assert_eq!(got.tensor.bytes(), plain.bytes());
        let attributes = AllocatorAttributes { on_host: true, gpu_compatible: true, nic_compatible: true };
        assert_eq!(device.copies(), [(Way::ToHost, attributes)]);
    });
}

#[test]
fn a_value_in_the_memory_of_no_worker_is_copied_on_its_way() {
    between_two(|ps, worker, key| async move {
        let sent = Tensor::from_values(&pool(), &[20_000], &vec![3u8; 20_000]).unwrap();
        // The second time its metadata is known.
        for _ in 0..2 {
            ps.shared_step(1).send(&key, sent.clone()).unwrap();
            assert_eq!(worker.shared_step(1).recv(&key).await.unwrap().bytes(), sent.bytes());
        }
        ps.publish("published", sent.clone()).unwrap();
        let peer = worker.peer(ps.name()).unwrap();
        for sharing in [Sharing::Copy, Sharing::View] {
            let got = peer.fetch("published").sharing(sharing).await.unwrap();
            assert_eq!(got.bytes(), sent.bytes());
        }
    });
}

#[test]
fn s2_7_a_value_of_another_worker_comes_to_the_device_it_is_wanted_on() {
    between_two(|ps, worker, key| async move {
        let (step, device) = (worker.shared_step(1), Masked::stopped(0x55));
        // One that travels inside a message, and one that is written.
        for bytes in [4, 20_000] {
            let plain = Tensor::from_values(ps.pool(), &[bytes], &vec![3u8; bytes as usize]).unwrap();
            ps.shared_step(1).send(&key, plain.clone()).unwrap();
            // Dropped while it is copied: the next receive gets it.
            let (mut dropped, begun) =
                (Box::pin(step.recv(&key).with(device.to()).into_future()), device.begun());
            while device.begun() == begun {
                assert!(poll!(&mut dropped).is_pending());
                tokio::task::yield_now().await;
            }
            drop(dropped);
            device.permits.add_permits(1);
            let got = step.recv(&key).with(device.to()).await.unwrap();
            assert_eq!(got.tensor.bytes(), device.masked(plain.bytes()));
            assert_eq!(got.tensor.shape(), [bytes]);
        }
        assert_eq!(device.copies().len(), 2);
    });
}

#[test]
fn s2_5_a_token_ends_a_receive_from_another_worker() {
    between_two(|ps, worker, key| async move {
        let (step, token) = (worker.shared_step(1), CancellationToken::new());
        let mut waiting = Box::pin(step.recv(&key).with(until(&token)).into_future());
        assert!(poll!(&mut waiting).is_pending());
        token.cancel();
        // The second one asks the peer: a value that is there wins over a token that is cancelled.
        for ended in [waiting.await, step.recv(&key).with(until(&token)).await] {
            let Err(error @ WorkerError::Cancelled { .. }) = ended else { panic!("{ended:?}") };
            assert!(error.to_string().contains("[_Derived_]RecvAsync is cancelled."), "{error}");
        }
        ps.shared_step(1).send(&key, number(7)).unwrap();
        assert_eq!(read_number(&step.recv(&key).await.unwrap()), 7);
    });
}
