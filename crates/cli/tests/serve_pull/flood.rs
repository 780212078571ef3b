//! Strangers that flood a server below its protocol, and the lines that this adds to its log with the command's filter.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use crate::common::{Process, Server, small_checkpoint, succeed, tensorwire};

/// Maximum length of the server's log: the lines that one host may cause in a minute.
const LOG_BYTES_MAX: u64 = 4 << 10;

/// Number of strangers at once, and the minimum number of visits of each.
const STRANGERS: usize = 3;
const VISITS: usize = 40;

/// Number of bytes that a stranger sends on one connection, unless it is cut.
const FLOOD_BYTES: usize = 64 << 10;

/// How long it waits after sending.
const PATIENCE: Duration = Duration::from_millis(200);

/// What an HTTP/2 client sends first: the preface and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags][..], &stream.to_be_bytes(), payload].concat()
}

fn ping_acknowledgements() -> Vec<u8> {
    frame(6, 1, 0, &[7; 8]).repeat(1000)
}

fn settings_acknowledgements() -> Vec<u8> {
    frame(4, 1, 0, &[]).repeat(1000)
}

fn pings() -> Vec<u8> {
    frame(6, 0, 0, &[7; 8]).repeat(1000)
}

/// Calls that are reset as soon as they are made.
fn resets() -> Vec<u8> {
    let path = b"/tensorwire.control.v1.Control/Attach";
    let call = [&[0x83, 0x86, 0x04, path.len() as u8][..], path, b"\x01\x01h"].concat();
    let streams = (0..500).map(|number| 2 * number + 1);
    streams
        .flat_map(|stream| [frame(1, 4, stream, &call), frame(3, 0, stream, &[0, 0, 0, 8])].concat())
        .collect()
}

/// Connects repeatedly until `is_over`, and at least `VISITS` times. Each time it waits for a moment to be cut, so that
/// its connections do not delay others in a long queue.
fn flood(address: &str, frames: &[u8], is_over: &AtomicBool) {
    for visit in 0.. {
        if visit >= VISITS && is_over.load(Ordering::Relaxed) {
            return;
        }
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let flood = [PREFACE, &frames.repeat(FLOOD_BYTES / frames.len())].concat();
        let _may_be_cut = stream.write_all(&flood);
        let _ended = stream.read_to_end(&mut Vec::new());
    }
}

/// Ends the floods, even if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `tensorwire serve`, which logs to `log`, with its own filter unless `filter` is given.
fn serve(file: &Path, log: &Path, filter: Option<&str>) -> Server {
    let mut command = tensorwire(&["serve", file.to_str().unwrap()]);
    command.stderr(File::create(log).unwrap()).envs(filter.map(|filter| ("RUST_LOG", filter)));
    let mut process = Process(command.spawn().unwrap());
    let address = process.line_after("address ");
    Server { process, address }
}

fn floods_leave_the_log_short(filter: Option<&str>) {
    for frames in [ping_acknowledgements(), resets(), settings_acknowledgements(), pings()] {
        let directory = tempfile::tempdir().unwrap();
        let (file, log) = (small_checkpoint(directory.path()), directory.path().join("log"));
        let server = serve(&file, &log, filter);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _over = Over(&is_over);
            for _ in 0..STRANGERS {
                scope.spawn(|| flood(&server.address, &frames, &is_over));
            }
            succeed(&["pull", &server.address, "--verify"]);
        });
        succeed(&["pull", &server.address, "--verify"]);
        let kind = frames[3];
        let bytes = fs::metadata(&log).unwrap().len();
        println!("frames of kind {kind}: {bytes} bytes in the log");
        let lines = fs::read_to_string(&log).unwrap();
        assert!(bytes <= LOG_BYTES_MAX, "{kind}: {bytes} bytes: {}", lines.get(..2000).unwrap_or(&lines));
        assert!(
            lines.contains("a control connection was cut") && lines.contains("the peer "),
            "{kind}: {lines}"
        );
    }
}

#[test]
fn s4_a_strangers_flood_leaves_the_commands_log_short() {
    floods_leave_the_log_short(None);
}

/// With the filter of a program that shows every warning.
#[test]
fn s4_a_strangers_flood_leaves_a_log_of_all_warnings_short() {
    floods_leave_the_log_short(Some("warn"));
}
