//! The limits of RDMA: the programs of the perftest package, between the same two devices. A client runs instead of the
//! measuring process, a server instead of the second one.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tensorwire::fabric::Runtime;
use tensorwire_verbs_reactor::VerbsFabric;

use crate::error::{BenchError, system};

/// Maximum duration of one run: `timeout` of the coreutils ends it then.
const RUN_LIMIT: &str = "60";
/// How long a server may take to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(20);
const LISTEN_POLL: Duration = Duration::from_millis(5);
/// Writes under way at once when bandwidth is measured.
pub(crate) const WRITES_OPEN: u64 = 16;
/// Minimum number of operations that the programs accept.
const OPERATIONS_MIN: u64 = 5;
/// The state of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// One of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Perftest {
    /// Plain writes in one direction, several under way; polls.
    WriteBandwidth,
    /// Half a round trip of messages, asleep until the completion's event.
    SendLatencyEvents,
    /// Half a round trip of writes; polls memory.
    WriteLatency,
}

impl Perftest {
    fn program(self) -> &'static str {
        match self {
            Self::WriteBandwidth => "ib_write_bw",
            Self::SendLatencyEvents => "ib_send_lat",
            Self::WriteLatency => "ib_write_lat",
        }
    }

    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SendLatencyEvents => "ib_send_lat -e",
            _ => self.program(),
        }
    }

    /// Minimum number of operations of one run: starting it takes much longer than a few operations.
    pub(crate) fn batch(self, bytes: usize) -> u64 {
        match self {
            Self::WriteBandwidth => ((4 << 20) / bytes.max(1) as u64).clamp(WRITES_OPEN, 64),
            Self::SendLatencyEvents | Self::WriteLatency => 64,
        }
    }

    /// Checks that the program is installed.
    pub(crate) fn check(self) -> Result<(), BenchError> {
        let program = self.program();
        match Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(BenchError::NoPerftest { program, remedy: "install the package `perftest`" })
            }
            Err(error) => Err(system(program)(error)),
        }
    }

    fn command(self, side: &VerbsSide, operations: u64, bytes: usize, port: u16) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", RUN_LIMIT, self.program(), "-F", "-d", &side.device]);
        command.args(["-i", &side.port.to_string(), "-x", &side.address.to_string()]);
        command.args(["-p", &port.to_string(), "-s", &bytes.to_string(), "-n", &operations.to_string()]);
        match self {
            Self::WriteBandwidth => command.args(["-t", &WRITES_OPEN.min(operations).to_string()]),
            Self::SendLatencyEvents => command.arg("-e"),
            Self::WriteLatency => &mut command,
        };
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command
    }
}

/// The data that perftest needs about a process's device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct VerbsSide {
    device: String,
    port: u8,
    address: u8,
}

impl VerbsSide {
    /// The device that `fabric` uses.
    pub(crate) fn new(fabric: &VerbsFabric) -> Self {
        let device = fabric.device().to_owned();
        Self { device, port: fabric.port().number, address: fabric.source().index }
    }
}

/// The server of one run, which ends after the run. Reaped when dropped, after [`RUN_LIMIT`] at the latest.
#[derive(Debug)]
pub(crate) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended long ago.
        let _ = self.0.wait();
    }
}

impl Server {
    /// Starts a server, waits until it listens, and returns its port.
    pub(crate) async fn start(
        test: Perftest,
        side: &VerbsSide,
        (operations, bytes): (u64, usize),
        clock: &dyn Runtime,
    ) -> Result<(Self, u16), BenchError> {
        // The port is free at this moment, and perftest can't be given a socket.
        let probe = TcpListener::bind((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)).map_err(system("bind"))?;
        let port = probe.local_addr().map_err(system("getsockname"))?.port();
        drop(probe);
        let mut command = test.command(side, operations.max(OPERATIONS_MIN), bytes, port);
        let mut server = Self(command.stdout(Stdio::null()).spawn().map_err(system("timeout"))?);
        let begin = clock.now();
        while !listens(port) {
            if let Some(status) = server.0.try_wait().map_err(system("wait"))? {
                return Err(failed(test, &format!("its server ended with {status}")));
            }
            if clock.now().saturating_sub(begin) > LISTEN_LIMIT {
                return Err(failed(test, "its server does not listen"));
            }
            clock.sleep(LISTEN_POLL).await;
        }
        Ok((server, port))
    }
}

/// Whether any process of this machine listens on TCP `port`.
fn listens(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .any(|table| fs::read_to_string(table).is_ok_and(|table| has_listener(&table, port)))
}

fn has_listener(table: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next(), fields.nth(1));
        local.is_some_and(|local| local.ends_with(&wanted)) && state == Some(LISTENS)
    })
}

/// Runs the client against the server that listens on `port`; returns nanoseconds per operation. Blocks until then,
/// because this process has nothing else to do.
pub(crate) fn run(
    test: Perftest,
    side: &VerbsSide,
    (operations, bytes): (u64, usize),
    port: u16,
) -> Result<f64, BenchError> {
    let mut command = test.command(side, operations.max(OPERATIONS_MIN), bytes, port);
    let output = command.arg("127.0.0.1").stdout(Stdio::piped()).output().map_err(system("timeout"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let last =
            words.lines().chain(text.lines()).rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        return Err(failed(test, &format!("{}: {last}", output.status)));
    }
    nanoseconds(test, &text, bytes).ok_or(BenchError::NoFigure { program: test.name() })
}

fn failed(test: Perftest, what: &str) -> BenchError {
    BenchError::Perftest { program: test.name(), what: what.to_owned() }
}

/// The figure of a report: the line below `#bytes`. Bandwidths are its average, times its median.
fn nanoseconds(test: Perftest, report: &str, bytes: usize) -> Option<f64> {
    let below = report.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).nth(1)?;
    let fields: Vec<f64> = below.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let ns = match test {
        // bytes, iterations, peak and average in MiB/s
        Perftest::WriteBandwidth => bytes as f64 / (fields.get(3)? * f64::from(1 << 20)) * 1e9,
        // bytes, iterations, least, most and typical in µs
        Perftest::SendLatencyEvents | Perftest::WriteLatency => fields.get(4)? * 1e3,
    };
    (ns.is_finite() && ns > 0.0).then_some(ns)
}

#[cfg(test)]
mod tests {
    use super::{Perftest, has_listener, nanoseconds};

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 65536      64               71.20              50.00                0.000800
---------------------------------------------------------------------------------------
";
    const LATENCY: &str = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]
 8       64            31.50          915.32       39.10              44.20          17.51           90.00
";

    #[test]
    fn figures_are_read_from_the_reports() {
        assert_eq!(nanoseconds(Perftest::WriteBandwidth, BANDWIDTH, 65536), Some(1_250_000.0));
        assert_eq!(nanoseconds(Perftest::WriteLatency, LATENCY, 8), Some(39_100.0));
        assert_eq!(nanoseconds(Perftest::SendLatencyEvents, "no report", 8), None);
        assert_eq!(nanoseconds(Perftest::WriteBandwidth, &BANDWIDTH.replace("50.00", "0.00"), 65536), None);
    }

    #[test]
    fn listeners_are_found_by_their_port() {
        let table = "  sl  local_address rem_address   st\n   0: 00000000:4A3B 00000000:0000 0A 0:0\n   \
                     1: 0100007F:4A3C 00000000:0000 01 0:0\n";
        assert!(has_listener(table, 0x4A3B));
        assert!(!has_listener(table, 0x4A3C) && !has_listener(table, 0x4A3D));
    }
}
