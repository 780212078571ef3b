//! Ranks on two nodes: network namespaces of this machine, joined by a pair of virtual interfaces. Each line of the launchers' page is
//! run as its launcher runs it, or with the variables that its launcher sets.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use tempfile::TempDir;

use crate::{
    launchers::averages,
    program::{Running, example, run, text},
    skipped::{installed, skip},
};

/// Two namespaces, `node1` at 10.77.0.1 and `node2` at 10.77.0.2. They are removed at the end.
struct Nodes {
    names: [String; 2],
    folder: TempDir,
}

impl Nodes {
    /// With a name of node 1 that resolves to `first` on node 1 itself. `None` where namespaces cannot be made.
    fn new(first: &str) -> Option<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        installed("ip", "iproute2", "two_nodes")?;
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let names = [1, 2].map(|node| format!("tw-groups-{}-{number}-{node}", std::process::id()));
        let nodes = Self { names, folder: tempfile::tempdir().unwrap() };
        let ends = [1, 2].map(|end| format!("tw{}{number}{end}", std::process::id()));
        if !ip(&format!("netns add {}", nodes.names[0])) || !ip(&format!("netns add {}", nodes.names[1])) {
            skip("two_nodes", "network namespaces cannot be made: run as root");
            return None;
        }
        let [one, two] = &nodes.names;
        assert!(ip(&format!("link add {} netns {one} type veth peer name {} netns {two}", ends[0], ends[1])));
        for (at, (name, end)) in nodes.names.iter().zip(&ends).enumerate() {
            let [this, local] =
                [format!("10.77.0.{}", at + 1), if at == 0 { first } else { "10.77.0.1" }.to_owned()];
            assert!(ip(&format!("-n {name} address add {this}/24 dev {end}")));
            assert!(ip(&format!("-n {name} link set {end} up")) && ip(&format!("-n {name} link set lo up")));
            let hosts = format!("127.0.0.1 localhost\n{local} node1 train-0.train\n10.77.0.2 node2\n");
            fs::create_dir_all(Self::settings(name)).unwrap();
            fs::write(Self::settings(name).join("hosts"), hosts).unwrap();
        }
        fs::write(nodes.secret(), "a secret of these tests alone, of no use elsewhere").unwrap();
        fs::set_permissions(nodes.secret(), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        Some(nodes)
    }

    /// The folder whose files `ip netns exec` shows in /etc.
    fn settings(name: &str) -> PathBuf {
        PathBuf::from("/etc/netns").join(name)
    }

    fn secret(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    /// A command line on a node, from 0.
    fn on(&self, node: usize, program: &Command) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[node]])
            .arg(program.get_program())
            .args(program.get_args());
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("TENSORWIRE_SECRET_FILE", self.secret());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts the example with `arguments` as each rank of these nodes, half of them on each, with what `variables` gives for its rank
    /// and its number on its node.
    fn start(
        &self,
        arguments: &str,
        ranks: usize,
        variables: impl Fn(usize, usize) -> String,
    ) -> Vec<Running> {
        let start = |rank: usize| {
            let per_node = ranks.div_ceil(2);
            let mut command = example("all_reduce");
            command.args(arguments.split_whitespace());
            let mut command = self.on(rank / per_node, &command);
            let set = variables(rank, rank % per_node);
            command.envs(set.split_whitespace().filter_map(|set| set.split_once('=')));
            Running::start(command)
        };
        (0..ranks).map(start).collect()
    }

    /// As [`start`](Self::start), and all ranks get the mean.
    fn average(&self, arguments: &str, ranks: usize, variables: impl Fn(usize, usize) -> String) {
        let mean = (ranks - 1) as f32 / 2.0;
        for (rank, running) in self.start(arguments, ranks, variables).into_iter().enumerate() {
            let (status, text) = running.end();
            assert!(status.success(), "rank {rank}: {text}");
            assert!(text.contains(&format!("rank {rank} of {ranks}: mean {mean} of ")), "{text}");
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
            let _ = fs::remove_dir_all(Self::settings(name));
        }
    }
}

fn ip(arguments: &str) -> bool {
    let mut command = Command::new("ip");
    command.args(arguments.split_whitespace()).stderr(Stdio::null()).status().unwrap().success()
}

const EVERYWHERE: &str = "--bind 0.0.0.0:0";

fn torchrun(rank: usize, local: usize, place: &str) -> String {
    format!(
        "RANK={rank} WORLD_SIZE=8 LOCAL_RANK={local} LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 {place}"
    )
}

#[test]
fn torchrun_on_two_nodes() {
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    let place = "MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True";
    for bind in [EVERYWHERE, "--bind [::]:0"] {
        nodes.average(bind, 8, |rank, local| torchrun(rank, local, place));
    }
}

#[test]
fn srun_on_two_nodes_and_with_pmi2() {
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    let srun = |rank: usize, local: usize| {
        format!(
            "SLURM_PROCID={rank} SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID={local} SLURM_NNODES=2 SLURM_JOB_ID=77 SLURM_STEP_ID=0 \
             SLURM_JOB_NODELIST=node[1-2] SLURM_STEP_NODELIST=node[1-2]"
        )
    };
    nodes.average(EVERYWHERE, 8, srun);
    nodes.average(EVERYWHERE, 8, |rank, local| {
        format!("{} PMI_RANK={rank} PMI_SIZE=8 PMI_FD=9", srun(rank, local))
    });
}

#[test]
fn mpich_kubernetes_and_by_hand_on_two_nodes() {
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    nodes.average(EVERYWHERE, 8, |rank, local| {
        format!("PMI_RANK={rank} PMI_SIZE=8 MPI_LOCALRANKID={local} MPI_LOCALNRANKS=4 TENSORWIRE_STORE=node1:29500")
    });
    nodes.average(EVERYWHERE, 4, |rank, _| {
        format!("JOB_COMPLETION_INDEX={rank} TENSORWIRE_SIZE=4 TENSORWIRE_STORE=train-0.train:29500")
    });
    nodes.average(EVERYWHERE, 2, |rank, _| {
        format!("TENSORWIRE_RANK={rank} TENSORWIRE_SIZE=2 TENSORWIRE_STORE=node1:29500")
    });
}

/// Open MPI starts a process of its own on each node, here by `ip netns exec` instead of ssh.
#[test]
fn mpirun_on_two_nodes() {
    let Some(mpirun) = installed("mpirun", "openmpi-bin", "two_nodes") else { return };
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    let agent = nodes.folder.path().join("agent");
    // Each node has a host name of its own.
    let script = format!(
        "#!/bin/sh\nnode=$1; shift\nexec ip netns exec {}$(echo $node | tail -c 2) unshare --uts sh -c \"hostname $node; $*\"\n",
        nodes.names[0].strip_suffix('1').unwrap()
    );
    fs::write(&agent, script).unwrap();
    fs::set_permissions(&agent, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--uts", "sh", "-c", "hostname node1; exec \"$@\"", "sh"]).arg(mpirun);
    command.args(["--mca", "plm_rsh_agent"]).arg(&agent);
    command.args([
        "--bind-to",
        "none",
        "-n",
        "8",
        "--host",
        "node1:4,node2:4",
        "-x",
        "TENSORWIRE_STORE=node1:29500",
    ]);
    command.args(["-x", "TENSORWIRE_SECRET_FILE"]).arg(example("all_reduce").get_program());
    command.args(EVERYWHERE.split_whitespace());
    let mut command = nodes.on(0, &command);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    averages(command, 8);
}

#[test]
fn the_lines_for_one_node_need_no_option() {
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    let lines = [
        "TENSORWIRE_SIZE=2 TENSORWIRE_STORE=127.0.0.1:29500 TENSORWIRE_RANK=",
        "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=",
    ];
    for line in lines {
        let start = |rank| {
            let mut command = nodes.on(0, &example("all_reduce"));
            let set = format!("{line}{rank}");
            command.envs(set.split_whitespace().filter_map(|set| set.split_once('=')));
            command.env_remove("TENSORWIRE_SECRET_FILE");
            Running::start(command)
        };
        for running in [start(1), start(0)] {
            let (status, text) = running.end();
            assert!(status.success() && text.contains("mean 0.5 of"), "{text}");
        }
    }
}

/// As Debian writes /etc/hosts.
#[test]
fn a_store_host_that_is_loopback_on_its_own_node_is_named_at_once() {
    let Some(nodes) = Nodes::new("127.0.1.1") else { return };
    let mut command = nodes.on(0, &example("all_reduce"));
    let set = torchrun(0, 0, "MASTER_ADDR=node1 MASTER_PORT=29500");
    command.envs(set.split_whitespace().filter_map(|set| set.split_once('=')));
    let output = run(command);
    let text = text(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("its host is 127.0.1.1 on this machine, which other machines cannot reach"),
        "{text}"
    );
}

#[test]
fn a_rank_on_loopback_is_named_with_the_remedy() {
    let Some(nodes) = Nodes::new("10.77.0.1") else { return };
    let by_hand =
        |rank: usize, _| format!("TENSORWIRE_RANK={rank} TENSORWIRE_SIZE=3 TENSORWIRE_STORE=node1:29500");
    // Rank 0 listens at the store's address. Rank 2 is on the other node, and cannot reach rank 1.
    let mut all = nodes.start("", 3, by_hand);
    let (status, text) = all.remove(2).end();
    assert!(!status.success() && text.contains("bind the workers to an address"), "{text}");
}
