//! What a step of training moves: two workers, each a process, pull all parameters of a ResNet-50 from a server and hand it
//! their gradients, over each way of tensorwire and as a service written with tonic has it, with a unary call for each
//! tensor. Nothing is computed.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc,
};

use criterion::{Criterion, Throughput, criterion_group};
use futures::future::{join_all, pending, try_join_all};
use tensorwire::{FabricKind, Peer, Sharing, Tensor, Worker, WorkerBuilder};
use tensorwire_benches::grpc::{self, Puller};
use tokio::runtime::Runtime;

const WORKERS: usize = 2;
/// Set in the environment of a child: which worker it is.
const WORKER: &str = "TENSORWIRE_BENCH_WORKER";
/// Ways of tensorwire; the other one is `grpc`.
const WAYS: [&str; 3] = ["shm", "views", "tcp"];

/// Residual blocks of each stage, and how many channels they work with and give on.
const STAGES: [(usize, usize, usize); 4] = [(3, 64, 256), (4, 128, 512), (6, 256, 1_024), (3, 512, 2_048)];

/// Elements of each of ResNet-50's 161 tensors: 25,557,032 together, from 64 to 2,359,296 in one.
fn resnet50() -> Vec<usize> {
    let mut sizes = Vec::new();
    // A convolution is followed by scale and offset for each channel.
    let mut convolution =
        |weights: usize, channels: usize| sizes.extend([weights * channels, channels, channels]);
    convolution(7 * 7 * 3, 64);
    let mut channels = 64;
    for (blocks, narrow, wide) in STAGES {
        for block in 0..blocks {
            convolution(channels, narrow);
            convolution(3 * 3 * narrow, narrow);
            convolution(narrow, wide);
            if block == 0 {
                convolution(channels, wide);
            }
            channels = wide;
        }
    }
    sizes.extend([channels * 1_000, 1_000]);
    sizes
}

fn names() -> Vec<String> {
    (0..resnet50().len()).map(|index| format!("tensor {index}")).collect()
}

/// Both sides use threads as a service written with tonic has them.
fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}

fn builder(way: &str, job: &str) -> WorkerBuilder {
    let builder = Worker::builder(&format!("{job}_{way}"));
    match way {
        "shm" => builder.require(FabricKind::SHM),
        "views" => builder.require(FabricKind::SHM).sharing(Sharing::View),
        _ => builder.require(FabricKind::TCP),
    }
}

/// A worker of tensorwire that has published a tensor of each size.
async fn publishing(builder: WorkerBuilder) -> Worker {
    let worker = builder.start().await.expect("a worker");
    for (name, size) in names().iter().zip(resnet50()) {
        let tensor = Tensor::from_values(worker.pool(), &[size as u64], &vec![0.5f32; size]);
        worker.publish(name, tensor.expect("a tensor")).expect("a name");
    }
    worker
}

/// A child that is a worker, controlled by lines on its standard input.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(index: usize) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.env(WORKER, index.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a child");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Self { input: child.stdin.take(), output, child }
    }

    fn command(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("its input"), "{line}").expect("a child that listens");
    }

    fn is_done(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        assert_eq!(line, "done\n");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

fn command_all(processes: &mut [Process], line: &str) {
    processes.iter_mut().for_each(|process| process.command(line));
    processes.iter_mut().for_each(Process::is_done);
}

/// The main function of a child: executes the parent's commands until the parent closes the stream.
fn work_if_child() {
    let Ok(index) = std::env::var(WORKER) else { return };
    let runtime = runtime();
    let mut connected = None;
    for line in std::io::stdin().lines().map_while(Result::ok) {
        if let Some((way, address)) = line.split_once(' ') {
            connected = Some(runtime.block_on(Connected::to(way, address, &index)));
        } else if let Some(connected) = &connected {
            runtime.block_on(connected.round());
        }
        println!("done");
    }
    std::process::exit(0);
}

/// A worker's side of one way. The peer keeps its worker.
enum Connected {
    Ours(Peer),
    Grpc(Puller),
}

impl Connected {
    async fn to(way: &str, address: &str, index: &str) -> Self {
        if way == "grpc" {
            return Self::Grpc(Puller::connect(address).await.expect("a connection"));
        }
        let worker = publishing(builder(way, &format!("worker_{index}"))).await;
        let peer = worker.peer_at(address).await.expect("the server");
        Self::Ours(peer)
    }

    /// Pulls all parameters. Over gRPC also sends the gradients, which a server of tensorwire fetches itself.
    async fn round(&self) {
        match self {
            Self::Ours(peer) => drop(peer.fetch_many(names()).await.expect("a pull")),
            Self::Grpc(client) => {
                let sizes = resnet50().into_iter().map(|size| size * size_of::<f32>());
                let pull = |bytes| async move { client.clone().pull(bytes).await };
                let pulled = try_join_all(sizes.map(pull)).await.expect("a pull");
                let push = |gradient| async move { client.clone().push(gradient).await };
                try_join_all(pulled.into_iter().map(push)).await.expect("a push");
            }
        }
    }
}

fn exchanges(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut processes: Vec<Process> = (0..WORKERS).map(Process::start).collect();
    let bytes = resnet50().iter().sum::<usize>() * size_of::<f32>();
    let mut group = criterion.benchmark_group("exchange");
    group.sample_size(10).throughput(Throughput::Bytes((2 * WORKERS * bytes) as u64));
    for way in WAYS {
        let server = runtime.block_on(publishing(builder(way, "ps")));
        command_all(&mut processes, &format!("{way} {}", server.address()));
        // Connects. Only then the server knows its workers by name.
        command_all(&mut processes, "round");
        let worker = |index| server.peer(&format!("worker_{index}_{way}")).expect("a worker");
        let (workers, names) = ((0..WORKERS).map(worker).collect::<Vec<_>>(), names());
        group.bench_function(way, |bencher| {
            bencher.iter(|| {
                command_all(&mut processes, "round");
                runtime.block_on(async {
                    let fetching = workers.iter().map(|worker| worker.fetch_many(&names).into_future());
                    join_all(fetching).await.into_iter().collect::<Result<Vec<_>, _>>().expect("gradients")
                })
            });
        });
        runtime.block_on(server.shutdown());
    }
    let (sender, address) = mpsc::channel();
    runtime.spawn(async move {
        let sizes: Vec<usize> = resnet50().into_iter().map(|size| size * size_of::<f32>()).collect();
        let listening = move |address| sender.send(address).expect("a parent that listens");
        grpc::serve(&sizes, listening, pending()).await.expect("a gRPC server");
    });
    command_all(&mut processes, &format!("grpc {}", address.recv().expect("an address")));
    group.bench_function("grpc", |bencher| bencher.iter(|| command_all(&mut processes, "round")));
    group.finish();
    drop(processes);
    runtime.shutdown_background();
}

criterion_group!(benches, exchanges);

fn main() {
    work_if_child();
    benches();
    Criterion::default().configure_from_args().final_summary();
}
