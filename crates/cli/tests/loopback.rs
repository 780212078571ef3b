//! A relay of another user between a server and a client of one user, on the same loopback.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does
#![allow(clippy::disallowed_methods)] // it measures real processes, by the real clock

use std::{
    env, fs,
    io::{self, Read, Write},
    net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::geteuid;

use crate::{
    common::{Process, small_checkpoint, succeed_as},
    skipped::skip,
};

/// Environment variable of the relay: the address of the server, and that of the relay.
const RELAY: &str = "TENSORWIRE_TEST_RELAY";

/// Environment variable of the flood: the port of the server.
const FLOOD: &str = "TENSORWIRE_TEST_FLOOD";

/// The user of server and client, and the user of the relay. Only root can become them; otherwise all have one user,
/// and the relay, which uses none of that user's rights, must still get nothing.
pub(crate) const OWNER: u32 = 60_001;
const OTHER: u32 = 60_002;

/// A directory that every user can access, with the programs in it.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        // The directory of temporary files may be closed to other users.
        let place = Self(tempfile::tempdir_in("/tmp").unwrap());
        open(place.0.path(), 0o777);
        fs::copy(env!("CARGO_BIN_EXE_tensorwire"), place.path("tensorwire")).unwrap();
        fs::copy(env::current_exe().unwrap(), place.path("relay")).unwrap();
        ["tensorwire", "relay"].iter().for_each(|program| open(&place.path(program), 0o755));
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `program` as a process of `user`.
    pub(crate) fn run(&self, user: u32, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path(program));
        command.args(arguments).current_dir(self.0.path());
        command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if geteuid().is_root() {
            command.uid(user).gid(user);
        }
        command
    }

    /// A process of another user that listens on `on` and relays to the same port of `to`.
    fn relay(&self, test: &str, to: IpAddr, on: IpAddr) -> Process {
        let mut command = self.run(OTHER, "relay", &[test, "--exact", "--nocapture"]);
        command.env(RELAY, format!("{to} {on}")).stdin(Stdio::piped()).stderr(Stdio::inherit());
        Process(command.spawn().unwrap())
    }
}

fn open(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs in the relay: passes bytes on until its standard input ends, and fails if it got any.
fn relay(to: IpAddr, on: IpAddr) {
    let listener = TcpListener::bind((on, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let passed = Arc::new(AtomicU64::new(0));
    let counted = passed.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect((to, port)).unwrap());
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            for (from, into) in [(client, server), back] {
                let counted = counted.clone();
                thread::spawn(move || pass(from, into, &counted));
            }
        }
    });
    println!("\nlistens {port}");
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let passed = passed.load(Ordering::SeqCst);
    assert_eq!(passed, 0, "bytes of a session between processes of another user");
}

fn pass(mut from: TcpStream, mut into: TcpStream, counted: &AtomicU64) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        counted.fetch_add(read as u64, Ordering::SeqCst);
        if into.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
}

/// Runs in the flood: connects without end to the socket on which the server at `port` hands its secret over, and
/// closes each connection at once.
fn flood(port: &str) {
    let name = SocketAddr::from_abstract_name(format!("tensorwire-{port}")).unwrap();
    let connect = || {
        loop {
            let _ = UnixStream::connect_addr(&name);
        }
    };
    thread::scope(|scope| {
        scope.spawn(connect);
        scope.spawn(connect);
        println!("\nfloods ");
    });
}

/// The time that a process has used so far, in hundredths of a second.
fn used(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, after_name) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = after_name.split(' ').collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn e_another_users_flood_at_the_hand_over_socket_keeps_nobody_out_and_costs_little() {
    if let Ok(port) = env::var(FLOOD) {
        return flood(&port);
    }
    if !geteuid().is_root() {
        return skip(file!(), "only root can become another user");
    }
    let place = Place::new();
    let file = small_checkpoint(place.0.path());
    open(&file, 0o644);
    let serve = ["serve", file.to_str().unwrap(), "--bind", "127.0.0.1:0"];
    let mut server =
        Process(place.run(OWNER, "tensorwire", &serve).stderr(Stdio::inherit()).spawn().unwrap());
    let address = server.line_after("address ");
    let (_, port) = address.rsplit_once(':').unwrap();
    let test = "loopback::e_another_users_flood_at_the_hand_over_socket_keeps_nobody_out_and_costs_little";
    let mut flood = place.run(OTHER, "relay", &[test, "--exact", "--nocapture"]);
    let mut flood = Process(flood.env(FLOOD, port).stderr(Stdio::inherit()).spawn().unwrap());
    flood.line_after("floods ");
    let (began, used_before) = (Instant::now(), used(server.0.id()));
    let copy = place.path("copy");
    for _ in 0..3 {
        let pull = ["pull", &address, "-o", copy.to_str().unwrap(), "--verify"];
        succeed_as(place.run(OWNER, "tensorwire", &pull));
    }
    let (took, used) = (began.elapsed(), used(server.0.id()) - used_before);
    assert!(flood.0.try_wait().unwrap().is_none(), "the flood went on");
    println!("{used} hundredths of a second in {took:?}");
    assert!(Duration::from_millis(10 * used) < took / 4, "{used} hundredths of a second in {took:?}");
}

#[test]
fn e_a_relay_of_another_user_on_loopback_gets_nothing() {
    if let Ok(ends) = env::var(RELAY) {
        let (to, on) = ends.split_once(' ').unwrap();
        return relay(to.parse().unwrap(), on.parse().unwrap());
    }
    // A client of localhost tries its first address first, and the relay listens there.
    let first = ("localhost", 0).to_socket_addrs().unwrap().next().unwrap().ip();
    let own = IpAddr::from(if first.is_ipv6() { [127, 0, 0, 1] } else { [127, 0, 0, 2] });
    let place = Place::new();
    let file = small_checkpoint(place.0.path());
    open(&file, 0o644);
    let (file, test) =
        (file.to_str().unwrap(), "loopback::e_a_relay_of_another_user_on_loopback_gets_nothing");
    for fabric in ["shm", "tcp"] {
        let mut relay = place.relay(test, own, first);
        let port = relay.line_after("listens ");
        let mut server = place.run(OWNER, "tensorwire", &["serve", file, "--bind", &format!("{own}:{port}")]);
        let mut server = Process(server.stderr(Stdio::inherit()).spawn().unwrap());
        assert_eq!(server.line_after("address "), format!("{own}:{port}"));
        let pulled = place.path(fabric);
        let (address, to) = (format!("localhost:{port}"), pulled.to_str().unwrap());
        let arguments = ["pull", &address, "-o", to, "--verify", "--fabric", fabric];
        let output = succeed_as(place.run(OWNER, "tensorwire", &arguments));
        assert!(output.contains(&format!("over {fabric}")), "{output}");
        assert!(fs::read(file).unwrap() == fs::read(&pulled).unwrap(), "the files differ");
        drop(relay.0.stdin.take());
        assert!(relay.0.wait().unwrap().success(), "{fabric}: the relay on {first} got something");
    }
}
