//! The targets of `tensorwire pull`, its memory, and how it continues after the loss of its server.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs::{self, File, Permissions},
    io::Read,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::mpsc,
    thread,
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use safetensors::{Dtype, tensor::TensorView};

use crate::common::{
    Process, Server, checkpoint, command_max, fail, names_in, replace, run, small_checkpoint, succeed,
    tensorwire,
};

const MIB: usize = 1 << 20;

/// A FIFO, open for reading and writing, so that opening it never waits.
struct Fifo {
    path: PathBuf,
    file: File,
}

impl Fifo {
    fn new(directory: &Path) -> Self {
        let path = directory.join("fifo");
        rustix::fs::mkfifoat(CWD, &path, Mode::from_raw_mode(0o600)).unwrap();
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        Self { path, file: File::from(file) }
    }

    /// The next `bytes` bytes.
    fn read(&self, bytes: usize) -> Vec<u8> {
        let mut file = self.file.try_clone().unwrap();
        in_time(move || {
            let mut read = vec![0; bytes];
            file.read_exact(&mut read).unwrap();
            read
        })
    }

    fn is_empty(&self) -> bool {
        rustix::io::ioctl_fionread(&self.file).unwrap() == 0
    }
}

/// The result of `action`; fails if it exceeds the limit of commands.
pub(crate) fn in_time<T: Send + 'static>(action: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(action()));
    ended.recv_timeout(command_max()).unwrap()
}

/// A pull into `output`, under way.
fn begin(address: &str, output: &Path, more: &[&str]) -> Process {
    let mut command = tensorwire(&["pull", address, "-o", output.to_str().unwrap()]);
    Process(command.args(more).spawn().unwrap())
}

/// Its exit code, and what it printed on standard error.
fn end(mut pull: Process) -> (Option<i32>, String) {
    in_time(move || {
        let mut message = String::new();
        pull.0.stderr.take().unwrap().read_to_string(&mut message).unwrap();
        (pull.0.wait().unwrap().code(), message)
    })
}

/// Writes a checkpoint of tensors of these sizes in MiB. Each byte depends on `fill` and its offset.
fn checkpoint_of(path: &Path, mebibytes: impl IntoIterator<Item = usize>, fill: u8) {
    let data: Vec<Vec<u8>> =
        mebibytes.into_iter().enumerate().map(|(place, size)| vec![fill ^ place as u8; size * MIB]).collect();
    let views = data.iter().enumerate().map(|(place, bytes)| {
        (format!("tensor.{place:03}"), TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn a_fifo_is_written_in_order_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let fifo = Fifo::new(directory.path());
    let expected = fs::read(&file).unwrap();
    let pull = begin(&server.address, &fifo.path, &["--verify"]);
    assert!(fifo.read(expected.len()) == expected, "other bytes came");
    let (code, message) = end(pull);
    assert_eq!(code, Some(0), "{message}");
    assert!(message.contains("pulled 220 tensors"), "{message}");
    assert!(fifo.is_empty() && fs::symlink_metadata(&fifo.path).unwrap().file_type().is_fifo());
}

#[test]
fn standard_output_has_the_file_and_standard_error_the_messages() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let output = run(&["pull", &server.address, "-o", "-", "--verify", "--stats"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == fs::read(&file).unwrap(), "the files differ");
    assert!(String::from_utf8_lossy(&output.stderr).contains("pulled 220 tensors"));
    let rounds = fail(&["pull", &server.address, "-o", "-", "--repeat", "2"]);
    assert!(rounds.contains("--repeat"), "{rounds}");
}

#[test]
fn a_character_device_is_written_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let (terminal, device) = terminal();
    let inode = fs::metadata(&device).unwrap().ino();
    let output = succeed(&["pull", &server.address, "-o", device.to_str().unwrap()]);
    assert!(output.contains("pulled 1 tensors"), "{output}");
    let mut reader = terminal.try_clone().unwrap();
    let bytes = in_time(move || {
        let mut bytes = vec![0; 512];
        let length = reader.read(&mut bytes).unwrap();
        bytes.truncate(length);
        bytes
    });
    assert!(String::from_utf8_lossy(&bytes).contains(r#""shape":[4]"#), "{bytes:?}");
    let metadata = fs::metadata(&device).unwrap();
    assert!(metadata.file_type().is_char_device() && metadata.ino() == inode);
}

#[test]
fn what_a_link_leads_to_is_replaced_and_the_link_stays() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let (link, target) = (directory.path().join("link"), directory.path().join("target"));
    fs::write(&target, b"before").unwrap();
    symlink("target", &link).unwrap();
    succeed(&["pull", &server.address, "-o", link.to_str().unwrap()]);
    assert!(link.is_symlink());
    assert_eq!(fs::read(&target).unwrap(), fs::read(&file).unwrap());
    assert_eq!(names_in(directory.path()), ["link", "small.safetensors", "target"]);
}

#[test]
fn a_private_file_stays_private_and_a_new_one_is_as_others_are() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let [private, new, other] = ["private", "new", "other"].map(|name| directory.path().join(name));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    fs::write(&private, b"before").unwrap();
    fs::write(&other, b"").unwrap();
    fs::set_permissions(&private, Permissions::from_mode(0o600)).unwrap();
    for path in [&private, &new] {
        succeed(&["pull", &server.address, "-o", path.to_str().unwrap()]);
    }
    assert_eq!((mode(&private), mode(&new)), (0o600, mode(&other)));
    // Only the administrator can change the owner of files.
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&private, Some(4711), Some(4712)).unwrap();
        succeed(&["pull", &server.address, "-o", private.to_str().unwrap()]);
        let metadata = fs::metadata(&private).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), mode(&private)), (4711, 4712, 0o600));
    }
}

#[test]
fn what_is_no_file_and_no_stream_is_refused_before_anything_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let path = socket.to_str().unwrap();
    let output = fail(&["pull", "127.0.0.1:1", "-o", path]);
    assert!(output.contains("it is a socket") && output.contains(path), "{output}");
    let output = fail(&["pull", "127.0.0.1:1", "-o", "missing/."]);
    assert!(output.contains("--output = `missing/.`: it names no file"), "{output}");
    let file = small_checkpoint(directory.path());
    let before = fs::read(&file).unwrap();
    let output = fail(&["pull", "127.0.0.1:1", "-o", file.to_str().unwrap(), "--no-clobber"]);
    assert!(output.contains("--no-clobber") && output.contains(file.to_str().unwrap()), "{output}");
    assert_eq!(fs::read(&file).unwrap(), before);
}

#[test]
fn a_file_is_not_written_in_place_of_a_folder() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let missing = format!("{}/missing/", directory.path().display());
    for path in [directory.path().to_str().unwrap(), &missing] {
        let output = fail(&["pull", &server.address, "-o", path]);
        assert!(output.contains("it is a directory: name a file in it") && output.contains(path), "{output}");
    }
    assert_eq!(names_in(directory.path()), ["small.safetensors"]);
}

/// A pull into a pipe of a file that is replaced in the middle of it.
#[test]
fn s2_a_file_is_never_put_together_from_two_versions() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, [2; 40], 1);
    let mut changed = fs::read(&file).unwrap();
    let expected = changed.len();
    changed[expected - 1] ^= 1;
    let mut server = Process(tensorwire(&["serve", file.to_str().unwrap(), "--watch"]).spawn().unwrap());
    let lines = server.lines();
    let address = lines.after("address ");
    let fifo = Fifo::new(directory.path());
    let pull = begin(&address, &fifo.path, &["--memory", "8M", "--fabric", "tcp"]);
    let first = fifo.read(5 * MIB);
    replace(&file, &changed);
    lines.after("version ");
    let mut reader = fifo.file.try_clone().unwrap();
    let rest = expected - first.len();
    thread::spawn(move || reader.read_exact(&mut vec![0; rest]));
    let (code, message) = end(pull);
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains("has read newer files meanwhile"), "{message}");
}

#[test]
fn rounds_have_numbers_only_where_there_are_several() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let one = succeed(&["pull", &server.address]);
    assert!(one.starts_with("pulled 1 tensors, ") && !one.contains("round"), "{one}");
    let two = succeed(&["pull", &server.address, "--repeat", "2"]);
    assert!(two.contains("round 1: 1 tensors") && two.contains("round 2: 1 tensors"), "{two}");
}

/// The most memory that a process had at once, in bytes.
fn peak_memory(process: &Process) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Mixed sizes in no order: 240 MiB.
fn mixed() -> Vec<usize> {
    (0..96).map(|place| 1 + place * 7 % 4).collect()
}

/// Sizes of which each is too large for the memory of earlier tensors: 203 MiB.
fn growing() -> Vec<usize> {
    vec![17, 20, 24, 28, 33, 38, 43]
}

/// Pulls tensors of these sizes in MiB with `memory` MiB, and returns its peak memory in MiB.
fn peak_of_a_pull(memory: usize, sizes: Vec<usize>, more: &[&str]) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, sizes, 0x5A);
    let trust: &[&str] = if more.contains(&"hostile") { &["--trust", "hostile"] } else { &[] };
    let server = Server::start(&file, trust);
    let fifo = Fifo::new(directory.path());
    let memory = format!("{memory}M");
    let pull =
        begin(&server.address, &fifo.path, &[&["--fabric", "tcp", "--memory", &memory], more].concat());
    let (expected, last) = (fs::read(&file).unwrap(), MIB);
    let first = fifo.read(expected.len() - last);
    // The last MiB does not fit into the FIFO, so the process still runs.
    let peak = peak_memory(&pull);
    let rest = fifo.read(last);
    assert!(first == expected[..first.len()] && rest == expected[first.len()..], "other bytes came");
    let (code, message) = end(pull);
    assert_eq!(code, Some(0), "{message}");
    peak / MIB
}

/// Memory of a pull besides that for tensors, in MiB: mainly the program itself.
const BESIDE: usize = 40;

#[test]
fn s4_a_pull_takes_no_more_memory_than_it_may() {
    for (memory, sizes) in [(16, mixed()), (64, mixed()), (64, growing())] {
        let peak = peak_of_a_pull(memory, sizes, &[]);
        assert!(peak <= memory + BESIDE, "{peak} MiB instead of {memory}");
    }
}

#[test]
fn s4_a_pull_takes_no_more_memory_than_it_may_where_nobody_is_trusted() {
    let peak = peak_of_a_pull(32, mixed(), &["--trust", "hostile"]);
    assert!(peak <= 32 + BESIDE, "{peak} MiB");
}

#[test]
fn a_tensor_larger_than_the_memory_is_pulled_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let pulled = directory.path().join("pulled");
    for trust in ["cluster", "hostile"] {
        let server = Server::start(&file, &["--trust", trust]);
        let pull = ["pull", &server.address, "-o", pulled.to_str().unwrap(), "--memory", "1M", "--verify"];
        succeed(&[&pull[..], &["--fabric", "tcp", "--trust", trust]].concat());
        assert!(fs::read(&file).unwrap() == fs::read(&pulled).unwrap(), "the files differ");
    }
}

#[test]
fn large_tensors_of_the_same_host_take_no_memory_here() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, [40; 4], 1);
    let server = Server::start(&file, &[]);
    let memory = |fabric| {
        let pull = ["pull", &server.address, "--verify", "--stats", "--fabric", fabric];
        let output = succeed(&pull);
        let at = output.find("memory ").unwrap_or_else(|| panic!("{output}"));
        output[at..].split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    assert!(memory("tcp") >= 100 * MIB);
    assert!(memory("shm") <= 16 * MIB);
}

/// A pull that has written the first bytes of its file into a FIFO when its server ends, and then connects to one that
/// serves `next`. Returns its exit code, its output, and whether the whole file came.
fn pull_over_a_restart(next: Option<&[u8]>, signal: Signal, more: &[&str]) -> (Option<i32>, String, bool) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, [2; 40], 1);
    let expected = fs::read(&file).unwrap();
    let mut server = Server::start(&file, &[]);
    let fifo = Fifo::new(directory.path());
    let pull = begin(&server.address, &fifo.path, &[&["--memory", "8M", "--fabric", "tcp"], more].concat());
    let first = fifo.read(5 * MIB);
    let pid = Pid::from_raw(i32::try_from(server.process.0.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
    server.process.0.wait().unwrap();
    let address = server.address.clone();
    let _again = next.map(|bytes| {
        fs::write(&file, bytes).unwrap();
        Server::start(&file, &["--bind", &address])
    });
    let mut reader = fifo.file.try_clone().unwrap();
    let (came, rest) = mpsc::channel();
    let left = expected.len() - first.len();
    thread::spawn(move || {
        let mut read = vec![0; left];
        reader.read_exact(&mut read).unwrap();
        came.send(read)
    });
    let (code, message) = end(pull);
    let is_whole = code == Some(0) && [first, rest.recv_timeout(command_max()).unwrap()].concat() == expected;
    (code, message, is_whole)
}

#[test]
fn s4_a_pull_that_goes_on_takes_no_more_memory_than_before() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, [4; 40], 1);
    let expected = fs::read(&file).unwrap();
    let mut server = Server::start(&file, &[]);
    let fifo = Fifo::new(directory.path());
    let more = ["--memory", "128M", "--fabric", "tcp", "--retry", "50"];
    let pull = begin(&server.address, &fifo.path, &more);
    let first = fifo.read(5 * MIB);
    server.process.0.kill().unwrap();
    server.process.0.wait().unwrap();
    let address = server.address.clone();
    let _again = Server::start(&file, &["--bind", &address]);
    let rest = fifo.read(expected.len() - first.len() - MIB);
    let peak = peak_memory(&pull) / MIB;
    let last = fifo.read(MIB);
    let (code, message) = end(pull);
    assert_eq!(code, Some(0), "{message}");
    assert!([first, rest, last].concat() == expected, "other bytes came");
    assert!(message.contains("the server is lost"), "{message}");
    assert!(peak <= 128 + BESIDE, "{peak} MiB");
}

/// The bytes of the file that [`pull_over_a_restart`] serves first.
fn first_file() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    checkpoint_of(&file, [2; 40], 1);
    fs::read(&file).unwrap()
}

#[test]
fn a_pull_goes_on_where_it_was_after_its_server_was_restarted() {
    for signal in [Signal::KILL, Signal::TERM] {
        let (code, message, is_whole) = pull_over_a_restart(Some(&first_file()), signal, &["--retry", "50"]);
        assert_eq!((code, is_whole), (Some(0), true), "{message}");
    }
}

#[test]
fn a_pull_does_not_go_on_with_another_file() {
    let mut changed = first_file();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    let (code, message, _) = pull_over_a_restart(Some(&changed), Signal::KILL, &["--retry", "50"]);
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains("is another than before"), "{message}");
}

#[test]
fn s2_a_file_is_never_put_together_from_two_lives_of_a_server() {
    let mut changed = first_file();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    let (code, message, _) = pull_over_a_restart(Some(&changed), Signal::KILL, &[]);
    assert_eq!(code, Some(4), "{message}");
}

#[test]
fn a_pull_whose_server_does_not_come_back_ends() {
    let (code, message, _) = pull_over_a_restart(None, Signal::KILL, &["--retry", "1"]);
    assert_eq!(code, Some(4), "{message}");
    assert!(message.contains("within 1 s (--retry)"), "{message}");
}

/// Both ends of a new terminal with 80 columns, the second by its name.
pub(crate) fn terminal() -> (File, PathBuf) {
    let master: OwnedFd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&master, size).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    (File::from(master), PathBuf::from(name))
}

#[test]
fn a_terminal_is_told_what_is_being_done() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&checkpoint(directory.path()), &[]);
    let (mut master, device) = terminal();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = rustix::fs::open(&device, flags, Mode::empty()).unwrap();
    let pulled = directory.path().join("pulled");
    let mut pull = tensorwire(&["pull", &server.address, "-o", pulled.to_str().unwrap(), "--verify"]);
    pull.env("TERM", "xterm").stderr(Stdio::from(slave));
    let process = pull.spawn().unwrap();
    // This drops this process's end of the terminal.
    drop(pull);
    let mut pull = Process(process);
    let shown = in_time(move || {
        let (mut shown, mut piece) = (Vec::new(), [0; 4096]);
        // An error: no process has the FIFO open for reading any more.
        while let Ok(length @ 1..) = master.read(&mut piece) {
            shown.extend_from_slice(&piece[..length]);
        }
        String::from_utf8_lossy(&shown).into_owned()
    });
    assert!(pull.0.wait().unwrap().success(), "{shown}");
    let phases = ["connecting", "taking room", "pulling and verifying", "left", "writing to the disk"];
    let places = phases.map(|phase| shown.find(phase).unwrap_or_else(|| panic!("no {phase}: {shown}")));
    assert!(places.is_sorted(), "{shown}");
    // Without the sequences that clear a line, each state of the progress fits into one line.
    let plain = shown.split('\x1b').map(|part| part.trim_start_matches(&['[', '0', '1', '2', 'K', 'A'][..]));
    let plain = plain.collect::<String>();
    let wide = plain.split(['\r', '\n']).find(|line| line.chars().count() > 80);
    assert_eq!(wide, None, "{shown:?}");
}
