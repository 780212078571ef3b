//! `tensorwire serve`: a file's tensors, published until Ctrl-C.

use std::future::pending;

use indicatif::BinaryBytes;
use tensorwire::{DataType, Tensor, Worker, WorkerError, memory::Buf};
use tensorwire_protocol::{
    limits::NAME_BYTES_MAX,
    text::{check_name, escaped},
};
use tokio::sync::oneshot;

use crate::{
    arguments::Serve,
    checkpoint::{Access, Checkpoint},
    dtype,
    failure::Failure,
    header::{Entry, HEADER_NAME},
    mapped_file::{Changes, MappedFile},
    print,
    progress::byte_bar,
    reachable_address::instead_of_all,
    signals::{AtSignal, at_signal},
    tls,
};

/// The server's worker name.
const NAME: &str = "/job:serve/replica:0/task:0";

/// Reads the file, publishes its tensors and serves them until SIGINT or SIGTERM.
pub(crate) async fn serve(arguments: &Serve) -> Result<(), Failure> {
    // Before the lease: the kernel announces a change by a signal.
    let changes = arguments.mmap.then(Changes::listen).transpose()?;
    let checkpoint = Checkpoint::open(&arguments.file, arguments.mmap)?;
    check_names(&checkpoint)?;
    let mut builder = Worker::builder(NAME).bind(&arguments.bind);
    builder = builder
        .validation(arguments.validate.checksum.validation())
        .trust(arguments.trust.peers.trust())
        .liveness(arguments.liveness.limit());
    if let Some(address) = &arguments.data_bind {
        builder = builder.data_bind(address);
    }
    if let Some(path) = &arguments.secret.secret_file {
        builder = builder.secret_file(path);
    }
    let worker = tls::apply(builder, &arguments.tls)?.start().await?;
    let mapped = match (checkpoint.access(), changes) {
        (Access::Mapped(mapping), Some(changes)) => {
            Some(MappedFile::join(&worker, checkpoint.path(), mapping.clone(), changes)?)
        }
        _ => None,
    };
    publish_all(&worker, &checkpoint, mapped.as_ref()).await?;
    // Before a client can know the address.
    let (wake, woken) = oneshot::channel();
    at_signal(AtSignal::Wake(wake)).map_err(Failure::Runtime)?;
    announce(&worker, arguments, &checkpoint);
    until_woken(woken, mapped).await?;
    worker.shutdown().await;
    Ok(())
}

/// Refuses names that cannot be published, before anything is read.
fn check_names(checkpoint: &Checkpoint) -> Result<(), Failure> {
    for Entry { name, .. } in checkpoint.header().entries() {
        let checked = match name.len() {
            _ if name == HEADER_NAME => Err("the server itself publishes one of that name".to_owned()),
            1..=NAME_BYTES_MAX => check_name(name),
            _ => Err(format!("a name has 1 to {NAME_BYTES_MAX} bytes")),
        };
        let (name, path) = (name.clone(), checkpoint.path().to_owned());
        checked.map_err(|remedy| Failure::TensorName { path, name, remedy })?;
    }
    Ok(())
}

async fn publish_all(
    worker: &Worker,
    checkpoint: &Checkpoint,
    mapped: Option<&MappedFile>,
) -> Result<(), Failure> {
    let header = checkpoint.header();
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

/// The bytes of one tensor in the mapped file.
fn mapped_bytes(mapped: &MappedFile, checkpoint: &Checkpoint, entry: &Entry) -> Result<Buf, Failure> {
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
        // The wire has no such element type; the published header has its name.
        None => Tensor::shared(bytes, DataType::U8, &[length]),
    };
    Ok(tensor?)
}

fn announce(worker: &Worker, arguments: &Serve, checkpoint: &Checkpoint) {
    let header = checkpoint.header();
    let mut lines = vec![format!(
        "serving {} tensors, {}, of {}",
        header.entries().len(),
        BinaryBytes(header.data_bytes()),
        escaped(&arguments.file.display().to_string())
    )];
    match checkpoint.access() {
        Access::Read => {}
        Access::Unleased(why) => lines.push(format!("read into memory instead of mapped: {why}")),
        Access::Mapped(_) => lines.push(
            "mapped: sent from the file over TCP, copied once for each receiver over shared memory"
                .to_owned(),
        ),
    }
    match instead_of_all(worker.address()) {
        Some(one) => {
            lines.push(format!(
                "listening at all addresses of this host: take any that the client reaches, with port {}",
                one.port()
            ));
            lines.push(format!("address {one}"));
        }
        None => lines.push(format!("address {}", worker.address())),
    }
    // A message that cannot be written is dropped.
    let _ = print(&format!("{}\n", lines.join("\n")));
}

/// Waits for a signal. Ends the server, too, if a mapped file changes and could not be copied before.
async fn until_woken(woken: oneshot::Receiver<()>, mapped: Option<MappedFile>) -> Result<(), Failure> {
    let lost = async {
        match mapped {
            Some(mapped) => mapped.until_lost().await,
            None => pending().await,
        }
    };
    tokio::select! {
        _ = woken => Ok(()),
        failure = lost => Err(failure),
    }
}
