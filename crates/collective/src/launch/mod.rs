//! Which rank this process is, by the environment that its launcher made.
//!
//! The first launcher of this table whose rank or number of ranks is set is asked, and no other:
//!
//! | launcher | rank and number of ranks | others |
//! | --- | --- | --- |
//! | Tensorwire | `TENSORWIRE_RANK`, `TENSORWIRE_SIZE` | |
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`; job: `TORCHELASTIC_RUN_ID` with `TORCHELASTIC_RESTART_COUNT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE`; job: `PMIX_NAMESPACE` |
//! | MPICH (Hydra) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`; job: `PMI_JOBID` |
//! | Slurm | `SLURM_PROCID`, and `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID`; job: `SLURM_JOB_ID` with `SLURM_STEP_ID` |
//! | Kubernetes (indexed Job) | `JOB_COMPLETION_INDEX`, `TENSORWIRE_SIZE` | |
//!
//! Slurm sets its number of tasks for shells too, and Kubernetes needs `TENSORWIRE_SIZE`: these alone choose no launcher.
//! `torchrun` and `mpirun` within a Slurm job come before Slurm, as they start the processes.
//!
//! `TENSORWIRE_JOB` comes before the launcher's job. Where the store is, is said by the first of these:
//!
//! 1. `TENSORWIRE_STORE`, as `HOST:PORT`.
//! 2. `MASTER_ADDR` and `MASTER_PORT`, which torchrun sets, and scripts for other launchers.
//! 3. With Slurm: the first node of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, where rank 0 runs, or else
//!    `SLURM_LAUNCH_NODE_IPADDR`. The port is from 20,000 to 29,999 and follows from the job's and the step's number, so that all ranks find the same.
//!
//! A variable that is empty counts as not set.

mod nodes;
mod variables;

use tensorwire_rendezvous::control::host_and_port;

use self::variables::Variables;

/// What a launcher told this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process among all of the job, from 0.
    pub rank: usize,
    /// How many processes the job has. Above `rank`.
    pub size: usize,
    /// This process among those of its machine, from 0.
    pub local_rank: Option<usize>,
    /// How many processes of the job run on this machine. Above `local_rank`.
    pub local_size: Option<usize>,
    /// What tells this job from others, and from itself when it was started again.
    pub job: Option<String>,
    /// Where rank 0 serves the store.
    pub store: Option<StoreAddress>,
    /// The launcher's name.
    pub by: &'static str,
}

/// Where a store is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreAddress {
    /// A host name or an IP address; IPv6 without brackets.
    pub host: String,
    /// Its port, from 1.
    pub port: u16,
}

impl std::fmt::Display for StoreAddress {
    /// As `HOST:PORT`, with brackets around an IPv6 address.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Why the environment does not say which rank this process is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A variable is not a whole number from 0.
    #[error("`{variable}` is `{value}`: {by} sets it to a whole number from 0; set it so, or unset it")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The launcher.
        by: &'static str,
    },
    /// There are too few ranks for this one.
    #[error(
        "`{rank_variable}` is {rank}, and `{size_variable}` is {size}: ranks are numbered from 0, so that the size is above \
         each of them; start one process for each rank"
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
    /// There are no ranks.
    #[error("`{variable}` is 0: set it to the number of processes of the job")]
    NoRanks {
        /// The size's variable.
        variable: &'static str,
    },
    /// A variable is set without the one that belongs to it.
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
    /// A variable is no address of a store.
    #[error("`{variable}` is `{value}`: {remedy}")]
    BadAddress {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is wrong, and what to do.
        remedy: String,
    },
    /// No launcher set its variables.
    #[error(
        "no launcher's variables are set: start the job with torchrun, mpirun, srun or an indexed Job, or set TENSORWIRE_RANK \
         and TENSORWIRE_SIZE for each process"
    )]
    NotFound,
}

impl Launch {
    /// Asks the environment of this process.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn from_env() -> Result<Self, LaunchError> {
        // What is not Unicode is shown by the error about it.
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Asks `variable` for the values of variables; `None` for those that are not set.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let variables = Variables(&variable);
        for launcher in &LAUNCHERS {
            if let Some((rank, size)) = launcher.place(variables)? {
                return launcher.launch(variables, rank, size);
            }
        }
        Err(LaunchError::NotFound)
    }
}

/// A launcher, by its variables.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first that is set.
    sizes: &'static [&'static str],
    /// Whether a size alone means that this launcher started the process, and forgot the rank.
    owns_size: bool,
    local_rank: Option<&'static str>,
    local_size: Option<&'static str>,
    /// The job, and its part or its attempt.
    job: [Option<&'static str>; 2],
}

const JOB_COMPLETION_INDEX: &str = "JOB_COMPLETION_INDEX";
const SLURM: &str = "Slurm";

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
        name: "MPICH",
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
        sizes: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        owns_size: false,
        local_rank: Some("SLURM_LOCALID"),
        local_size: None,
        job: [Some("SLURM_JOB_ID"), Some("SLURM_STEP_ID")],
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

/// A number, and the variable that has it.
type Named = (&'static str, usize);

impl Launcher {
    /// The rank and the size; `None` if this launcher did not start the process.
    fn place(&self, variables: Variables<'_>) -> Result<Option<(Named, Named)>, LaunchError> {
        let size = self.sizes.iter().find_map(|name| Some((*name, variables.get(name)?)));
        match (variables.get(self.rank), size) {
            (None, Some((given, value))) if self.owns(given, variables) => {
                Err(LaunchError::Incomplete { given, value, missing: self.rank, by: self.name })
            }
            (None, _) => Ok(None),
            (Some(value), None) => {
                // Older ones, for which others stand as well, come last.
                let missing = self.sizes.last().copied().unwrap_or_default();
                Err(LaunchError::Incomplete { given: self.rank, value, missing, by: self.name })
            }
            (Some(rank), Some((name, size))) => {
                let rank = (self.rank, variables::number(self.rank, rank, self.name)?);
                Ok(Some((rank, (name, variables::number(name, size, self.name)?))))
            }
        }
    }

    /// Whether this launcher needs `size`, which is set, for itself.
    fn owns(&self, size: &str, variables: Variables<'_>) -> bool {
        let is_kubernetes = size == "TENSORWIRE_SIZE" && variables.get(JOB_COMPLETION_INDEX).is_some();
        self.owns_size && !is_kubernetes
    }

    fn launch(&self, variables: Variables<'_>, rank: Named, size: Named) -> Result<Launch, LaunchError> {
        check_place(rank, size)?;
        let number = |name: Option<&'static str>| {
            let Some((name, value)) = name.and_then(|name| Some((name, variables.get(name)?))) else {
                return Ok(None);
            };
            variables::number(name, value, self.name).map(|number| Some((name, number)))
        };
        let (local_rank, local_size) = (number(self.local_rank)?, number(self.local_size)?);
        if let (Some(rank), Some(size)) = (local_rank, local_size) {
            check_place(rank, size)?;
        }
        Ok(Launch {
            rank: rank.1,
            size: size.1,
            local_rank: local_rank.map(|(_, rank)| rank),
            local_size: local_size.map(|(_, size)| size),
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

    fn store(&self, variables: Variables<'_>) -> Result<Option<StoreAddress>, LaunchError> {
        if let Some(address) = variables.get("TENSORWIRE_STORE") {
            return store_address("TENSORWIRE_STORE", address).map(Some);
        }
        if let Some(address) = master(variables, self.name)? {
            return Ok(Some(address));
        }
        if self.name == SLURM { nodes::slurm(variables) } else { Ok(None) }
    }
}

fn check_place(rank: Named, size: Named) -> Result<(), LaunchError> {
    let ((rank_variable, rank), (size_variable, size)) = (rank, size);
    if size == 0 {
        return Err(LaunchError::NoRanks { variable: size_variable });
    }
    if rank >= size {
        return Err(LaunchError::RankBeyondSize { rank_variable, rank, size_variable, size });
    }
    Ok(())
}

fn store_address(variable: &'static str, value: String) -> Result<StoreAddress, LaunchError> {
    let address = match host_and_port(&value) {
        Ok((_, 0)) => Err("its port is not a number from 1 to 65535"),
        Ok((host, port)) => Ok(StoreAddress { host: host.to_owned(), port }),
        Err(why) => Err(why),
    };
    address.map_err(|why| LaunchError::BadAddress { variable, value, remedy: why.to_owned() })
}

fn master(variables: Variables<'_>, by: &'static str) -> Result<Option<StoreAddress>, LaunchError> {
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
            let host = bracketed.unwrap_or(&host).to_owned();
            let address = StoreAddress { host, port };
            // The host has the same rules in both forms.
            store_address(HOST, address.to_string()).map(|_| Some(address))
        }
        (Some(host), None) => incomplete(HOST, host, PORT),
        (None, Some(port)) => incomplete(PORT, port, HOST),
        (None, None) => Ok(None),
    }
}
