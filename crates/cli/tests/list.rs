//! `tensorwire list` as a process.

use std::fs;

use crate::common::{Server, fail, file_of, succeed};

#[test]
fn a_list_has_names_types_shapes_bytes_and_versions() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file.safetensors");
    fs::write(&file, file_of([("a", &b"one"[..]), ("größe", &[0; 2000])])).unwrap();
    let server = Server::start(&file, &[]);
    let text = succeed(&["list", &server.address]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["tensor", "type", "shape", "bytes", "version"], "{text}");
    assert_eq!(lines[1][..4], ["a", "u8", "[3]", "3"], "{text}");
    assert_eq!(lines[2][..4], ["größe", "u8", "[2000]", "2,000"], "{text}");
    let sets = lines.iter().position(|line| line[..] == ["set", "tensors", "bytes", "version"]);
    assert_eq!(lines[sets.unwrap() + 1][0], "files", "{text}");
    let json = succeed(&["list", &server.address, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let tensor = &json["tensors"][1];
    assert_eq!((&tensor["name"], &tensor["bytes"]), (&"größe".into(), &2000.into()), "{json}");
    assert_eq!(
        (&tensor["shape"], &json["worker"]),
        (&[2000].as_slice().into(), &"/job:serve/replica:0/task:0".into())
    );
    assert_eq!(json["sets"][0]["name"], "files", "{json}");
    assert!(tensor["version"].as_u64().unwrap() > json["tensors"][0]["version"].as_u64().unwrap(), "{json}");
}

#[test]
fn a_list_of_a_worker_that_is_gone_names_its_address() {
    let text = fail(&["list", "127.0.0.1:1"]);
    assert!(text.contains("127.0.0.1:1"), "{text}");
}
