//! The two processes.

use std::{io::Read as _, time::Instant};

use tensorwire::{
    DataType, FabricKind, Peer, Tensor, Worker, WorkerError,
    pages::{Arena, Pages, RemoteArena},
};
use tensorwire_benches::{Failure, random::Random};
use tokio::task::spawn_blocking;

use crate::Arguments;

/// The names of the arena and of the tensor.
const ARENA: &str = "kv";
const TENSOR: &str = "tensor";

/// Room for the edges of blocks.
const SPARE_BYTES: u64 = 64 << 20;

/// Seconds of each transfer.
#[derive(Debug, Default)]
pub(crate) struct Times {
    pub(crate) tensor: Vec<f64>,
    pub(crate) read: Vec<f64>,
    pub(crate) written: Vec<f64>,
}

async fn worker(arguments: &Arguments, kind: FabricKind, name: &str) -> Result<Worker, WorkerError> {
    let (arena, bytes) = ((arguments.arena_mib << 20) as u64, arguments.bytes() as u64);
    let room = |memory: &mut tensorwire::settings::Memory| {
        memory.receive_bytes = arena + bytes + SPARE_BYTES;
        memory.source_bytes = bytes + SPARE_BYTES;
    };
    Worker::builder(name).require(kind).memory(room).start().await
}

/// Serves an arena and a tensor until standard input ends.
pub(crate) async fn serve(arguments: Arguments, kind: FabricKind) -> Result<(), Failure> {
    let worker = worker(&arguments, kind, "server").await?;
    let arena = worker.arena(arguments.pages(), arguments.page_bytes()).await?;
    let _exposed = worker.expose(ARENA, &arena)?;
    let mut tensor = worker.pool().alloc(arguments.bytes()).await?;
    tensor.fill(7);
    let length = tensor.len() as u64;
    worker.publish(TENSOR, Tensor::new(tensor, DataType::U8, &[length])?)?;
    println!("{}", worker.address());
    spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

pub(crate) async fn measure(
    arguments: &Arguments,
    kind: FabricKind,
    address: &str,
) -> Result<Times, Failure> {
    let worker = worker(arguments, kind, "client").await?;
    let peer = worker.peer_at(address).await?;
    let remote = peer.arena(ARENA).await?;
    let arena = worker.arena(arguments.pages(), arguments.page_bytes()).await?;
    let all = [(); 2].map(|()| Pages::from(0..arguments.pages()));
    // Each side has touched all of the other's pages then, where it maps them.
    read(&remote, &arena, &all).await?;
    write(&remote, &arena, &all).await?;
    let mut random = Random::default();
    let mut times = Times::default();
    // The first round makes the buffer resident.
    for round in 0..=arguments.rounds {
        let mut pages = || random.scattered(arguments.pages(), arguments.moved() as usize).collect();
        let both = [pages(), pages()];
        let taken = [
            fetch(&worker, &peer, arguments.bytes()).await?,
            read(&remote, &arena, &both).await?,
            write(&remote, &arena, &both).await?,
        ];
        if round > 0 {
            times.tensor.push(taken[0]);
            times.read.push(taken[1]);
            times.written.push(taken[2]);
        }
    }
    worker.shutdown().await;
    Ok(times)
}

async fn fetch(worker: &Worker, peer: &Peer, bytes: usize) -> Result<f64, WorkerError> {
    let buffer = worker.receive_pool().alloc(bytes).await?;
    let begun = Instant::now();
    let tensor = peer.fetch(TENSOR).into_buffer(buffer).await?;
    let taken = begun.elapsed();
    drop(tensor);
    Ok(taken.as_secs_f64())
}

async fn read(remote: &RemoteArena, arena: &Arena, [from, to]: &[Pages; 2]) -> Result<f64, WorkerError> {
    let begun = Instant::now();
    remote.read(from, arena, to).await?;
    Ok(begun.elapsed().as_secs_f64())
}

async fn write(remote: &RemoteArena, arena: &Arena, [from, to]: &[Pages; 2]) -> Result<f64, WorkerError> {
    let begun = Instant::now();
    remote.write(arena, from, to).await?;
    Ok(begun.elapsed().as_secs_f64())
}
