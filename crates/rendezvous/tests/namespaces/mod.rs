//! Networks of a test's own: the test binary again, in namespaces that a script sets up. The namespaces end with their processes,
//! also if the test fails or is killed. Include it with `#[path]`.

#![allow(dead_code, unreachable_pub)] // each test binary compiles this as its own module

use std::{
    env,
    fs::File,
    io::Write,
    process::{Command, Stdio},
    thread,
};

/// Set within the namespaces.
const INSIDE: &str = "TENSORWIRE_TEST_NAMESPACES";

/// The name of a file that gets a line for each skipped test.
const SKIPPED: &str = "TENSORWIRE_TEST_SKIPPED";

/// The ways to make namespaces, for an ordinary user and for root.
const WAYS: [&[&str]; 2] = [
    &["--user", "--map-root-user", "--net", "--mount", "--kill-child"],
    &["--net", "--mount", "--kill-child"],
];

/// Three hosts: `client` with 10.1.0.2, `server` with 10.2.0.2, and `router` between them.
pub const ROUTED: &str = "
    for host in client router server; do ip netns add $host; ip -n $host link set lo up; done
    for end in client:1 server:2; do
        host=${end%:*} net=10.${end#*:}.0
        ip link add $host netns $host type veth peer name to-$host netns router
        ip -n $host address add $net.2/24 dev $host
        ip -n router address add $net.1/24 dev to-$host
        ip -n $host link set $host up
        ip -n router link set to-$host up
        ip -n $host route add default via $net.1
    done
    ip netns exec router sysctl -q net.ipv4.ip_forward=1
";

/// An interface `sink` that swallows all packets for 2001:db8::2, which is the first address of the name `twofold`. The second one
/// is 127.0.0.1.
pub const TWOFOLD: &str = "
    ip link add sink type veth peer name nobody
    ip link set nobody up
    ip link set sink up
    ip address add 2001:db8::1/64 dev sink nodad
    ip neighbour add 2001:db8::2 lladdr 02:00:00:00:00:02 dev sink
    printf '127.0.0.1 twofold\\n2001:db8::2 twofold\\n' >/run/hosts
    mount --bind /run/hosts /etc/hosts
";

/// Runs `body` in namespaces that the shell script `set_up` prepares: as a process in the namespace `host` of the script (`None`: in
/// that of the script itself), which runs `test` (`module::name`) again. Reports the test as skipped where this system permits no
/// namespaces.
pub fn within(test: &str, set_up: &str, host: Option<&str>, body: impl FnOnce()) {
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let able = |way: &&&[&str]| {
        let tried = Command::new("unshare").args(**way).args(["ip", "link", "set", "lo", "up"]).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    let Some(way) = WAYS.iter().find(able) else { return skip() };
    let enter = host.map_or_else(String::new, |host| format!("ip netns exec {host} "));
    let script = format!("set -eu; mount -t tmpfs run /run; ip link set lo up; {set_up}\nexec {enter}\"$@\"");
    let mut command = Command::new("unshare");
    command.args(*way).args(["sh", "-c", &script, "sh"]).arg(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--include-ignored"]).env(INSIDE, "1");
    let ended = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let told = text(&ended.stdout) + &text(&ended.stderr);
    assert!(ended.status.success() && told.contains("1 passed"), "{told}");
}

/// A command that runs this program on `host`.
pub fn on(host: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", host]).arg(env::current_exe().unwrap());
    command
}

/// Runs `ip` on `host`.
pub fn ip(host: &str, arguments: &str) {
    let ended = Command::new("ip").args(["-n", host]).args(arguments.split(' ')).output().unwrap();
    assert!(ended.status.success(), "ip -n {host} {arguments}: {}", String::from_utf8_lossy(&ended.stderr));
}

fn skip() {
    let current = thread::current();
    let test = current.name().unwrap_or("a test");
    let line =
        format!("SKIPPED: namespaces {test} this system permits no network namespaces: run it as root\n");
    print!("{line}");
    if let Some(path) = env::var_os(SKIPPED) {
        File::options().create(true).append(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
    }
}
