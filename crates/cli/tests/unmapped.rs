//! Processes in user namespaces that map only some users. All other users have one id there, the kernel's overflow id.

use std::{
    fs,
    io::Write,
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr, UnixListener},
        },
    },
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    common::{Process, command_max, failed, finish, small_checkpoint, succeed_as},
    skipped::{installed, skip},
};

/// Options with which a process gets the overflow id in a new namespace: its user is not mapped, or is mapped to that
/// id.
const NAMESPACES: [&[&str]; 2] = [&["-U"], &["-U", "--map-user=65534"]];

/// The command in such a namespace.
fn tensorwire(namespace: &[&str], arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(namespace).arg(env!("CARGO_BIN_EXE_tensorwire")).args(arguments);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command there, which must fail, and returns its output.
fn fail(namespace: &[&str], arguments: &[&str]) -> String {
    failed(arguments, &finish(tensorwire(namespace, arguments), command_max()))
}

/// Whether the system allows such namespaces. If not, the test is reported as skipped.
fn are_there() -> bool {
    if installed("unshare", "util-linux", file!()).is_none() {
        return false;
    }
    let tried = Command::new("unshare").args(NAMESPACES[1]).arg("true").stderr(Stdio::null()).status();
    let there = tried.unwrap().success();
    if !there {
        skip(
            file!(),
            "this system lets nobody make user namespaces: set kernel.unprivileged_userns_clone or be root",
        );
    }
    there
}

fn secret(folder: &Path) -> String {
    let path = folder.join("secret");
    fs::write(&path, "a secret that both workers have").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn e_who_may_be_any_unmapped_user_neither_gives_nor_takes_a_secret() {
    if !are_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = small_checkpoint(folder.path());
    for namespace in NAMESPACES {
        let refused = fail(namespace, &["serve", file.to_str().unwrap(), "--bind", "127.0.0.1:0"]);
        assert!(refused.contains("give a secret file") && refused.contains("uid_map"), "{refused}");
        // A process of a user with the same id there hands over a secret.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = port.local_addr().unwrap();
        let name = SocketAddr::from_abstract_name(format!("tensorwire-{}", address.port())).unwrap();
        let giver = UnixListener::bind_addr(&name).unwrap();
        giver.set_nonblocking(true).unwrap();
        let copy = folder.path().join("copy");
        let refused = fail(namespace, &["pull", &address.to_string(), "-o", copy.to_str().unwrap()]);
        assert!(refused.contains("give a secret file"), "{refused}");
        if let Ok((mut stream, _)) = giver.accept() {
            let _ = stream.write_all(&[[7; 32].as_slice(), address.to_string().as_bytes()].concat());
            panic!("it asked for the secret of a user it cannot know");
        }
    }
}

#[test]
fn e_with_a_secret_who_may_be_any_unmapped_user_shares_no_memory_and_maps_no_file() {
    if !are_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (file, secret) = (small_checkpoint(folder.path()), secret(folder.path()));
    let path = file.to_str().unwrap();
    for namespace in NAMESPACES {
        let serve = ["serve", path, "--bind", "127.0.0.1:0", "--secret-file", &secret];
        let refused = fail(namespace, &[&serve[..], &["--mmap"]].concat());
        assert!(refused.contains("cannot be told from others"), "{refused}");
        let mut server = Process(tensorwire(namespace, &serve).stderr(Stdio::inherit()).spawn().unwrap());
        let address = server.line_after("address ");
        let copy = folder.path().join("copy");
        let pull = ["pull", &address, "-o", copy.to_str().unwrap(), "--secret-file", &secret];
        let refused = fail(namespace, &[&pull[..], &["--fabric", "shm"]].concat());
        assert!(refused.contains("cannot be told from others"), "{refused}");
        let there = succeed_as(tensorwire(namespace, &pull));
        let here = succeed_as(crate::common::tensorwire(&pull));
        for output in [there, here] {
            assert!(output.contains("over tcp"), "{output}");
        }
        assert!(fs::read(&file).unwrap() == fs::read(&copy).unwrap(), "the files differ");
    }
}
