//! Groups whose ranks are workers of this process, over shared memory and TCP, and some over RDMA if there is a device.

mod agreement;
mod calls;
mod cut_store;
mod deriving;
mod endings;
mod forgetful_store;
mod gloo;
mod hosts;
mod joining;
mod many_newcomers;
mod newcomers;
mod numbers;
mod offered;
mod poisoned_store;
mod reductions;
mod refused;
mod shrinking;
mod silent_store;
mod spans;
#[cfg(feature = "test-certificates")]
mod tls;
mod written;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::{BoxFuture, JoinAll};
use tensorwire_collective::{Algorithm, Group, store::MemoryStore};
use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_rendezvous::{Tensor, Worker};

use crate::{
    join_all::join_all,
    rdma::{End, over_at, patient},
};

/// Enough for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The ranks of a group, and their workers.
pub(crate) struct Ranks {
    pub(crate) workers: Vec<Worker>,
    pub(crate) groups: Vec<Group>,
}

/// A store of this process.
fn store() -> Arc<MemoryStore> {
    let runtime = TokioRuntime::current().expect("inside a runtime");
    Arc::new(MemoryStore::new(Arc::new(runtime)))
}

/// Over verbs, workers take turns at the devices.
pub(crate) async fn worker(name: impl AsRef<str>, fabric: FabricKind) -> Worker {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let is_left = STARTED.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    let builder =
        over_at(Worker::builder(name.as_ref()), fabric, if is_left { End::Left } else { End::Right });
    builder.start().await.expect("a worker")
}

/// Joins `size` workers, with a limit for each call.
pub(crate) async fn ranks_within(fabric: FabricKind, size: usize, limit: Duration) -> Ranks {
    // A worker of another process that comes to a port which was free again would be met as the one of its name.
    let name = |rank| format!("rank_{rank}_of_{}", std::process::id());
    let workers = join_all((0..size).map(async |rank| worker(name(rank), fabric).await)).await;
    joined(workers, limit).await
}

/// Joins these workers.
pub(crate) async fn joined(workers: Vec<Worker>, limit: Duration) -> Ranks {
    let (store, size) = (store(), workers.len());
    let joining = workers.iter().enumerate().map(async |(rank, worker)| {
        let builder = Group::builder(store.clone(), rank, size).name("tests").timeout(limit);
        builder.join(worker).await.expect("a group")
    });
    let groups = join_all(joining).await;
    Ranks { workers, groups }
}

pub(crate) async fn ranks(fabric: FabricKind, size: usize) -> Ranks {
    ranks_within(fabric, size, patient(PATIENCE)).await
}

impl Ranks {
    /// What every rank's `run` returns, in the order of the ranks. They run at the same time.
    pub(crate) fn each<'run, Running: Future + Send + 'run>(
        &self,
        run: impl Fn(Group) -> Running,
    ) -> JoinAll<BoxFuture<'run, Running::Output>> {
        join_all(self.groups.iter().map(|group| run(group.clone())))
    }

    pub(crate) async fn shutdown(self) {
        let Self { workers, groups, .. } = self;
        drop(groups);
        join_all(workers.iter().map(Worker::shutdown)).await;
    }
}

/// The algorithms that the group's ranks can use.
pub(crate) fn algorithms(group: &Group) -> impl Iterator<Item = Algorithm> + use<> {
    let is_on_one_host = group.hosts().len() == 1;
    Algorithm::ALL.into_iter().filter(move |algorithm| is_on_one_host || *algorithm != Algorithm::Views)
}

pub(crate) fn tensor(group: &Group, values: &[i32]) -> Tensor {
    Tensor::from_values(group.worker().pool(), &[values.len() as u64], values).expect("a tensor")
}

pub(crate) fn values(tensor: &Tensor) -> Vec<i32> {
    tensor.values().expect("numbers")
}

/// The suites of `$name` over each fabric.
macro_rules! over_fabrics {
    ($($name:ident,)*) => {
        mod shm {
            $(#[tokio::test] async fn $name() { super::$name(tensorwire_fabric::FabricKind::SHM).await; })*
        }
        mod tcp {
            $(#[tokio::test] async fn $name() { super::$name(tensorwire_fabric::FabricKind::TCP).await; })*
        }
    };
}
pub(crate) use over_fabrics;

/// The suites of `$name` over verbs, if there is a device.
macro_rules! over_verbs {
    ($($name:ident,)*) => {
        mod verbs {
            $(
                #[tokio::test]
                #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
                async fn $name() { super::$name(tensorwire_fabric::FabricKind::VERBS).await; }
            )*
        }
    };
}
pub(crate) use over_verbs;

/// As [`over_fabrics`] and [`over_verbs`].
macro_rules! over_fabrics_and_verbs {
    ($($name:ident,)*) => {
        crate::group::over_fabrics! { $($name,)* }
        crate::group::over_verbs! { $($name,)* }
    };
}
use over_fabrics_and_verbs;

/// The sizes for which the fabric's machine is fast enough. The machine with RDMA devices is emulated.
pub(crate) fn possible(
    fabric: FabricKind,
    sizes: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    let most = if fabric == FabricKind::VERBS { 4 } else { usize::MAX };
    sizes.into_iter().filter(move |size| *size <= most)
}
