//! `tensorwire serve`: a file's tensors, published until Ctrl-C.

use std::io::Write;

use indicatif::BinaryBytes;
use tensorwire::{DataType, Tensor, Worker};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    arguments::Serve,
    checkpoint::Checkpoint,
    dtype,
    failure::Failure,
    header::{Entry, HEADER_NAME},
    progress::byte_bar,
};

/// The server's worker name.
const NAME: &str = "/job:serve/replica:0/task:0";

/// Reads the file, publishes its tensors and serves them until SIGINT or SIGTERM.
pub(crate) async fn serve(arguments: &Serve) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(&arguments.file)?;
    let mut builder = Worker::builder(NAME).bind(&arguments.bind);
    if let Some(path) = &arguments.secret.secret_file {
        builder = builder.secret_file(path);
    }
    let worker = builder.start().await?;
    publish_all(&worker, &checkpoint).await?;
    announce(&worker, arguments, &checkpoint);
    let waited = until_told_to_end().await;
    worker.shutdown().await;
    waited
}

async fn publish_all(worker: &Worker, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let header = checkpoint.header();
    if header.entries().iter().any(|entry| entry.name == HEADER_NAME) {
        return Err(Failure::ReservedName);
    }
    let bar = byte_bar("reading", header.data_bytes());
    for entry in header.entries() {
        worker.publish(&entry.name, read_tensor(worker, checkpoint, entry).await?)?;
        bar.inc(entry.byte_length());
    }
    bar.finish_and_clear();
    let text = header.text().as_bytes();
    let text = Tensor::from_bytes(worker.pool(), DataType::U8, &[text.len() as u64], text)?;
    worker.publish(HEADER_NAME, text)?;
    Ok(())
}

/// Reads one tensor straight into a block of the pool.
async fn read_tensor(worker: &Worker, checkpoint: &Checkpoint, entry: &Entry) -> Result<Tensor, Failure> {
    let bytes = entry.byte_length();
    let length = usize::try_from(bytes).map_err(|_| Failure::TooLarge { name: entry.name.clone(), bytes })?;
    let mut buffer = worker.pool().alloc(length).await.map_err(tensorwire::WorkerError::from)?;
    checkpoint.read(entry, &mut buffer)?;
    let shape: Vec<u64> = entry.shape.iter().map(|&dimension| dimension as u64).collect();
    let tensor = match dtype::of_file(entry.dtype) {
        Some(dtype) => Tensor::new(buffer, dtype, &shape),
        // The wire has no name for it; the published header has.
        None => Tensor::new(buffer, DataType::U8, &[bytes]),
    };
    Ok(tensor?)
}

fn announce(worker: &Worker, arguments: &Serve, checkpoint: &Checkpoint) {
    let header = checkpoint.header();
    println!(
        "serving {} tensors, {}, of {}",
        header.entries().len(),
        BinaryBytes(header.data_bytes()),
        arguments.file.display()
    );
    println!("address {}", worker.address());
    // Whoever waits for these lines through a pipe must get them now; without a reader there is nobody to tell.
    let _ = std::io::stdout().flush();
}

async fn until_told_to_end() -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::Runtime)?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
