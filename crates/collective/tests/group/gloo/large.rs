//! LargeBroadcast: a tensor whose length in bytes does not fit 31 bits.

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

use crate::group::ranks;

mod shm {
    #[tokio::test]
    #[ignore = "takes 4 GiB of memory, and up to a minute: .ci/long runs it"]
    async fn large_broadcast() {
        super::large_broadcast(tensorwire_fabric::FabricKind::SHM).await;
    }
}

mod tcp {
    #[tokio::test]
    #[ignore = "takes 4 GiB of memory, and up to a minute: .ci/long runs it"]
    async fn large_broadcast() {
        super::large_broadcast(tensorwire_fabric::FabricKind::TCP).await;
    }
}

/// Bytes that are compared at a time.
const PART: usize = 1 << 20;

/// 2 GiB, and an incomplete part.
const BYTES: usize = 2048 * PART + 12;

/// Makes part `number` distinct: each of its pages begins with its own number.
fn fill(part: &mut [u8], number: usize) {
    for (at, page) in part.chunks_mut(4096).enumerate() {
        let number = (number << 16 | at) as u64;
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
}

async fn large_broadcast(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let mut pattern: Vec<u8> = (0..PART).map(|at| (at % 251) as u8).collect();
    let mut buffer = ranks.workers[1].pool().alloc(BYTES).await.unwrap();
    for (number, part) in buffer.chunks_mut(PART).enumerate() {
        fill(&mut pattern, number);
        part.copy_from_slice(&pattern[..part.len()]);
    }
    let tensor = Tensor::new(buffer, DataType::F32, &[BYTES as u64 / 4]).unwrap();
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let (got, sent) =
        futures::join!(zero.broadcast(1, None).into_future(), one.broadcast(1, Some(tensor)).into_future());
    drop(sent.unwrap());
    let got = got.unwrap();
    assert_eq!((got.dtype(), got.shape()), (DataType::F32, &[BYTES as u64 / 4][..]));
    for (number, part) in got.bytes().chunks(PART).enumerate() {
        fill(&mut pattern, number);
        assert!(part == &pattern[..part.len()], "part {number}");
    }
    drop(got);
    ranks.shutdown().await;
}
