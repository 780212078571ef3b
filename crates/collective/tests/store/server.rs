//! Servers of Redis and etcd that tests start on loopback.

use std::{
    io::{BufRead, BufReader, Read},
    net::{SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tensorwire_collective::store::StoreUrl;

use super::LONG;
use crate::skipped::installed;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    #[cfg(feature = "redis")]
    Redis,
    #[cfg(feature = "etcd")]
    Etcd,
}

/// A server with its own folder. Killed when dropped.
pub(crate) struct Server {
    service: Service,
    options: Vec<String>,
    folder: TempDir,
    pub(super) address: SocketAddr,
    process: Child,
}

impl Server {
    /// A new server. `None`, with a report, if it is not installed.
    pub(crate) fn start(service: Service) -> Option<Self> {
        Self::start_with(service, &[])
    }

    /// As [`start`](Self::start), with further options.
    pub(super) fn start_with(service: Service, options: &[&str]) -> Option<Self> {
        installed(service.program(), service.package(), service.scheme())?;
        let folder = tempfile::tempdir().unwrap();
        let options: Vec<_> = options.iter().map(|option| (*option).to_owned()).collect();
        // Another process may take the free port.
        for _ in 0..10 {
            let address = free_address();
            if let Some(process) = launch(service, address, &folder, &options).unwrap() {
                return Some(Self { service, options, folder, address, process });
            }
        }
        panic!("{} does not start", service.program());
    }

    /// Its URL, with `USER:PASSWORD@` and `/PATH` or without.
    pub(super) fn url_with(&self, credentials: &str, path: &str) -> StoreUrl {
        format!("{}://{credentials}{}{path}", self.service.scheme(), self.address).parse().unwrap()
    }

    pub(crate) fn url(&self) -> StoreUrl {
        self.url_with("", "")
    }

    pub(super) fn kill(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Restarts it at the same address, after [`kill`](Self::kill).
    pub(super) fn restart(&mut self) {
        let started = launch(self.service, self.address, &self.folder, &self.options).unwrap();
        self.process = started.expect("the port is still free");
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.process.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Posts JSON to the server, which must answer with 200.
    #[cfg(feature = "etcd")]
    pub(super) fn post(&self, path: &str, json: &str) {
        use std::io::Write as _;
        let mut stream = std::net::TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let length = json.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{json}",
            self.address
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Service {
    fn scheme(self) -> &'static str {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => "redis",
            #[cfg(feature = "etcd")]
            Self::Etcd => "etcd",
        }
    }

    fn program(self) -> &'static str {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => "redis-server",
            #[cfg(feature = "etcd")]
            Self::Etcd => "etcd",
        }
    }

    fn package(self) -> &'static str {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => "redis-server",
            #[cfg(feature = "etcd")]
            Self::Etcd => "etcd-server",
        }
    }

    fn command(self, address: SocketAddr, folder: &TempDir) -> Command {
        let mut command = Command::new(self.program());
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => {
                command.args(["--bind", "127.0.0.1", "--save", "", "--port", &address.port().to_string()]);
            }
            #[cfg(feature = "etcd")]
            Self::Etcd => {
                let [url, peer] =
                    [address.to_string(), "127.0.0.1:1".to_owned()].map(|at| format!("http://{at}"));
                command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
                // A single member, which no peer connects to.
                command.args([
                    "--listen-peer-urls",
                    "http://127.0.0.1:0",
                    "--initial-advertise-peer-urls",
                    &peer,
                ]);
                command.args(["--initial-cluster", &format!("default={peer}"), "--data-dir", "data"]);
                command.args(["--heartbeat-interval", "100", "--election-timeout", "500"]);
                command.args(["--logger", "zap", "--log-outputs", "stdout"]);
            }
        }
        command.current_dir(folder.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    /// What it has logged by the time it answers.
    fn ready(self) -> &'static [&'static str] {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => &["Ready to accept connections"],
            #[cfg(feature = "etcd")]
            Self::Etcd => &["enabled capabilities", "serving client traffic"],
        }
    }
}

/// Starts the server and waits until it answers. `None` if it ended before, as if the port is taken.
fn launch(
    service: Service,
    address: SocketAddr,
    folder: &TempDir,
    options: &[String],
) -> std::io::Result<Option<Child>> {
    let mut process = service.command(address, folder).args(options).spawn()?;
    let lines = lines_of(process.stdout.take().unwrap());
    let mut expected = service.ready().to_vec();
    while !expected.is_empty() {
        let Ok(line) = lines.recv_timeout(LONG) else {
            let _ = process.kill();
            process.wait()?;
            return Ok(None);
        };
        expected.retain(|part| !line.contains(part));
    }
    Ok(Some(process))
}

/// The lines of `output`, which is always read to its end.
fn lines_of(output: impl Read + Send + 'static) -> Receiver<String> {
    let (found, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // Nobody receives any more once the server is ready.
            let _ = found.send(line);
        }
    });
    lines
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
