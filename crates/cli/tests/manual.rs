//! `tensorwire completions` and `tensorwire man`.

use std::{fs, process::Command};

use crate::common::{fail_with, finish, names_in, succeed, text};

#[test]
fn every_shell_gets_completions_for_every_subcommand() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeed(&["completions", shell]);
        for word in ["serve", "pull", "list", "top", "devices", "doctor", "bench", "no-clobber"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let text = fail_with(2, &["completions", "smoke"]);
    assert!(text.contains("bash"), "{text}");
}

#[test]
fn bash_completes_subcommands_and_options() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    fs::write(&script, succeed(&["completions", "bash"])).unwrap();
    let completed = |words: &str, word: &str| {
        let (count, before) = (words.split_whitespace().count(), words.split_whitespace().last().unwrap());
        let run = format!(
            ". {}; COMP_WORDS=({words} '{word}'); COMP_CWORD={count}; _tensorwire tensorwire '{word}' '{before}'; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let mut command = Command::new("bash");
        command.args(["--norc", "-c", &run]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        text(&finish(command, crate::common::command_max()))
    };
    assert_eq!(completed("tensorwire", "pu").trim(), "pull");
    assert_eq!(completed("tensorwire pull", "--no-c").trim(), "--no-clobber");
    assert_eq!(completed("tensorwire pull --fabric", "ver").trim(), "verbs");
}

#[test]
fn the_manual_has_a_page_for_each_subcommand_with_options_variables_and_exit_codes() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("new/man1");
    succeed(&["man", folder.to_str().unwrap()]);
    let names = ["bench", "completions", "devices", "doctor", "list", "man", "pull", "serve", "top"];
    let mut expected: Vec<String> = names.iter().map(|name| format!("tensorwire-{name}.1")).collect();
    expected.push("tensorwire.1".to_owned());
    assert_eq!(names_in(&folder), expected);
    let page = fs::read_to_string(folder.join("tensorwire-pull.1")).unwrap();
    for word in ["\\-\\-memory", "TENSORWIRE_PULL_MEMORY", "Exit status"] {
        assert!(page.contains(word), "{word}: {page}");
    }
    let page = succeed(&["man"]);
    assert!(page.contains(".TH tensorwire 1") && page.contains("tensorwire\\-pull(1)"), "{page}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let text = fail_with(1, &["man", "/dev/null/man1"]);
    assert!(text.contains("/dev/null/man1"), "{text}");
}
