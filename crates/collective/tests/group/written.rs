//! Writes to an export of a rank that has no memory for them.

use std::time::Duration;

use tensorwire_collective::GroupError;
use tensorwire_fabric::FabricKind;
use tensorwire_memory::{Buf, copy::CopyReason};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker};

use super::{joined, over_fabrics, worker};
use crate::rdma::{End, over_at};

over_fabrics! {
    a_rank_without_memory_answers_that,
}

/// More than a worker has.
const LENGTH: usize = 3 << 20;

async fn a_rank_without_memory_answers_that(fabric: FabricKind) {
    let small = over_at(Worker::builder("small"), fabric, End::Left);
    let small = small.memory(|memory| memory.source_bytes = 2 << 20).start().await.unwrap();
    let other = worker("other", fabric).await;
    let ranks = joined(vec![small, other], Duration::from_secs(20)).await;
    let [owner, writer] = &ranks.groups[..] else { panic!("two ranks") };
    let content = Buf::on_heap(&vec![7; LENGTH], CopyReason::Import);
    let export = owner.export(Tensor::shared(content, DataType::U8, &[LENGTH as u64]).unwrap()).unwrap();
    let error = writer.put(&export.key(), 0, &[1, 2, 3]).await.unwrap_err();
    assert!(matches!(error, GroupError::NoMemory { rank: 0, .. }), "{error}");
    assert!(export.tensor().unwrap().bytes().iter().all(|byte| *byte == 7), "nothing was written");
    if fabric == FabricKind::SHM {
        // Other ranks can read it only after a copy into memory that they can map.
        let error = writer.get(&export.key(), 0..3).await.unwrap_err();
        assert!(matches!(error, GroupError::NoMemory { rank: 0, .. }), "{error}");
    }
    drop(export);
    ranks.shutdown().await;
}
