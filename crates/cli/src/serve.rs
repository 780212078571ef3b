//! `tensorwire serve`: a file's tensors, published until Ctrl-C.

use std::{io::Write, sync::Arc};

use indicatif::BinaryBytes;
use tensorwire::{Buf, DataType, Joined, Tensor, Worker, WorkerError};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    arguments::Serve,
    checkpoint::Checkpoint,
    dtype,
    failure::Failure,
    header::{Entry, HEADER_NAME},
    progress::byte_bar,
    tls,
};

/// The server's worker name.
const NAME: &str = "/job:serve/replica:0/task:0";

/// Reads the file, publishes its tensors and serves them until SIGINT or SIGTERM.
pub(crate) async fn serve(arguments: &Serve) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(&arguments.file)?;
    let mut builder = Worker::builder(NAME).bind(&arguments.bind);
    builder =
        builder.validation(arguments.validate.checksum.validation()).trust(arguments.trust.peers.trust());
    if let Some(path) = &arguments.secret.secret_file {
        builder = builder.secret_file(path);
    }
    let worker = tls::apply(builder, &arguments.tls)?.start().await?;
    let mapped = arguments.mmap.then(|| join(&worker, &checkpoint)).transpose()?;
    publish_all(&worker, &checkpoint, mapped.as_ref()).await?;
    announce(&worker, arguments, &checkpoint);
    let waited = until_told_to_end().await;
    worker.shutdown().await;
    drop(mapped);
    waited
}

/// Maps the file and lets the worker send from the mapping for as long as the answer lives.
fn join(worker: &Worker, checkpoint: &Checkpoint) -> Result<Joined, Failure> {
    let mapping = Arc::new(checkpoint.map()?);
    Ok(worker.user_memory().join(mapping).map_err(WorkerError::from)?)
}

async fn publish_all(
    worker: &Worker,
    checkpoint: &Checkpoint,
    mapped: Option<&Joined>,
) -> Result<(), Failure> {
    let header = checkpoint.header();
    if header.entries().iter().any(|entry| entry.name == HEADER_NAME) {
        return Err(Failure::ReservedName);
    }
    let bar = byte_bar(if mapped.is_some() { "mapping" } else { "reading" }, header.data_bytes());
    for entry in header.entries() {
        let bytes = match mapped {
            Some(mapped) => mapped_bytes(mapped, checkpoint, entry)?,
            None => read_bytes(worker, checkpoint, entry).await?,
        };
        worker.publish(&entry.name, tensor(bytes, entry)?)?;
        bar.inc(entry.byte_length());
    }
    bar.finish_and_clear();
    let text = header.text().as_bytes();
    let text = Tensor::from_bytes(worker.pool(), DataType::U8, &[text.len() as u64], text)?;
    worker.publish(HEADER_NAME, text)?;
    Ok(())
}

/// Reads one tensor straight into a block of the pool.
async fn read_bytes(worker: &Worker, checkpoint: &Checkpoint, entry: &Entry) -> Result<Buf, Failure> {
    let mut buffer =
        worker.pool().alloc(addressable(entry, entry.byte_length())?).await.map_err(WorkerError::from)?;
    checkpoint.read(entry, &mut buffer)?;
    Ok(buffer.freeze())
}

/// Where one tensor lies in the mapped file.
fn mapped_bytes(mapped: &Joined, checkpoint: &Checkpoint, entry: &Entry) -> Result<Buf, Failure> {
    let place = checkpoint.place(entry);
    let place = addressable(entry, place.start)?..addressable(entry, place.end)?;
    // The file was longer when its header was checked.
    let bytes = entry.byte_length();
    mapped.buf().slice(place).ok_or_else(|| Failure::TooLarge { name: entry.name.clone(), bytes })
}

fn addressable(entry: &Entry, number: u64) -> Result<usize, Failure> {
    let bytes = entry.byte_length();
    usize::try_from(number).map_err(|_| Failure::TooLarge { name: entry.name.clone(), bytes })
}

fn tensor(bytes: Buf, entry: &Entry) -> Result<Tensor, Failure> {
    let shape: Vec<u64> = entry.shape.iter().map(|&dimension| dimension as u64).collect();
    let length = bytes.len() as u64;
    let tensor = match dtype::of_file(entry.dtype) {
        Some(dtype) => Tensor::shared(bytes, dtype, &shape),
        // The wire has no name for it; the published header has.
        None => Tensor::shared(bytes, DataType::U8, &[length]),
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
    if arguments.mmap {
        println!("mapped: sent from the file over TCP, copied once for each receiver over shared memory");
    }
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
