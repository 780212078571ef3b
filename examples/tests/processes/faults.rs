//! Processes that are killed and started again, and checkpoints.

use std::{fs, path::Path};

use crate::program::{failed, summary_number, summary_value, trained};

const SYNC: &str = "--steps 60 --issync --workers 2 --servers 2 --checkpoint-steps 20";

fn ends_with_the_very_parameters_after(kills: &[&str]) {
    let undisturbed = trained(SYNC);
    for kill in kills {
        let text = trained(&format!("{SYNC} {kill}"));
        let fingerprint = summary_value(&text, "fingerprint");
        assert_eq!(fingerprint, summary_value(&undisturbed, "fingerprint"), "{kill}: {text}");
        let killed = kill.matches("--kill").count();
        assert_eq!(text.matches("again, after signal: 9").count(), killed, "{text}");
    }
}

#[test]
fn d_peer_sigkill_a_worker_killed_at_any_step_changes_nothing() {
    ends_with_the_very_parameters_after(&[
        "--kill worker:1@step1",
        "--kill worker:1@step33 --kill worker:1@step59",
        "--kill worker:0@step20 --kill worker:1@step45",
    ]);
}

#[test]
fn d_peer_sigkill_a_server_killed_at_any_step_changes_nothing() {
    ends_with_the_very_parameters_after(&[
        "--kill ps:1@step2",
        "--kill ps:0@step37",
        "--kill ps:0@step21 --kill ps:1@step55",
        // One worker waits at the server that is left, while the other has not sent it anything.
        "--kill ps:0@step30 --slow worker:1@50ms",
    ]);
}

#[test]
fn d_peer_sigkill_server_and_chief_together_begin_at_the_checkpoint_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = format!("--checkpoint {}", directory.path().join("mlp.safetensors").display());
    let kill = format!("--kill ps:0@step45 --kill worker:0@step45 {checkpoint}");
    ends_with_the_very_parameters_after(&[&kill]);
    let names: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["mlp.safetensors"]);
}

#[test]
fn d_peer_sigkill_asynchronous_training_ends_as_well() {
    let text = trained(
        "--steps 200 --workers 2 --servers 2 --checkpoint-steps 20 --kill worker:1@step30 --kill ps:1@step80 \
         --kill worker:0@step120",
    );
    let behind = summary_number(&text, "one process") - summary_number(&text, "accuracy");
    assert!(behind <= 5.0, "one run may be a little further off than the median: {text}");
}

#[test]
fn a_training_goes_on_from_its_checkpoint_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mlp.safetensors");
    let half = "--issync --workers 2 --checkpoint-steps 20";
    trained(&format!("{half} --steps 30 --checkpoint {}", path.display()));
    let resumed = trained(&format!("{half} --steps 60 --checkpoint {}", path.display()));
    assert!(resumed.contains("beginning at step 30"), "{resumed}");
    let whole = trained(&format!("{half} --steps 60"));
    assert_eq!(summary_value(&resumed, "fingerprint"), summary_value(&whole, "fingerprint"));
}

#[test]
fn a_checkpoint_cut_short_ends_the_chief_with_an_error_that_names_both_lengths() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mlp.safetensors");
    let flags = format!("--steps 20 --issync --workers 1 --checkpoint {}", path.display());
    trained(&flags);
    let whole = fs::read(&path).unwrap().len();
    cut(&path, whole - 1);
    let text = failed(&flags);
    for part in [
        format!("checkpoint {} is cut short", path.display()),
        format!("it has {} bytes, and {whole} are expected", whole - 1),
        "remove it to begin at step 0".to_owned(),
        "worker 0 ended before the training did".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    assert!(!text.contains("again, after"), "what ended by itself is not started again: {text}");
}

fn cut(path: &Path, length: usize) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..length]).unwrap();
}
