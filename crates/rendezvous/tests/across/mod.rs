//! Cases of whole workers over shm, tcp and verbs. The same run on the simulator: `crates/sim/tests/across.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cases;

use std::{sync::Arc, time::Duration};

use crate::bounded::bounded_on;
use crate::{fabrics::over, rdma::patient};
use cases::{Given, Ground};
use tensorwire_fabric::{BoxFuture, FabricKind, Runtime, TokioRuntime};
use tensorwire_rendezvous::{Worker, WorkerBuilder};

/// Workers of this process, on a real fabric.
struct Real {
    kind: FabricKind,
    runtime: Arc<TokioRuntime>,
}

impl Ground for Real {
    fn runtime(&self) -> Arc<dyn Runtime> {
        self.runtime.clone()
    }

    fn start(&self, builder: WorkerBuilder, address: Option<&str>) -> BoxFuture<'static, Worker> {
        let builder = over(builder, self.kind).bind(address.unwrap_or("127.0.0.1:0"));
        Box::pin(async { builder.start().await.unwrap() })
    }

    /// Within one process a worker can only be shut down; `processes` kills others.
    fn kill(&self, worker: Worker) -> BoxFuture<'static, ()> {
        Box::pin(async move { worker.shutdown().await })
    }

    fn moment(&self, turns: u32, _: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
        })
    }

    fn must_reach(&self, _: &[&'static str]) {}

    fn reached(&self, _: &'static str) {}

    #[allow(clippy::disallowed_methods)] // a task of a test that runs on tokio itself
    fn beside(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        let task = tokio::spawn(task);
        Box::pin(async move { task.await.unwrap() })
    }
}

/// Runs `case` on several threads, with a watchdog.
fn run<F: Future<Output = ()>>(kind: FabricKind, case: impl FnOnce(Given) -> F) {
    bounded_on(2, patient(Duration::from_secs(100)), async {
        let ground = Real { kind, runtime: Arc::new(TokioRuntime::current().unwrap()) };
        case(Arc::new(ground)).await;
    });
}

macro_rules! over_shm {
    ($($module:ident::$case:ident)*) => {
        $(#[test] fn $case() { crate::across::run(tensorwire_fabric::FabricKind::SHM, crate::across::cases::$module::$case); })*
    };
}

macro_rules! over_tcp {
    ($($module:ident::$case:ident)*) => {
        $(#[test] fn $case() { crate::across::run(tensorwire_fabric::FabricKind::TCP, crate::across::cases::$module::$case); })*
    };
}

macro_rules! over_verbs {
    ($($module:ident::$case:ident)*) => {
        $(
            #[test]
            #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
            fn $case() {
                crate::across::run(tensorwire_fabric::FabricKind::VERBS, crate::across::cases::$module::$case);
            }
        )*
    };
}

mod shm {
    crate::across::cases::every_case!(over_shm);
}

mod tcp {
    crate::across::cases::every_case!(over_tcp);
}

mod verbs {
    crate::across::cases::every_case!(over_verbs);
}
