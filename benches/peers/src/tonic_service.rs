//! tonic: gRPC over TCP, one unary call each.

use std::hint::black_box;

use crate::{
    grpc,
    plan::{Fault, Figure, Plan, check_length, parent_is_done, ready},
};

pub(crate) async fn serve(plan: &Plan) -> Result<(), Fault> {
    grpc::serve(&[plan.bytes], ready, parent_is_done()).await
}

pub(crate) async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    let mut puller = grpc::Puller::connect(address).await?;
    plan.time(async || {
        let pulled = puller.pull(plan.bytes).await?;
        check_length(plan.bytes, black_box(&pulled).len())
    })
    .await
}
