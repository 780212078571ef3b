//! Every process started by itself, as on several hosts.

use std::{net::TcpListener, process::Command};

use crate::program::{Running, parameter_server, summary_value};

/// Flags that every process of a cluster with `servers` and `workers` gets.
pub(crate) fn cluster(servers: usize, workers: usize, more: &str) -> String {
    // Held until all are found, so that no two are the same.
    let held: Vec<TcpListener> = free_ports().take(servers + workers).collect();
    let mut hosts: Vec<String> =
        held.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    let workers = hosts.split_off(servers).join(",");
    format!("--ps_hosts={} --worker_hosts={workers} {more}", hosts.join(","))
}

/// Below the ports that outgoing connections get, and apart from those that a launcher of another test looks at first.
fn free_ports() -> impl Iterator<Item = TcpListener> {
    let start = 32_000 + (std::process::id() % 700) as u16;
    (start..).map_while(|port| Some(TcpListener::bind(("127.0.0.1", port)))).filter_map(Result::ok)
}

fn start(cluster: &str, job: &str, index: usize) -> Running {
    Running::start(one_process(cluster, job, index))
}

pub(crate) fn one_process(cluster: &str, job: &str, index: usize) -> Command {
    parameter_server(&format!("{cluster} --job_name={job} --task_index={index}"))
}

pub(crate) fn ends_well(process: Running) -> String {
    let (status, text) = process.end();
    assert!(status.success(), "{status}: {text}");
    text
}

#[test]
fn processes_started_by_hand_in_any_order_train_and_end() {
    let cluster = cluster(2, 2, "--steps=40 --issync=1 --learning_rate=0.05 --steps_to_validate=20");
    let second = start(&cluster, "worker", 1);
    let servers = [0, 1].map(|index| start(&cluster, "ps", index));
    let chief = start(&cluster, "worker", 0);
    let text = ends_well(chief);
    assert!(text.contains("step 20 "), "{text}");
    assert!(summary_value(&text, "accuracy").contains("540 held-out"), "{text}");
    assert!(summary_value(&text, "difference").contains("at most"), "{text}");
    ends_well(second);
    servers.into_iter().for_each(|server| drop(ends_well(server)));
}

#[test]
fn a_worker_that_comes_late_joins() {
    let cluster = cluster(1, 2, "--steps=300 --steps_to_validate=1");
    let server = start(&cluster, "ps", 0);
    let chief = start(&cluster, "worker", 0);
    server.line(|line| line.contains("step=20 ") && line.contains("worker=0"));
    let late = start(&cluster, "worker", 1);
    server.line(|line| line.contains("joined=1"));
    server.line(|line| line.contains("loss=") && line.contains("worker=1"));
    [late, chief, server].into_iter().for_each(|process| drop(ends_well(process)));
}

#[test]
fn a_worker_without_servers_gives_up_and_says_who_is_missing() {
    let cluster = cluster(1, 1, "--patience=1");
    let server = cluster.split(&['=', ' '][..]).nth(1).unwrap().to_owned();
    let (status, text) = start(&cluster, "worker", 0).end();
    assert!(!status.success() && text.contains("given up after 1 seconds"), "{text}");
    assert!(text.contains(&format!("cannot reach the worker at `{server}`")), "{text}");
}

#[test]
fn an_address_that_is_taken_is_named() {
    let cluster = cluster(1, 1, "");
    let address = cluster.split(&['=', ' '][..]).nth(1).unwrap().to_owned();
    let _taken = TcpListener::bind(&address).unwrap();
    let (status, text) = start(&cluster, "ps", 0).end();
    assert!(!status.success() && text.contains(&format!("cannot listen on `{address}`")), "{text}");
}
