//! One process of the cluster: its tensorwire worker, and its requests to the others.

use std::{error::Error, fmt::Display, time::Duration};

use tensorwire::{Element, FabricKind, Peer, Tensor, Worker, WorkerError, settings::ClusterSpec};
use tensorwire_examples::{
    command_line::{Flags, Job, Role},
    mlp::TensorSpec,
    training::{ModelKind, Plan},
};
use tokio::time::Instant;

/// Under this name a worker publishes the step that it has reached, and a server that of each worker.
pub(crate) const STEP: &str = "step";
/// What a worker publishes under this name has the numbers of the rows that it pulls in a step.
pub(crate) const ROWS: &str = "rows";
/// The pause before another attempt to reach a peer.
const PAUSE: Duration = Duration::from_millis(50);
/// After this time, and again each time it has passed, a process prints which peer it waits for.
pub(crate) const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Why a process ends early.
pub(crate) type Failure = Box<dyn Error>;

/// This process in the cluster.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) worker: Worker,
    pub(crate) plan: Plan,
    /// All tensors of the parameters.
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) servers: u32,
    pub(crate) workers: u32,
    patience: Duration,
}

impl Node {
    /// Joins the cluster of `flags` as `role`; without one as a client, from which no process fetches.
    pub(crate) async fn start(flags: &Flags, role: Option<Role>) -> Result<Self, Failure> {
        let cluster =
            ClusterSpec::new().hosts("ps", flags.hosts(Job::Ps)).hosts("worker", flags.hosts(Job::Worker));
        cluster.check()?;
        let [servers, workers] = [cluster.tasks("ps")?.len() as u32, cluster.tasks("worker")?.len() as u32];
        let plan = flags.plan(workers);
        let tensors = plan.tensors();
        if servers as usize > tensors.len() {
            return Err(format!("--ps-hosts has {servers} hosts: name {} at most", tensors.len()).into());
        }
        let mut builder = match role {
            None => Worker::client().cluster(cluster),
            Some(Role { job, index }) => {
                let count = if job == Job::Ps { servers } else { workers };
                if index >= count {
                    return Err(format!("--task-index = `{index}`: give 0 to {}", count - 1).into());
                }
                Worker::builder_for_task(cluster, job.name(), index)?
            }
        };
        let named = [FabricKind::SHM, FabricKind::TCP, FabricKind::VERBS];
        if let Some(kind) = named.into_iter().find(|kind| kind.name() == flags.fabric) {
            builder = builder.require(kind);
        }
        if let Some(path) = &flags.secret_file {
            builder = builder.secret_file(path);
        }
        let patience = Duration::from_secs(flags.patience);
        let worker = builder.timeout(patience).start().await?;
        Ok(Self { worker, plan, tensors, servers, workers, patience })
    }

    /// All processes of a job.
    pub(crate) fn all(&self, job: Job) -> impl Iterator<Item = Role> {
        let count = if job == Job::Ps { self.servers } else { self.workers };
        (0..count).map(move |index| Role { job, index })
    }

    /// The tensors that server `index` holds, by their index: tensor `n` is at server `n % servers`.
    pub(crate) fn tensors_of(&self, index: u32) -> impl Iterator<Item = usize> {
        (index as usize..self.tensors.len()).step_by(self.servers as usize)
    }

    /// Whether workers pull only the rows of the weights that their samples need.
    pub(crate) fn is_sparse(&self) -> bool {
        self.plan.model == ModelKind::Linear
    }

    /// Publishes a tensor of `step`. That of the previous step stays published, because other processes, above all restarted
    /// ones, may still be at that step.
    pub(crate) fn publish_at(&self, name: &str, step: u64, tensor: Tensor) -> Result<(), WorkerError> {
        self.worker.publish(&at(name, step), tensor)?;
        if let Some(old) = step.checked_sub(2) {
            self.worker.withdraw(&at(name, old));
        }
        Ok(())
    }

    /// Publishes a few values under a name that stays, instead of the earlier values.
    pub(crate) fn publish_values<T: Element>(&self, name: &str, values: &[T]) -> Result<(), WorkerError> {
        let tensor = Tensor::from_values(self.worker.pool(), &[values.len() as u64], values)?;
        self.worker.publish(name, tensor).map(drop)
    }

    /// A tensor of these values in memory that peers can read.
    pub(crate) fn tensor(&self, shape: &[u64], values: &[f32]) -> Result<Tensor, WorkerError> {
        Tensor::from_values(self.worker.pool(), shape, values)
    }

    /// The peer of a role. It is connected on first use.
    pub(crate) fn peer(&self, role: Role) -> Result<Peer, WorkerError> {
        self.worker.peer(&ClusterSpec::worker_name(role.job.name(), role.index))
    }

    /// Fetches the tensors that `role` publishes under `names`, as soon as it does.
    pub(crate) async fn fetch(&self, role: Role, names: &[String]) -> Result<Vec<Tensor>, Failure> {
        let peer = self.peer(role)?;
        self.patiently(async || peer.fetch_many(names).wait().await).await
    }

    /// Repeats `attempt` until it succeeds, because an unreachable peer may be starting, or restarting. Gives up when
    /// the user's patience is over.
    pub(crate) async fn patiently<T, E: Display>(
        &self,
        mut attempt: impl AsyncFnMut() -> Result<T, E>,
    ) -> Result<T, Failure> {
        let began = Instant::now();
        let mut reported = began;
        loop {
            let error = match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if began.elapsed() >= self.patience {
                return Err(format!("given up after {} seconds: {error}", self.patience.as_secs()).into());
            }
            if reported.elapsed() >= REPORT_EVERY {
                reported = Instant::now();
                println!("waiting      {error} ({} s so far)", began.elapsed().as_secs());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The name of a value in `step`: `gradient of w1@17`.
pub(crate) fn at(name: &str, step: u64) -> String {
    format!("{name}@{step}")
}

/// The name of the gradient that a worker publishes.
pub(crate) fn gradient_of(tensor: &TensorSpec) -> String {
    format!("gradient of {}", tensor.name)
}

/// The name under which a server publishes the rows of a tensor that a worker pulls.
pub(crate) fn rows_for(tensor: &TensorSpec, worker: u32) -> String {
    format!("{} for worker {worker}", tensor.name)
}

/// The set in which a worker keeps a copy of what a server has committed.
pub(crate) fn copy_of(server: u32) -> String {
    format!("copy of ps {server}")
}
