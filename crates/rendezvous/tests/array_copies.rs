//! How often the bytes of arrays of other crates are copied on their way to a peer. The counters are the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use dlpark::ffi::{DLDataType, DLManagedTensor};
use ndarray::Array2;

use crate::{bounded::bounded, fabrics::over, rdma::patient, two::Two};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::{
    DlpackMemory, UserMemory,
    copy::{CopyReason, count},
};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker};

const BYTES: usize = 4 << 20;

/// Of an import, of a write over shared memory, within the process, and into or out of a message.
fn copied() -> [u64; 4] {
    let reasons = [CopyReason::Import, CopyReason::ShmPayload, CopyReason::Local, CopyReason::Eager];
    reasons.map(|reason| count(reason).bytes)
}

fn since(before: [u64; 4]) -> [u64; 4] {
    let after = copied();
    std::array::from_fn(|at| after[at] - before[at])
}

/// A tensor of each kind of array, of [`BYTES`] each.
fn tensors(memory: &UserMemory) -> Vec<Tensor> {
    let bytes = Bytes::from(vec![1u8; BYTES]);
    let array = Array2::from_elem((1024, 1024), 2.0f32);
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![BYTES], &bytes).unwrap();
    let file = safetensors::serialize([("t", view)], None).unwrap();
    let file = memory.buffer_of(Arc::new(file)).unwrap();
    let foreign = UserMemory::new().buffer_of(Arc::new(vec![3u8; BYTES])).unwrap();
    let foreign =
        DlpackMemory::<DLManagedTensor>::of_buffer(foreign, DLDataType::U8, &[BYTES as u64]).unwrap();
    let before = copied();
    let tensors = vec![
        Tensor::from_owned_bytes(memory, DataType::U8, &[BYTES as u64], bytes).unwrap(),
        Tensor::from_array(memory, array).unwrap(),
        Tensor::from_safetensors(&file).unwrap().remove(0).1,
        Tensor::from_dlpack(memory, foreign).unwrap(),
    ];
    assert_eq!(since(before), [0; 4], "a conversion copies");
    tensors
}

async fn fetched(kind: FabricKind) -> Vec<[u64; 4]> {
    let two = Two::of(|name| over(Worker::builder(name), kind)).await;
    let mut counts = Vec::new();
    for tensor in tensors(two.server.user_memory()) {
        two.server.publish("t", tensor.clone()).unwrap();
        let before = copied();
        let got = two.peer.fetch("t").await.unwrap();
        counts.push(since(before));
        assert!(got.bytes() == tensor.bytes());
        let before = copied();
        let (exported, bytes) = (got.to_dlpack().unwrap(), Bytes::from(got.clone()));
        assert_eq!(got.as_safetensors().unwrap().data().as_ptr(), bytes.as_ptr());
        assert_eq!(exported.validate().unwrap().data_ptr().cast(), bytes.as_ptr());
        if got.dtype() == DataType::F32 {
            assert_eq!(got.as_array::<f32>().unwrap().as_ptr().cast(), bytes.as_ptr());
        }
        assert_eq!(since(before), [0; 4], "a conversion copies");
    }
    two.end().await;
    counts
}

#[test]
fn arrays_are_converted_and_sent_over_tcp_without_a_copy() {
    let _turn = crate::turn();
    bounded(patient(Duration::from_secs(60)), async {
        assert_eq!(fetched(FabricKind::TCP).await, [[0; 4]; 4]);
        // Into the pool, which the peer maps, and out of it.
        let bytes = BYTES as u64;
        assert_eq!(fetched(FabricKind::SHM).await, [[bytes, bytes, 0, 0]; 4]);
    });
}
