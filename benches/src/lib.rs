//! Support code of the benchmarks: a server in a separate process, and the physical limits to compare its figures with.

#![forbid(unsafe_code)]

pub mod fabric_pair;
pub mod frames;
pub mod grpc;
pub mod process;
pub mod random;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};

use tensorwire::{
    DataType, FabricKind, Status, Tensor, Worker, WorkerError,
    calls::{Call, Handling},
    settings::Wait,
};

/// Why a measurement ended early.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Environment variable of the child that serves.
const SERVE: &str = "TENSORWIRE_BENCH_SERVE";

/// Sizes that are pulled, in bytes.
pub const SIZES: [usize; 5] = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// The name of the handler that answers with its arguments.
pub const ECHO: &str = "echo";

/// The name a tensor of `bytes` bytes is published under.
pub fn tensor_name(bytes: usize) -> String {
    format!("tensor of {bytes} bytes")
}

/// Runs the server instead of the benchmarks when this process is the server's; call it first in `main`.
pub fn serve_if_child() {
    if std::env::var_os(SERVE).is_none() {
        return;
    }
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().map(|runtime| {
        runtime.block_on(serve()).unwrap_or_else(|error| eprintln!("the benchmark's server failed: {error}"));
    });
    std::process::exit(i32::from(served.is_err()));
}

/// Publishes a tensor of each size, prints the addresses, and ends when the parent closes its stdin.
async fn serve() -> Result<(), WorkerError> {
    let (sleeping, _answers) = serving(Wait::Sleep).await?;
    let (adaptive, _answers_too) = serving(Wait::Adaptive).await?;
    let (close, closed) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = close.send(());
    });
    let print = |grpc: std::net::SocketAddr| println!("{} {} {grpc}", sleeping.address(), adaptive.address());
    let closed = async { closed.await.unwrap_or_default() };
    if let Err(error) = grpc::serve(&SIZES, print, closed).await {
        eprintln!("the benchmark's gRPC server failed: {error}");
    }
    sleeping.shutdown().await;
    adaptive.shutdown().await;
    Ok(())
}

/// A worker with this `wait` that has published a tensor of each size, and answers [`ECHO`].
async fn serving(wait: Wait) -> Result<(Worker, Handling), WorkerError> {
    let worker = Worker::builder("/job:bench/replica:0/task:0").wait(wait).start().await?;
    for bytes in SIZES {
        let mut buffer = worker.pool().try_alloc(bytes)?;
        buffer.fill(7);
        worker.publish(&tensor_name(bytes), Tensor::new(buffer, DataType::U8, &[bytes as u64])?)?;
    }
    let echo = |call: Call| async move { Ok::<_, Status>(call.into_arguments()) };
    let handling = worker.handle(ECHO, echo)?;
    Ok((worker, handling))
}

/// The serving child. Dropping this ends it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Address of its worker that sleeps at once.
    pub sleeping: String,
    /// Address of its worker that waits adaptively.
    pub adaptive: String,
    /// Address of its gRPC service.
    pub grpc_address: String,
}

impl Server {
    /// Starts this program again as the server.
    ///
    /// # Errors
    /// The child cannot be started, or prints nothing.
    pub fn start() -> std::io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(SERVE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let mut next = || words.next().unwrap_or_default();
        Ok(Self { child, sleeping: next(), adaptive: next(), grpc_address: next() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A worker that pulls from `server` only over `kind`. Both sides wait as set by `wait`: sleeping or adaptively.
///
/// # Errors
/// The server cannot be reached over that fabric.
pub async fn puller(
    server: &Server,
    kind: FabricKind,
    wait: Wait,
) -> Result<(Worker, tensorwire::Peer), WorkerError> {
    let name = format!("/job:bench_{kind}/replica:0/task:0");
    let worker = Worker::builder(&name).require(kind).wait(wait).start().await?;
    let address = if wait == Wait::Sleep { &server.sleeping } else { &server.adaptive };
    let peer = worker.peer_at(address).await?;
    Ok((worker, peer))
}

/// A blocking TCP stream over loopback. Its peer, a thread, answers every byte with a fixed number of bytes: the
/// physical limit of a pull over TCP.
#[derive(Debug)]
pub struct RawPull {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl RawPull {
    /// Pulls of `bytes` bytes.
    ///
    /// # Errors
    /// The sockets cannot be made.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let _ = stream.set_nodelay(true);
            let payload = vec![7u8; bytes];
            let mut ask = [0];
            while stream.read_exact(&mut ask).is_ok() && stream.write_all(&payload).is_ok() {}
        });
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; bytes] })
    }

    /// One pull.
    ///
    /// # Errors
    /// The stream broke.
    pub fn pull(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&[1])?;
        self.stream.read_exact(&mut self.buffer)
    }
}
