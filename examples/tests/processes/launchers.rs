//! Ranks that real launchers start.

use std::{net::TcpListener, process::Command};

use super::{
    program::{example, run, text},
    skipped::installed,
};

/// A command of `mpirun` that starts so many ranks of the example; `None` where it is not installed.
fn mpirun(ranks: usize) -> Option<Command> {
    let mut command = launched_by(installed("mpirun", "openmpi-bin", "mpirun")?);
    command.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
    // Of Open MPI, which refuses to start processes as root otherwise.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.arg(example("all_reduce").get_program());
    Some(command)
}

/// The launcher with the environment and the streams of the example.
fn launched_by(launcher: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(launcher);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG").stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[track_caller]
pub(crate) fn averages(command: Command, ranks: usize) {
    let output = run(command);
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    let mean = (ranks - 1) as f32 / 2.0;
    for rank in 0..ranks {
        assert!(text.contains(&format!("rank {rank} of {ranks}: mean {mean} of ")), "{text}");
    }
}

#[test]
fn mpirun_starts_two_ranks_and_four() {
    for ranks in [2, 4] {
        let Some(mut command) = mpirun(ranks) else { return };
        command.env("TENSORWIRE_STORE", free_address());
        averages(command, ranks);
    }
}

#[test]
fn ranks_of_mpirun_meet_in_a_folder_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let Some(mut command) = mpirun(2) else { return };
        command.env("TENSORWIRE_STORE", format!("file://{}", folder.path().display()));
        averages(command, 2);
    }
}

#[test]
fn without_a_store_ranks_of_mpirun_say_what_to_set() {
    let Some(mut command) = mpirun(2) else { return };
    command.env_remove("TENSORWIRE_STORE");
    let output = run(command);
    let text = text(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("Open MPI sets no store; set TENSORWIRE_STORE"), "{text}");
}

/// The agent of torchrun serves its own store at the port that it gives to the ranks, if it chose no port of its own.
#[test]
#[ignore = "needs torchrun, of some 600 MB: .ci/long installs it"]
fn torchrun_starts_two_ranks_and_four() {
    let port = free_address().rsplit_once(':').unwrap().1.to_owned();
    for (ranks, place) in [(2, &["--master_port", &port][..]), (4, &["--standalone"])] {
        let Some(torchrun) = installed("torchrun", "python3-torch", "torchrun") else { return };
        let logs = tempfile::tempdir().unwrap();
        let mut command = launched_by(torchrun);
        command.args(place).args(["--no_python", "--nproc_per_node", &ranks.to_string()]);
        // The default of these is an error in torch 1.13 with Python 3.11, which are those of Debian 12.
        command.args(["--redirects", "1", "--tee", "1", "--log_dir"]).arg(logs.path());
        command.arg(example("all_reduce").get_program());
        averages(command, ranks);
    }
}
