//! The rank of this process, from the environment variables of its launcher.
//!
//! The first launcher of this table whose rank or size variable is set is used, and no other:
//!
//! | launcher | rank and size | others |
//! | --- | --- | --- |
//! | Tensorwire | `TENSORWIRE_RANK`, `TENSORWIRE_SIZE` | |
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`; job: `TORCHELASTIC_RUN_ID` with `TORCHELASTIC_RESTART_COUNT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE`; job: `PMIX_NAMESPACE` |
//! | MPICH (Hydra) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`; job: `PMI_JOBID` |
//! | Slurm | `SLURM_PROCID`, and `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID`; job: `SLURM_JOB_ID` with `SLURM_STEP_ID` |
//! | Kubernetes (indexed Job) | `JOB_COMPLETION_INDEX`, `TENSORWIRE_SIZE` | |
//!
//! Slurm also sets its number of tasks for shells, and Kubernetes needs `TENSORWIRE_SIZE`: these variables alone choose no
//! launcher. `torchrun` and `mpirun` within a Slurm job come before Slurm, because they start the processes. `srun --mpi=pmi2`
//! sets MPICH's variables, too: if these have Slurm's rank and size, Slurm's are used.
//!
//! `TENSORWIRE_JOB` overrides the launcher's job. The first of these variables gives the store:
//!
//! 1. `TENSORWIRE_STORE`, as `HOST:PORT` or another [`StoreUrl`].
//! 2. `MASTER_ADDR` and `MASTER_PORT`, which torchrun sets, and scripts for other launchers. If torchrun serves its own store at
//!    this port (`TORCHELASTIC_USE_AGENT_STORE` is `True`), the next port is used.
//! 3. With Slurm, the first node of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, where rank 0 runs, or else
//!    `SLURM_LAUNCH_NODE_IPADDR`. The port, from 20,000 to 29,999, is computed from the numbers of the job and the step, so all
//!    ranks find the same.
//!
//! An empty variable counts as not set.

mod nodes;
mod variables;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::Runtime;
use tensorwire_protocol::text::escaped_within;
use tensorwire_rendezvous::{Worker, WorkerBuilder, control::host_and_port};

use self::variables::Variables;
use crate::store::{MemoryStore, PrefixStore, Store, StoreError, StoreUrl, WorkerStore, on_runtime::look_up};

/// This process's rank and job, from the launcher's variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The number of this process in the job, from 0.
    pub rank: usize,
    /// The number of processes in the job, more than `rank`.
    pub size: usize,
    /// The number of this process on its machine, from 0.
    pub local_rank: Option<usize>,
    /// The number of the job's processes on this machine, more than `local_rank`.
    pub local_size: Option<usize>,
    /// Whether all processes of the job run on one machine. `None` if the launcher's variables do not show it.
    pub is_on_one_machine: Option<bool>,
    /// An id of this job that differs from those of other jobs, and after each restart of this one.
    pub job: Option<String>,
    /// The store.
    pub store: Option<StoreUrl>,
    /// The launcher's name.
    pub by: &'static str,
}

/// Why the environment does not give a rank.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A variable is not a whole number.
    #[error("`{variable}` is `{value}`: {by} sets it to a whole number from 0; set it to one, or unset it")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The launcher.
        by: &'static str,
    },
    /// The rank is not below the size.
    #[error(
        "`{rank_variable}` is {rank}, and `{size_variable}` is {size}: ranks are numbered from 0, so the size must be more than \
         each rank; start one process for each rank"
    )]
    RankBeyondSize {
        /// The rank's variable.
        rank_variable: &'static str,
        /// Its value.
        rank: usize,
        /// The size's variable.
        size_variable: &'static str,
        /// Its value.
        size: usize,
    },
    /// The size is 0.
    #[error("`{variable}` is 0: set it to the number of processes of the job")]
    NoRanks {
        /// The size's variable.
        variable: &'static str,
    },
    /// A variable is set without another that it needs.
    #[error(
        "`{given}` is `{value}`, but `{missing}` is not set: {by} needs both; set `{missing}`, or unset `{given}`"
    )]
    Incomplete {
        /// The variable that is set.
        given: &'static str,
        /// Its value.
        value: String,
        /// The one that is not.
        missing: &'static str,
        /// The launcher.
        by: &'static str,
    },
    /// A variable is not the address or URL of a store.
    #[error("`{variable}` is `{value}`: {remedy}")]
    BadAddress {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is wrong, and what to do.
        remedy: String,
    },
    /// The process is the script of a Slurm job, and not a task that `srun` has started.
    #[error(
        "`{size_variable}` is {size}, but `SLURM_STEP_ID` is not that of a step: this is the script of the job, which runs once; start the \
         program by `srun` in it"
    )]
    NotInStep {
        /// The size's variable.
        size_variable: &'static str,
        /// Its value.
        size: usize,
    },
    /// No launcher's variables are set.
    #[error(
        "no launcher's variables are set: start the job with torchrun, mpirun, srun or an indexed Job, or set TENSORWIRE_RANK \
         and TENSORWIRE_SIZE for each process"
    )]
    NotFound,
}

impl Launch {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn from_env() -> Result<Self, LaunchError> {
        // The error shows a value that is not Unicode.
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads variables by `variable`, which returns `None` for those that are not set.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let variables = Variables(&variable);
        for launcher in &LAUNCHERS {
            if let Some((rank, size)) = launcher.rank_and_size(variables)? {
                return launcher.launch(variables, rank, size);
            }
        }
        Err(LaunchError::NotFound)
    }

    /// Settings for this rank's worker, called `name`. If the job's store is `HOST:PORT`, the worker of rank 0 listens there, to serve
    /// the store, regardless of [`bind`](WorkerBuilder::bind). Without a secret or TLS it listens on loopback instead, with the same
    /// port, and the ranks of that machine find it there.
    ///
    /// If a process that is no rank serves the store, start the worker of rank 0 by [`Worker::builder`] instead.
    #[must_use]
    pub fn worker(&self, name: &str) -> WorkerBuilder {
        let builder = Worker::builder(name);
        match self.store.as_ref().and_then(StoreUrl::tcp_address).filter(|_| self.rank == 0) {
            Some(address) => builder.store_address(address),
            None => builder,
        }
    }

    /// Opens the job's store. If the job has an id, it prefixes the keys, so jobs and attempts of a job that share a store do not
    /// see each other's keys. A job of one rank without a store gets one in memory. `limit` is that of [`StoreUrl::open`].
    ///
    /// If the store is `HOST:PORT`, rank 0 serves it if `worker` listens there, as the worker of [`worker`](Self::worker) does. The
    /// other ranks connect. Rank 0 serves its own job alone, and refuses ranks of a job with another id or size.
    ///
    /// # Errors
    /// [`StoreError::BadUrl`] if the job has no store, or one that other processes cannot reach; [`StoreError::Unreachable`] if rank
    /// 0 of another job serves it, for rank 0 at once, and for others after `limit`; [`StoreError::Full`] if the job has more ranks
    /// than the worker of rank 0 may have [sessions](tensorwire_rendezvous::Limits::sessions_max); those of [`StoreUrl::open`].
    ///
    /// # Cancel safety
    /// If dropped, nothing is opened.
    pub async fn open_store(&self, limit: Duration, worker: &Worker) -> Result<Arc<dyn Store>, StoreError> {
        let url = self.reachable_store()?;
        let store = match url.tcp_address() {
            Some(address) => {
                self.check_host(&url, &address, limit, worker.runtime()).await?;
                if self.rank == 0 && worker.listens_at(&address) {
                    self.serve(worker).await?
                } else {
                    self.connect(&address, limit, worker).await?
                }
            }
            None => url.open(limit, worker).await?,
        };
        Ok(match &self.job {
            Some(job) => Arc::new(PrefixStore::new(store, job)),
            None => store,
        })
    }

    fn reachable_store(&self) -> Result<StoreUrl, StoreError> {
        const REMEDY: &str = "set TENSORWIRE_STORE for all ranks, to HOST:PORT on rank 0's machine or to another URL of a store";
        match &self.store {
            None if self.size == 1 => Ok(StoreUrl::MEMORY),
            None => Err(StoreError::BadUrl {
                url: String::new(),
                remedy: format!("{} sets no store; {REMEDY}", self.by),
            }),
            Some(url) if *url == StoreUrl::MEMORY && self.size > 1 => {
                let remedy =
                    format!("it is within one process, and the job has {} processes; {REMEDY}", self.size);
                Err(StoreError::BadUrl { url: url.to_string(), remedy })
            }
            Some(url) => Ok(url.clone()),
        }
    }
}

/// The key in a store that a rank 0 serves, with its [`Launch::record`]. Other stores do not have it.
const SERVED_BY: &str = "served by a rank 0";

/// The pause before a rank checks again whether another job still serves its store at the address.
const OTHER_JOB_PAUSE: Duration = Duration::from_millis(200);

/// The most bytes of a record that an error shows.
const RECORD_BYTES_MAX: usize = 300;

impl Launch {
    /// The id and the size of this job, which all its ranks share.
    fn record(&self) -> String {
        let shown = |job: &String| format!(" `{}`", escaped_within(job, RECORD_BYTES_MAX / 2));
        let job = self.job.as_ref().map_or_else(String::new, shown);
        format!("the job{job} of {} ranks", self.size)
    }

    async fn serve(&self, worker: &Worker) -> Result<Arc<dyn Store>, StoreError> {
        let limit = worker.sessions_max();
        if self.size - 1 > limit {
            let store = format!("the worker of rank 0 of {}", self.size);
            return Err(StoreError::Full { store, what: "sessions (`sessions_max`)", limit });
        }
        let store = MemoryStore::new(Arc::clone(worker.runtime()));
        let record = format!("{}, process {}", self.record(), std::process::id());
        store.set(SERVED_BY, record.as_bytes()).await?;
        store.serve(worker)?;
        Ok(Arc::new(store))
    }

    /// Connects to the store of this job. An earlier job may still serve its store there.
    async fn connect(
        &self,
        address: &str,
        limit: Duration,
        worker: &Worker,
    ) -> Result<Arc<dyn Store>, StoreError> {
        let (own, runtime) = (self.record(), worker.runtime());
        let end = runtime.now().saturating_add(limit);
        let mut before: Option<String> = None;
        loop {
            let left = end.saturating_sub(runtime.now());
            let found = match WorkerStore::connect(worker, address, left).await {
                Ok(store) => served_by(&store).await.map(|other| (store, other)),
                Err(error) => Err(error),
            };
            let (store, other) = match (found, before) {
                (Ok(found), _) => found,
                // The other job may hold the name of this rank's worker for a while.
                (Err(_), Some(other)) => return Err(self.other_job(address, &other)),
                (Err(error), None) => return Err(self.unserved(error, worker)),
            };
            let Some(other) = other.filter(|other| {
                other.rsplit_once(", process ").is_none_or(|it| self.rank == 0 || it.0 != own)
            }) else {
                return Ok(Arc::new(store.within(limit)));
            };
            store.hang_up();
            if self.rank == 0 || runtime.now() >= end {
                return Err(self.other_job(address, &other));
            }
            before = Some(other);
            runtime.sleep(OTHER_JOB_PAUSE).await;
        }
    }

    fn other_job(&self, address: &str, other: &str) -> StoreError {
        let why = match self.rank {
            0 => format!("address in use: rank 0 of {other} serves its store there"),
            _ => format!("rank 0 of {other} serves it, and this process is of {}", self.record()),
        };
        let detail = format!("{why}; give each job a port of its own, or wait until the other has ended");
        StoreError::Unreachable { store: format!("the store at {address}"), detail }
    }

    /// The error of a rank that finds no store. For rank 0 it adds that rank 0 itself must serve it.
    fn unserved(&self, error: StoreError, worker: &Worker) -> StoreError {
        match error {
            StoreError::Unreachable { store, detail } if self.rank == 0 => {
                let own = worker.address();
                let detail = format!(
                    "{detail}. Rank 0 serves it if its worker listens there, but this one listens on {own}: start it by Launch::worker"
                );
                StoreError::Unreachable { store, detail }
            }
            other => other,
        }
    }

    /// Checks that the store's host is not loopback if ranks on other machines must reach it.
    async fn check_host(
        &self,
        url: &StoreUrl,
        address: &str,
        limit: Duration,
        runtime: &Arc<dyn Runtime>,
    ) -> Result<(), StoreError> {
        let found = look_up(address, limit, runtime).await;
        let found: Vec<IpAddr> = found.iter().map(SocketAddr::ip).collect();
        let Some(loopback) = found.first().filter(|_| found.iter().all(|ip| ip.to_canonical().is_loopback()))
        else {
            return Ok(());
        };
        let host = host_and_port(address).map_or(address, |(host, _)| host);
        match self.is_on_one_machine {
            Some(true) => {}
            Some(false) => {
                let remedy = format!(
                    "its host is {loopback} on this machine, which other machines cannot reach, and the job runs on several; give \
                     an address of rank 0's machine in their network, or correct `{host}` in /etc/hosts"
                );
                return Err(StoreError::BadUrl { url: url.to_string(), remedy });
            }
            None if host == "localhost" || host.parse::<IpAddr>().is_ok() => {}
            None => {
                log!(WARN, host, %loopback, "ranks on other machines cannot reach the store: its host is loopback here");
            }
        }
        Ok(())
    }
}

/// The job whose rank 0 serves the store; `None` if no rank does.
async fn served_by(store: &WorkerStore) -> Result<Option<String>, StoreError> {
    let found = store.get(&[SERVED_BY.to_owned()]).await?.pop().flatten();
    Ok(found.map(|record| escaped_within(&String::from_utf8_lossy(&record), RECORD_BYTES_MAX)))
}

/// A launcher, by its variables.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// Its size variables; the first that is set counts.
    sizes: &'static [&'static str],
    /// Whether the size without a rank is an error of this launcher.
    owns_size: bool,
    local_rank: Option<&'static str>,
    local_size: Option<&'static str>,
    /// The job, and its step or attempt.
    job: [Option<&'static str>; 2],
}

const JOB_COMPLETION_INDEX: &str = "JOB_COMPLETION_INDEX";
const SLURM: &str = "Slurm";
const MPICH: &str = "MPICH";

/// The number of a step, which `srun` sets for its tasks. For the job's script it is not set, or at least [`NO_STEP_MIN`].
const STEP: &str = "SLURM_STEP_ID";

/// From this number on, Slurm numbers steps that `srun` did not start.
const NO_STEP_MIN: usize = 0xffff_fff0;

const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        name: "Tensorwire",
        rank: "TENSORWIRE_RANK",
        sizes: &["TENSORWIRE_SIZE"],
        owns_size: true,
        local_rank: None,
        local_size: None,
        job: [None, None],
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        sizes: &["WORLD_SIZE"],
        owns_size: true,
        local_rank: Some("LOCAL_RANK"),
        local_size: Some("LOCAL_WORLD_SIZE"),
        job: [Some("TORCHELASTIC_RUN_ID"), Some("TORCHELASTIC_RESTART_COUNT")],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        sizes: &["OMPI_COMM_WORLD_SIZE"],
        owns_size: true,
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: [Some("PMIX_NAMESPACE"), None],
    },
    Launcher {
        name: MPICH,
        rank: "PMI_RANK",
        sizes: &["PMI_SIZE"],
        owns_size: true,
        local_rank: Some("MPI_LOCALRANKID"),
        local_size: Some("MPI_LOCALNRANKS"),
        job: [Some("PMI_JOBID"), None],
    },
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        sizes: &SLURM_SIZES,
        owns_size: false,
        local_rank: Some("SLURM_LOCALID"),
        local_size: None,
        job: [Some("SLURM_JOB_ID"), Some(STEP)],
    },
    Launcher {
        name: "Kubernetes",
        rank: JOB_COMPLETION_INDEX,
        sizes: &["TENSORWIRE_SIZE"],
        owns_size: false,
        local_rank: None,
        local_size: None,
        job: [None, None],
    },
];

const SLURM_SIZES: [&str; 2] = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];

/// A number, and its variable.
type Named = (&'static str, usize);

impl Launcher {
    /// The rank and the size. `None` if this launcher did not start the process.
    fn rank_and_size(&self, variables: Variables<'_>) -> Result<Option<(Named, Named)>, LaunchError> {
        let size = self.sizes.iter().find_map(|name| Some((*name, variables.get(name)?)));
        match (variables.get(self.rank), size) {
            (None, Some((given, value))) if self.owns(given, variables) => {
                Err(LaunchError::Incomplete { given, value, missing: self.rank, by: self.name })
            }
            (None, _) => Ok(None),
            (Some(value), None) => {
                // All versions set the last one, which is the oldest.
                let missing = self.sizes.last().copied().unwrap_or_default();
                Err(LaunchError::Incomplete { given: self.rank, value, missing, by: self.name })
            }
            (Some(rank), Some((name, size))) => {
                let rank = (self.rank, variables::number(self.rank, rank, self.name)?);
                let size = (name, variables::number(name, size, self.name)?);
                self.check_step(variables, size)?;
                Ok((!self.is_srun(variables, rank.1, size.1)).then_some((rank, size)))
            }
        }
    }

    /// Whether `srun` started this process, although it has MPICH's variables: `srun --mpi=pmi2` sets them, too, to the same numbers.
    fn is_srun(&self, variables: Variables<'_>, rank: usize, size: usize) -> bool {
        let is = |name: &str, number: usize| variables.get(name).is_some_and(|set| set.parse() == Ok(number));
        self.name == MPICH
            && is("SLURM_PROCID", rank)
            && SLURM_SIZES.iter().any(|name| is(name, size))
            && variables.get(STEP).is_some()
    }

    /// The script of a Slurm job has the variables of rank 0, and no other ranks.
    fn check_step(&self, variables: Variables<'_>, size: Named) -> Result<(), LaunchError> {
        let step = variables.get(STEP).and_then(|step| step.parse::<usize>().ok());
        if self.name == SLURM && size.1 > 1 && step.is_none_or(|step| step >= NO_STEP_MIN) {
            return Err(LaunchError::NotInStep { size_variable: size.0, size: size.1 });
        }
        Ok(())
    }

    /// Whether `size`, which is set, belongs to this launcher.
    fn owns(&self, size: &str, variables: Variables<'_>) -> bool {
        let is_kubernetes = size == "TENSORWIRE_SIZE" && variables.get(JOB_COMPLETION_INDEX).is_some();
        self.owns_size && !is_kubernetes
    }

    fn launch(&self, variables: Variables<'_>, rank: Named, size: Named) -> Result<Launch, LaunchError> {
        check_rank(rank, size)?;
        let number = |name: Option<&'static str>| {
            let Some((name, value)) = name.and_then(|name| Some((name, variables.get(name)?))) else {
                return Ok(None);
            };
            variables::number(name, value, self.name).map(|number| Some((name, number)))
        };
        let (local_rank, local_size) = (number(self.local_rank)?, number(self.local_size)?);
        if let (Some(rank), Some(size)) = (local_rank, local_size) {
            check_rank(rank, size)?;
        }
        Ok(Launch {
            rank: rank.1,
            size: size.1,
            local_rank: local_rank.map(|(_, rank)| rank),
            local_size: local_size.map(|(_, size)| size),
            is_on_one_machine: match local_size {
                Some((_, local)) => Some(local == size.1),
                None => (self.name == SLURM).then(|| nodes::is_one(variables)).flatten(),
            },
            job: self.job(variables),
            store: self.store(variables)?,
            by: self.name,
        })
    }

    fn job(&self, variables: Variables<'_>) -> Option<String> {
        let [job, part] = self.job.map(|name| name.and_then(|name| variables.get(name)));
        let own = variables.get("TENSORWIRE_JOB");
        own.or_else(|| Some(part.map_or(job.clone()?, |part| format!("{}.{part}", job.unwrap_or_default()))))
    }

    fn store(&self, variables: Variables<'_>) -> Result<Option<StoreUrl>, LaunchError> {
        if let Some(url) = variables.get("TENSORWIRE_STORE") {
            return store_url("TENSORWIRE_STORE", &url).map(Some);
        }
        if let Some(url) = master(variables, self.name)? {
            return Ok(Some(url));
        }
        if self.name == SLURM { nodes::slurm(variables) } else { Ok(None) }
    }
}

fn check_rank(rank: Named, size: Named) -> Result<(), LaunchError> {
    let ((rank_variable, rank), (size_variable, size)) = (rank, size);
    if size == 0 {
        return Err(LaunchError::NoRanks { variable: size_variable });
    }
    if rank >= size {
        return Err(LaunchError::RankBeyondSize { rank_variable, rank, size_variable, size });
    }
    Ok(())
}

fn store_url(variable: &'static str, text: &str) -> Result<StoreUrl, LaunchError> {
    text.parse().map_err(|error| match error {
        StoreError::BadUrl { url, remedy } => LaunchError::BadAddress { variable, value: url, remedy },
        other => LaunchError::BadAddress { variable, value: String::new(), remedy: other.to_string() },
    })
}

fn master(variables: Variables<'_>, by: &'static str) -> Result<Option<StoreUrl>, LaunchError> {
    const HOST: &str = "MASTER_ADDR";
    const PORT: &str = "MASTER_PORT";
    let incomplete = |given, value, missing| Err(LaunchError::Incomplete { given, value, missing, by });
    match (variables.get(HOST), variables.get(PORT)) {
        (Some(host), Some(port)) => {
            let port = match port.parse() {
                Ok(number) if number > 0 && !port.starts_with('+') => number,
                _ => {
                    let remedy = "its port is not a number from 1 to 65535".to_owned();
                    return Err(LaunchError::BadAddress { variable: PORT, value: port, remedy });
                }
            };
            let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let url = StoreUrl::tcp(bracketed.unwrap_or(&host), free_port(variables, port));
            // Checked by the rules for URLs.
            store_url(HOST, &url.to_string()).map(Some)
        }
        (Some(host), None) => incomplete(HOST, host, PORT),
        (None, Some(port)) => incomplete(PORT, port, HOST),
        (None, None) => Ok(None),
    }
}

/// torchrun's agent usually serves its own store at the port that it gives to the processes.
fn free_port(variables: Variables<'_>, port: u16) -> u16 {
    let is_taken = variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    if is_taken { port.checked_add(1).unwrap_or(port - 1) } else { port }
}
