//! Values of branches not taken pass through every member of the family.

use futures::FutureExt;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    DuplicatePolicy, IntraProcessRendezvous, LocalConfig, LocalRendezvous, RecvArgs, SendArgs,
    SimpleRendezvous, Tensor,
};

use crate::family::{
    device::Masked,
    support::{CPU, GPU, key, key_between},
};

fn dead() -> Tensor {
    Tensor::dead(DataType::F32, &[3]).unwrap()
}

fn is_as_sent(tensor: &Tensor) -> bool {
    tensor.is_dead() && tensor.metadata() == dead().metadata() && tensor.bytes().is_empty()
}

#[test]
fn s2_3_a_dead_value_is_received_dead_from_a_local_rendezvous() {
    for duplicates in [DuplicatePolicy::Queue, DuplicatePolicy::Report, DuplicatePolicy::Tolerate] {
        let config = LocalConfig { duplicates, ..LocalConfig::default() };
        let rendezvous = LocalRendezvous::with_config(config);
        let first = rendezvous.recv(&key("waits"), RecvArgs::default());
        for edge in ["waits", "is there"] {
            rendezvous.send(&key(edge), SendArgs::default(), dead()).unwrap();
        }
        let second = rendezvous.recv(&key("is there"), RecvArgs::default());
        assert!(
            [first, second].map(|got| got.now_or_never().unwrap().unwrap().tensor).iter().all(is_as_sent)
        );
    }
}

#[test]
fn s2_8_a_dead_value_needs_no_copy_between_devices() {
    let (rendezvous, device) = (IntraProcessRendezvous::new(), Masked::new(0x55));
    for (source, destination) in [(CPU, GPU), (GPU, CPU)] {
        for tensor in [dead(), Tensor::dead(DataType::String, &[2]).unwrap()] {
            let key = key_between(source, destination, "edge");
            rendezvous.send(&key, device.from(), tensor.clone()).unwrap();
            let got = rendezvous.recv(&key, device.to()).now_or_never().unwrap().unwrap();
            assert_eq!(got.tensor.metadata(), tensor.metadata());
        }
    }
    assert!(device.copies().is_empty());
}

#[test]
fn s2_8_a_dead_value_is_received_dead_from_a_simple_rendezvous() {
    let rendezvous = SimpleRendezvous::new();
    rendezvous.send("edge", dead()).unwrap();
    assert!(is_as_sent(&rendezvous.recv("edge").unwrap()));
}
