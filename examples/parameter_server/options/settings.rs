//! The flags, checked, and what they make this process.

use std::path::Path;

use tensorwire::ClusterSpec;
use tensorwire_examples::{
    model::ModelKind,
    sgd::SgdConfig,
    shards::{Piece, divide},
    training::TrainingConfig,
};

use super::{
    BadOption,
    faults::RoleName,
    flags::{Flags, Job},
};
use crate::failure::Failure;

/// Processes of one job that a launcher starts, at most.
const PROCESSES_MAX: u64 = 64;

/// How gradients become updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Each update is made from this many workers' gradients of the same step.
    Sync { wanted: usize },
    /// Each gradient is an update; a worker may be this many steps ahead of the slowest.
    Async { staleness: u64 },
}

/// What this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// It starts the others.
    Launcher,
    /// It is one process of this cluster.
    One(RoleName, ClusterSpec),
}

/// Everything that fixes what this process does.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) flags: Flags,
    pub(crate) role: Role,
    pub(crate) servers: usize,
    pub(crate) workers: usize,
    pub(crate) mode: Mode,
    pub(crate) model: ModelKind,
    pub(crate) steps: u64,
    pub(crate) sgd: SgdConfig,
}

impl Settings {
    /// Checks the flags.
    pub(crate) fn new(flags: Flags) -> Result<Self, Failure> {
        let (role, servers, workers) = match flags.job_name {
            Some(job) => one_process(&flags, job)?,
            None => launcher(&flags)?,
        };
        let model = flags.model.kind();
        let steps = flags.steps.unwrap_or_else(|| model.steps());
        let mut sgd = model.sgd();
        sgd.learning_rate = flags.learning_rate.unwrap_or(sgd.learning_rate);
        check_faults(&flags, (servers, workers), steps)?;
        check_directory(flags.checkpoint.as_deref())?;
        Ok(Self { mode: mode(&flags, workers)?, role, servers, workers, model, steps, sgd, flags })
    }

    /// What each server holds.
    pub(crate) fn pieces(&self) -> Vec<Vec<Piece>> {
        divide(&self.model.open(self.flags.seed).tensors(), self.servers)
    }

    /// How often the first server reports.
    pub(crate) fn report_steps(&self) -> u64 {
        if self.flags.launched { self.flags.report_steps.max(1) } else { self.flags.steps_to_validate }
    }

    /// Samples that one update is made from.
    pub(crate) fn samples_per_update(&self) -> u64 {
        match self.mode {
            Mode::Sync { wanted } => wanted as u64 * self.model.batch_size(),
            Mode::Async { .. } => self.model.batch_size(),
        }
    }

    /// The same training in one process.
    pub(crate) fn alone(&self) -> TrainingConfig {
        TrainingConfig {
            model: self.model,
            steps: self.steps,
            batch_size: self.samples_per_update(),
            seed: self.flags.seed,
            sgd: self.sgd,
        }
    }
}

fn mode(flags: &Flags, workers: usize) -> Result<Mode, BadOption> {
    if !flags.issync {
        if flags.backup_workers > 0 {
            let remedy = "only synchronous training has backup workers: add --issync";
            return Err(BadOption::new("backup-workers", &flags.backup_workers, remedy));
        }
        return Ok(Mode::Async { staleness: flags.staleness });
    }
    match workers.checked_sub(flags.backup_workers) {
        Some(wanted) if wanted > 0 => Ok(Mode::Sync { wanted }),
        _ => {
            let remedy =
                format!("there are {workers} workers, and one at least is no backup: give less than that");
            Err(BadOption::new("backup-workers", &flags.backup_workers, remedy))
        }
    }
}

fn launcher(flags: &Flags) -> Result<(Role, usize, usize), BadOption> {
    let stray = [("ps-hosts", flags.ps_hosts.clone()), ("worker-hosts", flags.worker_hosts.clone())];
    let index = flags.task_index.map(|index| index.to_string());
    for (option, value) in stray.into_iter().chain([("task-index", index)]) {
        if let Some(value) = value {
            let remedy = "it is for one process of a cluster: say which with --job-name, or leave it out";
            return Err(BadOption::new(option, &value, remedy));
        }
    }
    let count = |option, value: Option<u64>, default| match value.unwrap_or(default) {
        count if count <= PROCESSES_MAX => Ok(count as usize),
        count => Err(BadOption::new(option, &count, format!("give 1 to {PROCESSES_MAX}"))),
    };
    Ok((Role::Launcher, count("servers", flags.servers, 1)?, count("workers", flags.workers, 2)?))
}

fn one_process(flags: &Flags, job: Job) -> Result<(Role, usize, usize), Failure> {
    for (option, value) in [("workers", flags.workers), ("servers", flags.servers)] {
        if let Some(value) = value {
            let remedy =
                "with --job-name the numbers are those of --ps-hosts and --worker-hosts: leave it out";
            return Err(BadOption::new(option, &value, remedy).into());
        }
    }
    for (option, given) in [("kill", !flags.kill.is_empty()), ("slow", !flags.slow.is_empty())] {
        if given {
            let remedy = "only a launcher does that: leave out --job-name";
            return Err(BadOption::new(option, &"...", remedy).into());
        }
    }
    let (servers, workers) =
        (host_list("ps-hosts", &flags.ps_hosts)?, host_list("worker-hosts", &flags.worker_hosts)?);
    let cluster = ClusterSpec::new().hosts("ps", servers).hosts("worker", workers);
    cluster.check()?;
    let (servers, workers) = (cluster.tasks("ps")?.len(), cluster.tasks("worker")?.len());
    let (option, count) = match job {
        Job::Ps => ("ps-hosts", servers),
        Job::Worker => ("worker-hosts", workers),
    };
    let within = || format!("--{option} has {count}: give 0 to {}", count - 1);
    match flags.task_index {
        Some(index) if index < count => {
            let name = if job == Job::Ps { RoleName::Server(index) } else { RoleName::Worker(index) };
            Ok((Role::One(name, cluster), servers, workers))
        }
        Some(index) => Err(BadOption::new("task-index", &index, within()).into()),
        None => Err(BadOption::new("task-index", &"", within()).into()),
    }
}

fn host_list<'flags>(option: &'static str, list: &'flags Option<String>) -> Result<&'flags str, BadOption> {
    let example = "give HOST:PORT,HOST:PORT, for instance 10.0.0.1:2222,10.0.0.2:2222";
    let list = list.as_deref().unwrap_or("");
    if list.is_empty() { Err(BadOption::new(option, &list, example)) } else { Ok(list) }
}

fn check_faults(flags: &Flags, (servers, workers): (usize, usize), steps: u64) -> Result<(), BadOption> {
    let kill = flags.kill.iter().map(|fault| ("kill", fault.role));
    let slow = flags.slow.iter().map(|fault| ("slow", fault.role));
    for (option, name) in kill.chain(slow) {
        let count = match name {
            RoleName::Server(_) if option == "slow" => {
                return Err(BadOption::new(
                    option,
                    &name,
                    "only workers can be slow: give worker:INDEX@DELAY",
                ));
            }
            RoleName::Server(_) => servers,
            RoleName::Worker(_) => workers,
        };
        if name.index() >= count {
            return Err(BadOption::new(
                option,
                &name,
                format!("there are {count}: give an index below that"),
            ));
        }
    }
    match flags.kill.iter().find(|fault| fault.value.0 >= steps) {
        Some(fault) => {
            let remedy = format!("there are {steps} steps: give one before the last");
            Err(BadOption::new("kill", &format!("step{}", fault.value.0), remedy))
        }
        None => Ok(()),
    }
}

/// Found out now, not after the steps that it takes to the first checkpoint.
fn check_directory(checkpoint: Option<&Path>) -> Result<(), BadOption> {
    let Some(path) = checkpoint else { return Ok(()) };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if path.is_dir() {
        return Err(BadOption::new("checkpoint", &path.display(), "it is a directory: name a file in it"));
    }
    if directory.is_some_and(|directory| !directory.is_dir()) {
        return Err(BadOption::new("checkpoint", &path.display(), "its directory is missing: make it first"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Mode, Role, Settings};
    use crate::options::{Flags, RoleName, with_dashes};

    fn settings(line: &str) -> Result<Settings, String> {
        let arguments = std::iter::once("parameter_server").chain(line.split_whitespace()).map(str::to_owned);
        let flags = Flags::try_parse_from(with_dashes(arguments)).map_err(|error| error.to_string())?;
        Settings::new(flags).map_err(|error| error.to_string())
    }

    #[test]
    fn the_classic_flags_make_one_process_in_both_spellings() {
        let classic = "--ps_hosts=a:1,b:2 --worker_hosts=c:3 --job_name=ps --task_index=1 --issync=1 \
                       --learning_rate=0.01 --steps_to_validate=10";
        for line in [classic.to_owned(), classic.replace('_', "-").replace('=', " ")] {
            let settings = settings(&line).unwrap();
            let Role::One(RoleName::Server(1), cluster) = &settings.role else { panic!("{settings:?}") };
            assert_eq!((settings.servers, settings.workers), (2, 1));
            assert_eq!(cluster.task_address("ps", 1).unwrap(), "b:2");
            assert_eq!((settings.mode, settings.sgd.learning_rate), (Mode::Sync { wanted: 1 }, 0.01));
            assert_eq!(settings.flags.steps_to_validate, 10);
        }
    }

    #[test]
    fn without_a_job_all_processes_are_started() {
        let settings = settings("--workers 5 --issync --backup-workers 1 --model linear").unwrap();
        assert_eq!((&settings.role, settings.servers, settings.workers), (&Role::Launcher, 1, 5));
        assert_eq!((settings.mode, settings.steps), (Mode::Sync { wanted: 4 }, 100_000));
        assert_eq!(settings.samples_per_update(), 4);
    }

    #[test]
    fn bad_options_name_the_option_the_value_and_a_remedy() {
        let one = "--job-name worker --ps-hosts a:1 --worker-hosts b:2";
        for (line, expected) in [
            (one.to_owned(), ["--task-index = ``", "give 0 to 0"]),
            (format!("{one} --task-index 1"), ["--task-index = `1`", "give 0 to 0"]),
            (format!("{one} --task-index x"), ["--task-index", "give a whole number"]),
            (format!("{one} --task-index 0 --workers 2"), ["--workers = `2`", "leave it out"]),
            (format!("{one} --task-index 0 --kill ps:0@step1"), ["--kill", "leave out --job-name"]),
            ("--task-index 0".into(), ["--task-index = `0`", "--job-name"]),
            ("--ps-hosts a:1".into(), ["--ps-hosts = `a:1`", "--job-name"]),
            ("--job-name worker --worker-hosts a:1".into(), ["--ps-hosts = ``", "give HOST:PORT"]),
            ("--job-name ps --ps-hosts a --worker-hosts b:1".into(), ["`a`", "write HOST:PORT"]),
            ("--job-name ps --ps-hosts a:0 --worker-hosts b:1".into(), ["`a:0`", "1 to 65535"]),
            (
                "--job-name ps --ps-hosts a:1 --worker-hosts b:1,a:1".into(),
                ["`a:1`", "an address of its own"],
            ),
            ("--job-name boss".into(), ["'boss' for '--job-name", "[possible values: ps, worker]"]),
            ("--workers 0".into(), ["'0' for '--workers", "from 1 on"]),
            ("--workers 65".into(), ["--workers = `65`", "give 1 to 64"]),
            ("--steps x".into(), ["'x' for '--steps", "give a whole number from 1 on"]),
            ("--learning-rate -1".into(), ["'-1' for '--learning-rate", "give a number above 0"]),
            ("--learning-rate=0".into(), ["'0' for '--learning-rate", "give a number above 0"]),
            ("--issync=2".into(), ["'2' for '--issync", "give 1 for synchronous"]),
            ("--fabric carrier-pigeon".into(), ["'carrier-pigeon' for '--fabric", "auto, shm, tcp"]),
            ("--backup-workers 1".into(), ["--backup-workers = `1`", "add --issync"]),
            ("--issync --backup-workers 2".into(), ["--backup-workers = `2`", "give less"]),
            ("--kill worker:2@step5".into(), ["--kill = `worker 2`", "there are 2"]),
            ("--kill worker:1@step9 --steps 9".into(), ["--kill = `step9`", "before the last"]),
            ("--kill worker:1".into(), ["'worker:1' for '--kill", "worker:1@step120"]),
            ("--slow ps:0@5ms".into(), ["--slow = `ps 0`", "only workers"]),
            ("--slow worker:0@5".into(), ["`5` is no delay", "20ms"]),
            ("--checkpoint /no/such/file".into(), ["--checkpoint = `/no/such/file`", "make it first"]),
            ("--checkpoint /".into(), ["--checkpoint = `/`", "name a file"]),
        ] {
            let error = settings(&line).unwrap_err();
            assert!(expected.iter().all(|part| error.contains(part)), "{line}: {error}");
        }
    }
}
