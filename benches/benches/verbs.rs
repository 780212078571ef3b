//! RDMA alone: two queue pairs of one device in one process. Needs a device: scripts/rxe-vm/criterion has one.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use tensorwire_benches::fabric_pair::FabricPair;
use tensorwire_fabric::{Runtime, TokioRuntime, Wait};
use tensorwire_verbs_reactor::{Rdma, VerbsFabric};

fn verbs(criterion: &mut Criterion) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let settings = Rdma::from_environment().expect("settings of RDMA");
    for wait in [Wait::Sleep, Wait::Adaptive] {
        let pair = tokio.block_on(async {
            let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("a runtime"));
            let fabric =
                VerbsFabric::open(runtime.clone(), &settings).expect("an RDMA device").with_wait(wait);
            FabricPair::connect(&fabric, &*runtime).await
        });
        criterion.bench_function(&format!("verbs/write of 8 B with immediate, {wait:?}"), |bencher| {
            bencher.iter(|| tokio.block_on(pair.write()));
        });
    }
}

criterion_group!(benches, verbs);
criterion_main!(benches);
