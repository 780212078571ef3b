//! `tensorwire serve` and `tensorwire pull` as processes, over TLS.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{fs, net::TcpListener, path::Path};

use tensorwire_fabric_tcp::tls::test_certificates::{Authority, Wanted};

use crate::common::{Server, fail, small_checkpoint, succeed};

const SERVER: &str = "/job:serve/replica:0/task:0";
const CLIENT: &str = "/job:pull/replica:0/task:*";

/// Writes the files of a member called `name`, and returns the options that name them.
fn member(directory: &Path, authority: &Authority, name: &str, file: &str) -> Vec<String> {
    let issued = authority.issue(&Wanted::worker(name)).unwrap();
    let parts = [("cert", issued.certificate), ("key", issued.key), ("ca", issued.authorities)];
    let write = |(part, pem): (&str, String)| {
        let path = directory.join(format!("{file}.{part}.pem"));
        fs::write(&path, pem).unwrap();
        [format!("--tls-{part}"), path.to_str().unwrap().to_owned()]
    };
    parts.into_iter().flat_map(write).collect()
}

fn with<'line>(line: &[&'line str], more: &'line [String]) -> Vec<&'line str> {
    line.iter().copied().chain(more.iter().map(String::as_str)).collect()
}

#[test]
fn e_a_server_and_a_client_prove_themselves_by_certificates() {
    let directory = tempfile::tempdir().unwrap();
    let (here, authority) = (directory.path(), Authority::new().unwrap());
    let file = small_checkpoint(here);
    let serves = member(here, &authority, SERVER, "server");
    // Beyond loopback, without a secret.
    let server = Server::start(&file, &with(&["--bind", "0.0.0.0:0"], &serves));
    let address = format!("127.0.0.1:{}", server.address.rsplit(':').next().unwrap());
    let pulls = member(here, &authority, CLIENT, "client");
    let output = succeed(&with(&["pull", &address, "--verify", "--fabric", "tcp"], &pulls));
    assert!(output.contains("over tcp"), "{output}");

    let stranger = member(here, &Authority::new().unwrap(), CLIENT, "stranger");
    let output = fail(&with(&["pull", &address], &stranger));
    assert!(output.contains("signed by no CA that is trusted here"), "{output}");
    let output = fail(&["pull", &address]);
    assert!(
        output.contains("speaks TLS, and this worker does not") && output.contains("(--tls-cert)"),
        "{output}"
    );
    let other = member(here, &authority, "/job:worker/replica:0/task:0", "other");
    let output = fail(&with(&["pull", &address, "--tls-names", "any-member"], &other));
    assert!(output.contains("refuses this one"), "{output}");
    assert!(output.contains("--tls-names any-member") && !output.contains("tls_names"), "{output}");
}

#[test]
fn e_errors_of_files_name_them() {
    let directory = tempfile::tempdir().unwrap();
    let (here, authority) = (directory.path(), Authority::new().unwrap());
    let mut pulls = member(here, &authority, CLIENT, "client");
    let foreign = member(here, &authority, CLIENT, "foreign");
    pulls[3].clone_from(&foreign[3]);
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = fail(&with(&["pull", &unused], &pulls));
    assert!(output.contains("foreign.key.pem") && output.contains("does not belong"), "{output}");
}
