//! Trainings that continue from a checkpoint.

use std::{fs, path::Path};

use rustix::process::{Signal, kill_process};

use crate::{
    by_hand::{cluster, ends_well, one_process},
    program::{Running, failed, summary_value, trained},
};

fn fingerprint(flags: &str) -> String {
    summary_value(&trained(flags), "fingerprint").to_owned()
}

/// The number of steps that a checkpoint names.
fn step_of(path: &Path) -> u64 {
    let file = fs::read(path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    header["__metadata__"]["step"].as_str().unwrap().parse().unwrap()
}

#[test]
fn a_training_in_two_parts_ends_with_the_very_parameters_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for flags in ["--workers 2 --servers 2", "--model linear --servers 2"] {
        let whole = fingerprint(&format!("{flags} --steps 60"));
        let half = fingerprint(&format!("{flags} --steps 30 --checkpoint {}", path.display()));
        assert_eq!(step_of(&path), 30);
        // Restored at its end, a training is over, and has the parameters of the checkpoint.
        assert_eq!(fingerprint(&format!("{flags} --steps 30 --restore {}", path.display())), half);
        assert_eq!(fingerprint(&format!("{flags} --steps 60 --restore {}", path.display())), whole);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");
}

#[test]
fn a_checkpoint_of_another_model_and_none_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let text = failed(&format!("--restore {}", path.display()));
    assert!(text.contains("ps 0: the checkpoint") && text.contains("cannot be read"), "{text}");
    trained(&format!("--model linear --steps 1 --checkpoint {}", path.display()));
    let text = failed(&format!("--restore {}", path.display()));
    assert!(text.contains("has no `w1` of shape [64, 512]: name the --model"), "{text}");
    let text = failed(&format!("--checkpoint {}", folder.path().join("missing/file").display()));
    assert!(text.contains("worker 0: --checkpoint") && text.contains("No such file"), "{text}");
}

/// By hand, on several hosts: the server of the linear model is killed, and started again with `--restore`.
#[test]
fn d_peer_sigkill_a_server_started_again_by_hand_with_restore() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linear.safetensors");
    let path = path.display();
    let flags = format!("--model=linear --steps=400 --checkpoint={path} --checkpoint-secs=0");
    let cluster = cluster(1, 2, &flags);
    let server = Running::start(one_process(&cluster, "ps", 0));
    let workers = [0, 1].map(|index| Running::start(one_process(&cluster, "worker", index)));
    workers[0].line(|line| line.starts_with("training     80/400 steps"));
    kill_process(server.pid(), Signal::KILL).unwrap();
    // Until it is gone, its port is taken.
    server.end();
    let again = Running::start(one_process(&format!("{cluster} --restore={path}"), "ps", 0));
    let [chief, other] = workers;
    let text = ends_well(chief);
    ends_well(other);
    ends_well(again);
    let whole = fingerprint("--model linear --steps 400 --workers 2");
    assert_eq!(summary_value(&text, "fingerprint"), whole);
}
