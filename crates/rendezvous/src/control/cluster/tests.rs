//! Bad clusters, and the parts that their errors name.

use tensorwire_protocol::limits::ADDRESS_BYTES_MAX;

use super::*;

fn refused(spec: &ClusterSpec) -> String {
    spec.check().unwrap_err().to_string()
}

fn names_all(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

fn two_jobs() -> ClusterSpec {
    ClusterSpec::new().hosts("ps", "a:1, b:2").hosts("worker", "c:3,d:4,[::1]:5")
}

#[test]
fn jobs_have_numbered_tasks_with_addresses() {
    let spec = two_jobs();
    spec.check().unwrap();
    assert_eq!(spec.jobs(), ["ps", "worker"]);
    assert_eq!(spec.job("worker").unwrap(), [(0, "c:3"), (1, "d:4"), (2, "[::1]:5")]);
    assert_eq!(spec.tasks("ps").unwrap(), ["/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"]);
    assert_eq!(spec.address("/job:ps/replica:0/task:1"), Some("b:2"));
    assert_eq!(spec.task_address("ps", 1).unwrap(), "b:2");
}

#[test]
fn a_plain_name_is_that_of_task_0_of_its_job() {
    let spec = ClusterSpec::new().worker("server", "a:1");
    spec.check().unwrap();
    assert_eq!(spec.names().collect::<Vec<_>>(), ["/job:server/replica:0/task:0"]);
    assert_eq!((spec.address("server"), spec.task_address("server", 0).unwrap()), (Some("a:1"), "a:1"));
    let twice = refused(&spec.worker("/job:server/replica:0/task:0", "b:2"));
    names_all(&twice, &["/job:server/replica:0/task:0", "a:1", "b:2"]);
}

#[test]
fn tasks_come_in_the_order_of_their_numbers_and_may_have_gaps() {
    let spec =
        (0..12).fold(ClusterSpec::new(), |spec, task| spec.task("w", 11 - task, format!("h:{}", 1 + task)));
    let spec = spec.task("w", 20, "http://h:99/");
    spec.check().unwrap();
    let numbers: Vec<u32> = spec.job("w").unwrap().iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..12).chain([20]).collect::<Vec<_>>());
    assert_eq!(spec.task_address("w", 20).unwrap(), "h:99");
    let gap = spec.task_address("w", 15).unwrap_err().to_string();
    names_all(&gap, &["task 15", "`w`", "11, 20"]);
}

#[test]
fn e_duplicates_are_named_with_both_places() {
    names_all(&refused(&two_jobs().task("ps", 1, "e:5")), &["/job:ps/replica:0/task:1", "b:2", "e:5"]);
    let address = refused(&two_jobs().task("chief", 0, "b:2"));
    names_all(
        &address,
        &["`b:2`", "/job:chief/replica:0/task:0", "/job:ps/replica:0/task:1", "its own address"],
    );
    // The same address in another spelling.
    assert_eq!(refused(&two_jobs().task("chief", 0, " grpc://b:2/")), address);
}

#[test]
fn e_an_address_that_cannot_be_dialled_is_named_with_its_owner() {
    let long = format!("{}:1", "h".repeat(ADDRESS_BYTES_MAX));
    for (address, remedy) in [
        ("host", "HOST:PORT"),
        ("", "HOST:PORT"),
        (":1", "no host"),
        ("host:", "1 to 65535"),
        ("host:0", "1 to 65535"),
        ("host:65536", "1 to 65535"),
        ("host:http", "1 to 65535"),
        ("::1:80", "[::1]:PORT"),
        ("[::1:80", "not closed"),
        ("[]:80", "no host"),
        ("a b:80", "characters"),
        ("ftp://a:80", "HOST:PORT"),
        (&long, "longer"),
    ] {
        let error = refused(&ClusterSpec::new().task("ps", 0, address));
        names_all(&error, &["/job:ps/replica:0/task:0", address, remedy]);
    }
}

#[test]
fn e_names_that_are_no_workers_and_jobs_without_hosts() {
    for name in ["p.s", "/job:ps", "/job:ps/task:0"] {
        names_all(&refused(&ClusterSpec::new().worker(name, "a:1")), &[name, "/job:ps/replica:0/task:1"]);
    }
    for name in ["/task:0/replica:0/job:ps", "/job:ps/replica:0/task:0/cpu:0"] {
        let refused = refused(&ClusterSpec::new().worker(name, "a:1"));
        let (_, remedy) = refused.split_once(name).expect("the name");
        names_all(remedy, &["write", "/job:ps/replica:0/task:0"]);
    }
    names_all(&refused(&ClusterSpec::new().hosts("2ps", "a:1")), &["/job:2ps/", "begins with a letter"]);
    for hosts in ["", " , "] {
        names_all(&refused(&ClusterSpec::new().hosts("ps", hosts)), &["`ps`", "at least one"]);
    }
}

#[test]
fn e_unknown_jobs_and_tasks_are_told_what_there_is() {
    let spec = two_jobs();
    names_all(&spec.job("chief").unwrap_err().to_string(), &["`chief`", "ps, worker"]);
    names_all(&spec.task_address("ps", 2).unwrap_err().to_string(), &["task 2", "`ps`", "0, 1"]);
    names_all(&ClusterSpec::new().job("ps").unwrap_err().to_string(), &["`ps`", "none"]);
}

#[test]
fn protocols_are_mapped_to_fabrics() {
    assert_eq!(two_jobs().fabric(), None);
    for (protocol, kind) in [("grpc", FabricKind::TCP), ("grpc+verbs", FabricKind::VERBS)] {
        let spec = two_jobs().protocol(protocol);
        spec.check().unwrap();
        assert_eq!(spec.fabric(), Some(kind));
        let text = format!(r#"{{"cluster": {{"ps": ["a:1"]}}, "rpc_layer": "{protocol}"}}"#);
        assert_eq!(text.parse::<TfConfig>().unwrap().cluster.fabric(), Some(kind));
    }
}

#[test]
fn e_a_protocol_without_a_fabric_is_named_with_the_remedy() {
    for protocol in ["", "verbs", "grpc+mpi", "GRPC", "grpc+verbs "] {
        let error = refused(&two_jobs().protocol(protocol));
        names_all(&error, &[&format!("protocol = `{protocol}`"), "write `grpc+verbs`", "`grpc` for TCP"]);
    }
}

#[test]
fn tf_config_names_the_cluster_and_the_task() {
    let text = r#"{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": {"0": "d:4", "7": "e:5"},
                   "web-0": ["f:6"]},
                   "task": {"type": "ps", "index": 7}, "environment": "cloud", "rpc_layer": "grpc"}"#;
    let config: TfConfig = text.parse().unwrap();
    assert_eq!(config.task, Some(("ps".to_owned(), 7)));
    assert_eq!(config.cluster.job("ps").unwrap(), [(0, "d:4"), (7, "e:5")]);
    assert_eq!(config.cluster.job("web-0").unwrap(), [(0, "f:6")]);
    assert_eq!(config.cluster.names().count(), 6);
    assert_eq!(config.cluster.fabric(), Some(FabricKind::TCP));
    config.builder().unwrap();
    let index_as_text = text.replace("\"index\": 7", "\"index\": \"7\"");
    assert_eq!(index_as_text.parse::<TfConfig>().unwrap().task, Some(("ps".to_owned(), 7)));
    let without: TfConfig = r#"{"cluster": {"ps": ["a:1"]}}"#.parse().unwrap();
    assert_eq!((without.task.clone(), without.cluster.fabric()), (None, None));
    names_all(&without.builder().unwrap_err().to_string(), &["task", "missing", "index"]);
}

#[test]
fn e_a_bad_tf_config_is_told_field_value_and_remedy() {
    let cases: [(&str, &[&str]); 22] = [
        ("", &["the variable", "JSON"]),
        ("{", &["the variable", "`{`", "line 1"]),
        ("[1]", &["`[1]`", "write {"]),
        ("{}", &["cluster", "missing"]),
        (r#"{"cluster": 5}"#, &["cluster = `5`"]),
        (r#"{"cluster": {"ps": "a:1"}}"#, &["cluster.ps = `a:1`", "list"]),
        (r#"{"cluster": {"ps": []}}"#, &["`ps`", "at least one"]),
        (r#"{"cluster": {"ps": ["a:1", 2]}}"#, &["cluster.ps[1] = `2`", "HOST:PORT"]),
        (r#"{"cluster": {"ps": {"x": "a:1"}}}"#, &["cluster.ps = `x`", "0, 1"]),
        (r#"{"cluster": {"ps": ["a"]}}"#, &["task:0", "`a`", "HOST:PORT"]),
        (r#"{"cluster": {"ps": ["a:1"], "w": ["a:1"]}}"#, &["`a:1`", "/job:ps", "/job:w"]),
        (r#"{"cluster": {"ps": ["a:1"], "ps": ["b:1"]}}"#, &["ps", "twice"]),
        (r#"{"cluster": {"p s": ["a:1"]}}"#, &["/job:p s/", "letters"]),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": 3}"#, &["task = `3`"]),
        (
            r#"{"cluster": {"ps": ["a:1"]}, "rpc_layer": "grpc+gdr"}"#,
            &["rpc_layer = `grpc+gdr`", "`grpc+verbs`"],
        ),
        (r#"{"cluster": {"ps": ["a:1"]}, "rpc_layer": ["grpc"]}"#, &[r#"rpc_layer = `["grpc"]`"#, "`grpc`"]),
        (
            r#"{"cluster": {"ps": ["a:1"]}, "rpc_layer": "grpc", "rpc_layer": "grpc"}"#,
            &["rpc_layer", "twice"],
        ),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps"}}"#, &["task.index", "missing"]),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": 1, "index": 0}}"#, &["task.type = `1`"]),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": -1}}"#, &["task.index = `-1`"]),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": "w", "index": 0}}"#, &["`w`", "use one of ps"]),
        (r#"{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 1}}"#, &["task 1", "`ps`", "0"]),
    ];
    for (text, parts) in cases {
        names_all(&text.parse::<TfConfig>().unwrap_err().to_string(), parts);
    }
    let long = format!("\"{}\"", "ä".repeat(500));
    assert!(long.parse::<TfConfig>().unwrap_err().to_string().len() < 500);
    let deep = "[".repeat(100_000);
    assert!(deep.parse::<TfConfig>().is_err());
}
