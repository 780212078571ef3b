//! The rank of a process, from the variables that launchers set.

use std::time::Duration;

use tensorwire_collective::{
    launch::{Launch, LaunchError},
    store::{MemoryStore, Store, StoreError, StoreUrl},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Worker, WorkerError};

/// Longer than any step takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

type Set = &'static [(&'static str, &'static str)];

const OWN: Set = &[
    ("TENSORWIRE_RANK", "3"),
    ("TENSORWIRE_SIZE", "4"),
    ("TENSORWIRE_STORE", "[fd00::1]:4000"),
    ("TENSORWIRE_JOB", "mine"),
];

const TORCHRUN: Set = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("GROUP_RANK", "1"),
    ("ROLE_RANK", "5"),
    ("MASTER_ADDR", "node-0.example"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "run-7"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_MAX_RESTARTS", "3"),
];

const OPEN_MPI: Set = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_NODE_RANK", "0"),
    ("OMPI_UNIVERSE_SIZE", "4"),
    ("PMIX_NAMESPACE", "prterun-node0-4711@1"),
    ("PMIX_RANK", "2"),
];

const MPICH: Set = &[
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
    ("PMI_FD", "6"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "2"),
];

const SLURM: Set = &[
    ("SLURM_PROCID", "9"),
    ("SLURM_NTASKS", "16"),
    ("SLURM_STEP_NUM_TASKS", "16"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_JOB_ID", "4242123"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_NODELIST", "gpu[07-08,11]"),
    ("SLURM_STEP_NODELIST", "gpu[08,11]"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
];

const KUBERNETES: Set = &[
    ("JOB_COMPLETION_INDEX", "2"),
    ("TENSORWIRE_SIZE", "3"),
    ("TENSORWIRE_STORE", "train-0.train:29500"),
    ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
];

fn launch(sets: &[Set]) -> Result<Launch, LaunchError> {
    Launch::from_variables(|name| {
        sets.iter()
            .flat_map(|set| set.iter())
            .find(|(set, _)| *set == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

fn address(host: &str, port: u16) -> Option<StoreUrl> {
    Some(StoreUrl::tcp(host, port))
}

fn expected(rank: usize, size: usize, by: &'static str) -> Launch {
    let is_on_one_machine = None;
    Launch { rank, size, local_rank: None, local_size: None, is_on_one_machine, job: None, store: None, by }
}

#[test]
fn its_own_variables_are_all_there_is_to_set() {
    let own = Launch {
        job: Some("mine".to_owned()),
        store: address("fd00::1", 4000),
        ..expected(3, 4, "Tensorwire")
    };
    assert_eq!(own.store.as_ref().unwrap().to_string(), "tcp://[fd00::1]:4000");
    assert_eq!(launch(&[OWN]), Ok(own));
    let least: Set = &[("TENSORWIRE_RANK", "0"), ("TENSORWIRE_SIZE", "1")];
    assert_eq!(launch(&[least]), Ok(expected(0, 1, "Tensorwire")));
}

#[test]
fn torchrun_names_the_attempt_too() {
    let torchrun = Launch {
        local_rank: Some(1),
        local_size: Some(4),
        is_on_one_machine: Some(false),
        job: Some("run-7.2".to_owned()),
        store: address("node-0.example", 29500),
        ..expected(5, 8, "torchrun")
    };
    assert_eq!(launch(&[TORCHRUN]), Ok(torchrun));
    let by_hand: Set = &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")];
    assert_eq!(launch(&[by_hand]), Ok(Launch { store: address("::1", 1), ..expected(0, 2, "torchrun") }));
}

#[test]
fn where_torchrun_serves_a_store_itself_the_next_port_is_meant() {
    const PLACE: Set = &[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h")];
    let store = |sets: [Set; 2]| launch(&[PLACE, sets[0], sets[1]]).unwrap().store;
    let (usual, last): (Set, Set) = (&[("MASTER_PORT", "29500")], &[("MASTER_PORT", "65535")]);
    assert_eq!(store([usual, &[("TORCHELASTIC_USE_AGENT_STORE", "True")]]), address("h", 29501));
    assert_eq!(store([last, &[("TORCHELASTIC_USE_AGENT_STORE", "True")]]), address("h", 65534));
    assert_eq!(store([usual, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]]), address("h", 29500));
}

#[test]
fn a_store_may_be_any_and_its_password_is_not_shown() {
    let named = |url: &'static str| {
        let set: [(&str, &str); 3] = [("RANK", "0"), ("WORLD_SIZE", "1"), ("TENSORWIRE_STORE", url)];
        Launch::from_variables(|name| Some(set.iter().find(|(set, _)| *set == name)?.1.to_owned()))
    };
    for url in ["redis://h:1/2", "etcd://h:1/jobs", "file:///a/b", "tcp://h:1", "memory:"] {
        assert_eq!(named(url).unwrap().store.unwrap().to_string(), url);
    }
    let shown = format!("{:?}", named("redis://user:s3cret@h").unwrap());
    assert!(shown.contains("redis://user:…@h:6379/0") && !shown.contains("s3cret"), "{shown}");
    let refused = named("redis://user:s3cret@h/x").unwrap_err().to_string();
    assert!(refused.contains("TENSORWIRE_STORE") && !refused.contains("s3cret"), "{refused}");
}

fn of_rank(rank: usize, size: usize, store: Option<&str>, job: Option<&str>) -> Launch {
    let store = store.map(|url| url.parse().unwrap());
    Launch { store, job: job.map(str::to_owned), ..expected(rank, size, "Open MPI") }
}

/// A rank's store, and its worker.
struct Rank {
    store: std::sync::Arc<dyn Store>,
    worker: Worker,
}

async fn start(launch: &Launch, name: &str) -> Result<Worker, WorkerError> {
    launch.worker(name).require(FabricKind::TCP).start().await
}

async fn open(launch: &Launch, name: &str, limit: Duration) -> Result<Rank, StoreError> {
    let worker = start(launch, name).await.unwrap();
    Ok(Rank { store: launch.open_store(limit, &worker).await?, worker })
}

fn free() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[tokio::test]
async fn rank_0_serves_the_store_at_its_workers_port() {
    let free = free();
    let open = async |rank, job| open(&of_rank(rank, 2, Some(&free), job), "r", LIMIT).await;
    let first = open(0, Some("a")).await.unwrap();
    assert_eq!(first.worker.address(), free);
    first.store.set("k", b"1").await.unwrap();
    first.worker.shutdown().await;
    drop(first);
    let first = open(0, Some("a")).await.unwrap();
    first.store.set("k", b"2").await.unwrap();
    let of_1 = of_rank(1, 2, Some(&free), Some("a"));
    let second = self::open(&of_1, "second", LIMIT).await.unwrap();
    assert_ne!(second.worker.address(), free);
    assert_eq!(second.store.wait(&["k".to_owned()], LIMIT).await.unwrap(), [b"2"]);
    assert_eq!(second.store.own_address().unwrap().to_string(), "127.0.0.1");
}

#[tokio::test]
async fn a_worker_of_rank_0_that_listens_elsewhere_is_named() {
    let launch = of_rank(0, 2, Some(&free()), None);
    let worker = Worker::builder("elsewhere").require(FabricKind::TCP).start().await.unwrap();
    let error =
        launch.open_store(Duration::from_millis(300), &worker).await.map(drop).unwrap_err().to_string();
    assert!(
        error.contains(&format!("listens on {}: start it by Launch::worker", worker.address())),
        "{error}"
    );
}

#[tokio::test]
async fn rank_0_has_sessions_for_all_others() {
    let launch = of_rank(0, 10, Some(&free()), None);
    let start = async |most| {
        let builder = launch.worker("zero").require(FabricKind::TCP);
        let worker = builder.limits(|limits| limits.sessions_max = most).start().await.unwrap();
        let opened = launch.open_store(LIMIT, &worker).await.map(drop);
        worker.shutdown().await;
        opened
    };
    let error = start(8).await.unwrap_err().to_string();
    assert!(error.contains("at most 8 sessions (`sessions_max`)"), "{error}");
    start(9).await.unwrap();
}

#[tokio::test]
async fn without_a_secret_the_ranks_of_one_machine_use_its_loopback() {
    // The name of this machine, or an address that the system takes for one of it.
    let port = free().rsplit_once(':').unwrap().1.to_owned();
    let url = format!("0.0.0.0:{port}");
    let ranks = [0, 1].map(|rank| of_rank(rank, 2, Some(&url), None));
    let first = open(&ranks[0], "first", LIMIT).await.unwrap();
    assert_eq!(first.worker.address(), format!("127.0.0.1:{port}"));
    let second = open(&ranks[1], "second", LIMIT).await.unwrap();
    second.store.set("k", b"1").await.unwrap();
    assert!(first.store.delete("k").await.unwrap());
}

#[tokio::test]
async fn ranks_of_two_jobs_share_a_store_that_no_rank_serves() {
    let serving = Worker::client().require(FabricKind::TCP).start().await.unwrap();
    let below = MemoryStore::new(serving.runtime().clone());
    below.serve(&serving).unwrap();
    let open = async |job| {
        let launch = of_rank(0, 2, Some(serving.address()), Some(job));
        let worker = Worker::builder(job).require(FabricKind::TCP).start().await.unwrap();
        launch.open_store(LIMIT, &worker).await.unwrap()
    };
    open("a").await.set("k", b"1").await.unwrap();
    assert!(!open("b").await.delete("k").await.unwrap(), "it has keys of its own");
    assert!(below.delete("a/k").await.unwrap());
}

#[tokio::test]
async fn a_store_that_a_rank_0_serves_is_of_its_job_alone() {
    let free = free();
    let of = |rank, size, job| of_rank(rank, size, Some(&free), job);
    let first = open(&of(0, 2, None), "zero", LIMIT).await.unwrap();
    let error = start(&of(0, 2, None), "other").await.unwrap_err().to_string();
    assert!(error.contains(&free) && error.contains("Address already in use"), "{error}");
    assert!(error.contains("each job a port of its own"), "{error}");
    // Rank 0 of another job, as a program starts it that has bound its worker elsewhere.
    let elsewhere = Worker::builder("elsewhere").require(FabricKind::TCP).start().await.unwrap();
    let error = of(0, 2, None).open_store(LIMIT, &elsewhere).await.map(drop).unwrap_err().to_string();
    let process = std::process::id();
    let named = format!(
        "address in use: rank 0 of the job of 2 ranks, process {process} serves its store there; give each job"
    );
    assert!(error.contains(&named) && error.contains(&free), "{error}");

    let short = Duration::from_millis(300);
    for (size, job) in [(3, None), (2, Some("b")), (2, Some("b\n\u{1b}[2J"))] {
        let error = open(&of(1, size, job), "one", short).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 0 of the job of 2 ranks, process "), "{error}");
        assert!(
            error.contains(&format!("of {size} ranks; give each job")) && !error.contains('\u{1b}'),
            "{error}"
        );
    }
    // A rank of another job waits, and does not hold the name of the rank that belongs here.
    let next = [0, 1].map(|rank| of(rank, 2, Some("b")));
    let waiting = open(&next[1], "one", LIMIT);
    let serving = async {
        let second = open(&of(1, 2, None), "one", LIMIT).await.unwrap();
        second.store.set("k", b"0").await.unwrap();
        second.worker.shutdown().await;
        first.worker.shutdown().await;
        drop((first, second));
        // A rank of the next job may come before the store of this one ends.
        let zero = open(&next[0], "zero", LIMIT).await.unwrap();
        zero.store.set("k", b"1").await.unwrap();
        zero
    };
    let (waited, serving) = futures::join!(waiting, serving);
    let found = waited.unwrap().store.wait(&["k".to_owned()], LIMIT).await.unwrap();
    assert_eq!(found, [b"1"]);
    serving.worker.shutdown().await;
}

#[tokio::test]
async fn a_job_of_several_machines_has_no_store_on_loopback() {
    let worker = Worker::client().require(FabricKind::TCP).start().await.unwrap();
    for host in ["localhost", "127.0.1.1", "[::1]"] {
        for rank in [0, 1] {
            let store = Some(format!("{host}:1"));
            let spread =
                Launch { is_on_one_machine: Some(false), ..of_rank(rank, 2, store.as_deref(), None) };
            let error = spread.open_store(LIMIT, &worker).await.unwrap_err().to_string();
            assert!(error.contains("which other machines cannot reach"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_says_what_to_set() {
    let open = async |rank, size, store| open(&of_rank(rank, size, store, None), "r", LIMIT).await.map(drop);
    open(0, 1, None).await.unwrap();
    open(0, 1, Some("memory:")).await.unwrap();
    let refused = [
        (open(1, 2, None).await, "Open MPI sets no store; set TENSORWIRE_STORE"),
        (open(0, 2, Some("memory:")).await, "the job has 2 processes; set TENSORWIRE_STORE"),
        // An address for documentation, which no machine has.
        (open(1, 2, Some("192.0.2.1:7")).await, "it is on another machine, and this worker has no secret"),
    ];
    for (opened, text) in refused {
        let error = opened.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    let error = start(&of_rank(0, 2, Some("192.0.2.1:7"), None), "r").await.unwrap_err().to_string();
    assert!(
        error.contains("this machine does not have that address") && error.contains("give an address of"),
        "{error}"
    );
}

#[test]
fn open_mpi_names_no_store() {
    let open_mpi = Launch {
        local_rank: Some(0),
        local_size: Some(2),
        is_on_one_machine: Some(false),
        job: Some("prterun-node0-4711@1".to_owned()),
        ..expected(2, 4, "Open MPI")
    };
    assert_eq!(launch(&[OPEN_MPI]), Ok(open_mpi.clone()));
    let exported: Set = &[("MASTER_ADDR", "[::1]"), ("MASTER_PORT", "77")];
    assert_eq!(launch(&[OPEN_MPI, exported]), Ok(Launch { store: address("::1", 77), ..open_mpi }));
}

#[test]
fn mpich_gives_its_ranks_by_pmi() {
    let mpich = Launch {
        local_rank: Some(1),
        local_size: Some(2),
        is_on_one_machine: Some(true),
        ..expected(1, 2, "MPICH")
    };
    assert_eq!(launch(&[MPICH]), Ok(mpich));
}

#[test]
fn slurm_runs_rank_0_on_the_first_node_of_the_step() {
    let slurm = Launch {
        local_rank: Some(1),
        job: Some("4242123.0".to_owned()),
        store: address("gpu08", 22123),
        ..expected(9, 16, "Slurm")
    };
    assert_eq!(launch(&[SLURM]), Ok(slurm.clone()));
    let alone: Set = &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_ID", "12")];
    assert_eq!(launch(&[alone]), Ok(Launch { job: Some("12".to_owned()), ..expected(0, 1, "Slurm") }));
    let by_job: Set = &[("SLURM_JOB_NODELIST", "n[3-9]")];
    assert_eq!(launch(&[alone, by_job]).unwrap().store, address("n3", 20012));
    let by_launcher: Set = &[("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")];
    assert_eq!(launch(&[alone, by_launcher]).unwrap().store, address("10.0.0.1", 20012));
    let by_script: Set = &[("MASTER_ADDR", "n4"), ("MASTER_PORT", "6000")];
    assert_eq!(launch(&[SLURM, by_script]), Ok(Launch { store: address("n4", 6000), ..slurm }));
    for (machines, is_on_one) in [("1", true), ("2", false)] {
        let spread = Launch::from_variables(|name| match name {
            "SLURM_NNODES" => Some(machines.to_owned()),
            _ => SLURM.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()),
        });
        assert_eq!(spread.unwrap().is_on_one_machine, Some(is_on_one));
    }
}

#[test]
fn srun_with_pmi2_is_srun_and_hydra_in_a_job_of_slurm_is_mpich() {
    let pmi2: Set = &[("PMI_RANK", "9"), ("PMI_SIZE", "16"), ("PMI_FD", "6"), ("PMI_JOBID", "4242123.0")];
    assert_eq!(launch(&[SLURM, pmi2]), launch(&[SLURM]));
    // Hydra starts one process of its own on each node by `srun`.
    let proxy: Set = &[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0")];
    let hydra: Set = &[("PMI_RANK", "5"), ("PMI_SIZE", "8")];
    assert_eq!(launch(&[proxy, hydra]), Ok(expected(5, 8, "MPICH")));
}

#[test]
fn the_script_of_a_slurm_job_says_that_srun_is_missing() {
    let script: Set = &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "12")];
    let step: Set = &[("SLURM_STEP_ID", "4294967291")];
    for sets in [&[script][..], &[script, step]] {
        let error = launch(sets).unwrap_err();
        assert_eq!(error, LaunchError::NotInStep { size_variable: "SLURM_NTASKS", size: 8 });
        assert!(error.to_string().contains("start the program by `srun`"), "{error}");
    }
}

#[test]
fn kubernetes_needs_the_size_and_the_store_from_its_user() {
    let kubernetes = Launch { store: address("train-0.train", 29500), ..expected(2, 3, "Kubernetes") };
    assert_eq!(launch(&[KUBERNETES]), Ok(kubernetes));
}

#[test]
fn the_launcher_that_started_the_process_comes_first() {
    let by = |sets: &[Set]| launch(sets).unwrap().by;
    assert_eq!(by(&[OWN, TORCHRUN, OPEN_MPI, MPICH, SLURM, &[("JOB_COMPLETION_INDEX", "0")]]), "Tensorwire");
    assert_eq!(by(&[TORCHRUN, OPEN_MPI, MPICH, SLURM, KUBERNETES]), "torchrun");
    assert_eq!(by(&[OPEN_MPI, MPICH, SLURM, KUBERNETES]), "Open MPI");
    assert_eq!(by(&[MPICH, SLURM, KUBERNETES]), "MPICH");
    assert_eq!(by(&[SLURM, KUBERNETES]), "Slurm");
    let renamed: Set = &[("TENSORWIRE_JOB", "mine"), ("TENSORWIRE_STORE", "h:1")];
    let torchrun = launch(&[renamed, TORCHRUN]).unwrap();
    assert_eq!((torchrun.job.as_deref(), torchrun.store), (Some("mine"), address("h", 1)));
}

#[test]
fn without_a_launcher_it_says_what_to_start_or_set() {
    // A shell of a Slurm allocation, and empty variables of a step.
    let shell: Set = &[("SLURM_JOB_ID", "1"), ("SLURM_NTASKS", "4"), ("RANK", ""), ("WORLD_SIZE", " ")];
    assert_eq!(launch(&[shell]), Err(LaunchError::NotFound));
    let text = LaunchError::NotFound.to_string();
    assert!(text.contains("torchrun") && text.contains("TENSORWIRE_RANK"), "{text}");
    // The environment of the tests has either no launcher's variables or all of them.
    assert!(matches!(Launch::from_env(), Ok(_) | Err(LaunchError::NotFound)));
}

#[test]
fn half_a_set_of_variables_is_named() {
    let halves: [(Set, &str, &str); 10] = [
        (&[("TENSORWIRE_RANK", "0")], "TENSORWIRE_RANK", "TENSORWIRE_SIZE"),
        (&[("TENSORWIRE_SIZE", "2")], "TENSORWIRE_SIZE", "TENSORWIRE_RANK"),
        (&[("RANK", "0")], "RANK", "WORLD_SIZE"),
        (&[("WORLD_SIZE", "2")], "WORLD_SIZE", "RANK"),
        (&[("OMPI_COMM_WORLD_RANK", "0")], "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (&[("PMI_SIZE", "2")], "PMI_SIZE", "PMI_RANK"),
        (&[("SLURM_PROCID", "0")], "SLURM_PROCID", "SLURM_NTASKS"),
        (&[("JOB_COMPLETION_INDEX", "0")], "JOB_COMPLETION_INDEX", "TENSORWIRE_SIZE"),
        (&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h")], "MASTER_ADDR", "MASTER_PORT"),
        (&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "1")], "MASTER_PORT", "MASTER_ADDR"),
    ];
    for (set, named, lacking) in halves {
        let error = launch(&[set]).unwrap_err();
        let LaunchError::Incomplete { given, missing, .. } = &error else { panic!("{set:?}: {error}") };
        assert_eq!((*given, *missing), (named, lacking));
        assert!(error.to_string().contains(&format!("set `{lacking}`")), "{error}");
    }
}

#[test]
fn what_is_no_number_is_named_with_its_value() {
    let sets: [(Set, &str, &str); 5] = [
        (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK", "x"),
        (&[("RANK", "+1"), ("WORLD_SIZE", "2")], "RANK", "+1"),
        (&[("RANK", "0"), ("WORLD_SIZE", "-2")], "WORLD_SIZE", "-2"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0.5")], "LOCAL_RANK", "0.5"),
        (
            &[("TENSORWIRE_RANK", "99999999999999999999"), ("TENSORWIRE_SIZE", "2")],
            "TENSORWIRE_RANK",
            "99999999999999999999",
        ),
    ];
    for (set, named, text) in sets {
        let error = launch(&[set]).unwrap_err();
        let LaunchError::NotANumber { variable, value, .. } = &error else { panic!("{set:?}: {error}") };
        assert_eq!((*variable, value.as_str()), (named, text));
    }
}

#[test]
fn a_rank_is_below_the_size_and_there_is_one() {
    let error = launch(&[&[("RANK", "2"), ("WORLD_SIZE", "2")]]).unwrap_err();
    let beyond =
        LaunchError::RankBeyondSize { rank_variable: "RANK", rank: 2, size_variable: "WORLD_SIZE", size: 2 };
    assert_eq!(error, beyond);
    assert!(error.to_string().contains("start one process for each rank"));
    let local: Set = &[("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "1")];
    assert!(matches!(launch(&[local]), Err(LaunchError::RankBeyondSize { rank_variable: "LOCAL_RANK", .. })));
    let none = launch(&[&[("RANK", "0"), ("WORLD_SIZE", "0")]]);
    assert_eq!(none, Err(LaunchError::NoRanks { variable: "WORLD_SIZE" }));
}

#[test]
fn an_address_that_is_none_is_named() {
    const PLACE: Set = &[("RANK", "0"), ("WORLD_SIZE", "1")];
    let slurm: Set = &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_NODELIST", "n[1")];
    let sets: [(&[Set], &str); 7] = [
        (&[PLACE, &[("TENSORWIRE_STORE", "host")]], "TENSORWIRE_STORE"),
        (&[PLACE, &[("TENSORWIRE_STORE", "host:0")]], "TENSORWIRE_STORE"),
        (&[PLACE, &[("TENSORWIRE_STORE", "::1:5")]], "TENSORWIRE_STORE"),
        (&[PLACE, &[("MASTER_ADDR", "a b"), ("MASTER_PORT", "1")]], "MASTER_ADDR"),
        (&[PLACE, &[("MASTER_ADDR", "a"), ("MASTER_PORT", "0")]], "MASTER_PORT"),
        (&[PLACE, &[("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")]], "MASTER_PORT"),
        (&[slurm], "SLURM_JOB_NODELIST"),
    ];
    for (sets, named) in sets {
        let error = launch(sets).unwrap_err();
        assert!(matches!(&error, LaunchError::BadAddress { variable, .. } if *variable == named), "{error}");
    }
}
