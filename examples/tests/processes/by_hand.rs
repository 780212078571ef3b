//! Every process started by itself, as on several hosts.

use std::{
    iter,
    net::TcpListener,
    process::Command,
    sync::atomic::{AtomicU16, Ordering},
};

use crate::program::{Running, parameter_server, summary_value};

/// Flags that every process of a cluster with `servers` and `workers` gets.
pub(crate) fn cluster(servers: usize, workers: usize, more: &str) -> String {
    // Bound until all are found, so that all differ.
    let held: Vec<TcpListener> = free_ports().take(servers + workers).collect();
    let mut hosts: Vec<String> =
        held.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    let workers = hosts.split_off(servers).join(",");
    format!("--ps_hosts={} --worker_hosts={workers} {more}", hosts.join(","))
}

/// Below the ports of outgoing connections, and apart from those that a launcher of another test tries first. Two tests
/// of this process never get the same ports, nor do processes with neighbouring numbers: each test may be a process,
/// and a port is unused between its choice and its use.
fn free_ports() -> impl Iterator<Item = TcpListener> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 32_000 + (std::process::id() % 80) as u16 * 8;
    let ports = iter::repeat_with(move || start + NEXT.fetch_add(1, Ordering::Relaxed));
    ports.filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok())
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
    let cluster = cluster(2, 2, "--steps=40 --learning_rate=0.1");
    let second = start(&cluster, "worker", 1);
    // A process that waits prints which peer it waits for.
    second.line(|line| line.starts_with("waiting "));
    let servers = [0, 1].map(|index| start(&cluster, "ps", index));
    servers.iter().for_each(|server| drop(server.line(|line| line.starts_with("waiting      cannot reach"))));
    let chief = start(&cluster, "worker", 0);
    let text = ends_well(chief);
    assert!(text.contains("training     20/40 steps, loss "), "{text}");
    assert!(summary_value(&text, "accuracy").contains("540 held-out"), "{text}");
    assert!(summary_value(&text, "difference").contains("at most"), "{text}");
    let others = [second].into_iter().chain(servers).map(ends_well);
    others.for_each(|text| assert!(!text.contains("accuracy"), "one process prints the result: {text}"));
}

#[test]
fn a_worker_that_comes_late_joins() {
    let cluster = cluster(1, 2, "--steps=40");
    let server = start(&cluster, "ps", 0);
    let chief = start(&cluster, "worker", 0);
    server.line(|line| line.starts_with("waiting "));
    let late = start(&cluster, "worker", 1);
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
