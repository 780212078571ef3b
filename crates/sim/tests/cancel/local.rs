//! Cancelled receives of the rendezvous of one process.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_memory::{Pool, PoolConfig};
use tensorwire_protocol::{Key, Status};
use tensorwire_rendezvous::{
    Delivered, IntraProcessRendezvous, LocalConfig, LocalRendezvous, RecvArgs, SendArgs, Tensor,
};
use tensorwire_sim::Handle;

use super::{for_every_k, on_seeds, polled, workers::Slow};

/// What this file cancels.
pub(super) const CASES: [&str; 4] =
    ["device_recv", "device_recv_timeout", "local_recv", "local_recv_timeout"];

const LIMIT: Duration = Duration::from_secs(30);

fn key() -> Key {
    Key::builder().source("/CPU:0").destination("/GPU:0").edge("edge").build().unwrap()
}

/// Receives the values 0, 1, 2, … in order, and cancels receives after every number k of polls.
async fn receives<F: Future<Output = Result<Delivered, Status>>>(
    what: &str,
    runtime: Arc<dyn Runtime>,
    send: impl Fn(Tensor),
    receive: impl Fn() -> F,
) {
    let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("values") }).unwrap();
    let mut next = 0u32;
    for_every_k(what, async |polls| {
        let sending = async {
            if next % 2 == 1 {
                runtime.sleep(Duration::from_micros(10)).await;
            }
            send(Tensor::from_values(&pool, &[], &[next]).unwrap());
        };
        let (given_up, ()) = join(polled(polls, receive()), sending).await;
        let completed = given_up.is_some();
        let delivered = match given_up {
            Some(delivered) => delivered,
            None => receive().await,
        };
        assert_eq!(delivered.unwrap().tensor.values::<u32>().unwrap(), [next]);
        next += 1;
        completed && polls > 5
    })
    .await;
}

fn config(handle: &Handle) -> (LocalConfig, Arc<dyn Runtime>) {
    let runtime = handle.start_node("local:1").unwrap().runtime();
    (LocalConfig { runtime: Some(runtime.clone()), ..LocalConfig::default() }, runtime)
}

#[test]
fn s3_a_receive_from_a_local_rendezvous_given_up_loses_and_doubles_nothing() {
    on_seeds(async |handle: Handle| {
        let (config, runtime) = config(&handle);
        let (local, key) = (LocalRendezvous::with_config(config), key());
        let send = |tensor| local.send(&key, SendArgs::default(), tensor).unwrap();
        receives("local_recv", runtime.clone(), send, || local.recv(&key, RecvArgs::default())).await;
        let limited = || local.recv_timeout(&key, RecvArgs::default(), LIMIT);
        receives("local_recv_timeout", runtime, send, limited).await;
        assert_eq!(local.waiting_values(), 0);
    });
}

#[test]
fn s3_a_receive_onto_a_device_of_one_process_given_up_loses_and_doubles_nothing() {
    on_seeds(async |handle: Handle| {
        let (config, runtime) = config(&handle);
        let (devices, key) = (IntraProcessRendezvous::with_config(config), key());
        let slow = Arc::new(Slow(runtime.clone()));
        let args = RecvArgs { device_context: Some(slow), ..RecvArgs::default() };
        let send = |tensor| devices.send(&key, SendArgs::default(), tensor).unwrap();
        receives("device_recv", runtime.clone(), send, || devices.recv(&key, args.clone())).await;
        let limited = || devices.recv_timeout(&key, args.clone(), LIMIT);
        receives("device_recv_timeout", runtime, send, limited).await;
        let (slow, none) = (RecvArgs::default(), Duration::from_millis(1));
        assert!(devices.recv_timeout(&key, slow, none).await.is_err(), "a value came twice");
    });
}
