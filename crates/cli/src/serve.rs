//! `tensorwire serve`: the tensors of files, published until Ctrl-C.

use std::{future::pending, path::Path};

use futures::{StreamExt, stream::FuturesUnordered};
use indicatif::BinaryBytes;
use serde::Serialize;
use tensorwire::Worker;
use tensorwire_protocol::text::escaped;
use tokio::sync::oneshot;

use crate::{
    arguments::Serve,
    checkpoint::Access,
    console::Console,
    failure::Failure,
    link::runtime,
    mapped_file::{Changes, MappedFile},
    reachable_address::instead_of_all,
    signals::{AtSignal, at_signal},
    source::{OpenFile, Opened, Source},
    watch::{Change, Served},
};

/// The server's worker name.
const NAME: &str = "/job:serve/replica:0/task:0";

/// Reads the files, publishes their tensors and serves them until SIGINT or SIGTERM.
pub(crate) async fn serve(arguments: &Serve) -> Result<(), Failure> {
    let source = Source::of(&arguments.path)?;
    let look = source.look()?;
    // Before the leases: the kernel announces a change by a signal.
    let changes = look.files.iter().filter(|_| arguments.mmap).map(|_| Changes::listen());
    let changes = changes.collect::<Result<Vec<_>, _>>()?;
    let opened = Opened::open(&source, &look, arguments.mmap)?;
    let worker = start(arguments).await?;
    let mapped = join(&worker, &opened, changes)?;
    let serving = Serving::of(&opened, arguments);
    let what = if mapped.iter().any(Option::is_some) { "mapping" } else { "reading" };
    let console = arguments.console;
    let bar = console.byte_bar(what, opened.data_bytes());
    let bytes = mapped.iter().map(|file| file.as_ref().map(|file| file.buf().clone())).collect();
    let shown = (bar.clone(), arguments.watch);
    let (served, change) =
        Served::begin((&worker, runtime()?), (source, look), (opened, bytes), shown).await?;
    bar.finish_and_clear();
    // Before a client can know the address.
    let (wake, woken) = oneshot::channel();
    at_signal(AtSignal::Wake(wake)).map_err(Failure::Runtime)?;
    serving.announce(console, worker.address(), arguments.watch.then_some(&change));
    let watch = async {
        if arguments.watch {
            served.watch(console).await;
        }
        pending::<()>().await;
    };
    tokio::select! {
        ended = until_woken(woken, mapped.into_iter().flatten().collect(), console) => ended?,
        () = watch => {}
    }
    worker.shutdown().await;
    Ok(())
}

async fn start(arguments: &Serve) -> Result<Worker, Failure> {
    // The set has the published tensors themselves, whose memory is limited already.
    let mut builder = Worker::builder(NAME).bind(&arguments.bind).set_bytes(u64::MAX);
    builder = builder.validation(arguments.validate.checksum.validation());
    if let Some(address) = &arguments.data_bind {
        builder = builder.data_bind(address);
    }
    Ok(arguments.peering.apply(builder)?.start().await?)
}

/// Lets `worker` send from the files that are mapped.
fn join(worker: &Worker, opened: &Opened, changes: Vec<Changes>) -> Result<Vec<Option<MappedFile>>, Failure> {
    let mut changes = changes.into_iter();
    let files =
        opened.files.iter().map(|OpenFile { checkpoint, .. }| match (checkpoint.access(), changes.next()) {
            (Access::Mapped(mapping), Some(changes)) => {
                MappedFile::join(worker, checkpoint.path(), mapping.clone(), changes).map(Some)
            }
            _ => Ok(None),
        });
    files.collect()
}

/// Version of the lines of JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// What is served: the first line of `--json`, or lines for people.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename = "serving")]
struct Serving<'a> {
    version: u32,
    address: String,
    path: &'a Path,
    files: usize,
    tensors: usize,
    bytes: u64,
    #[serde(skip)]
    lines: Vec<String>,
}

impl<'a> Serving<'a> {
    /// The files; the address follows when there is one.
    fn of(opened: &Opened, arguments: &'a Serve) -> Self {
        Self {
            version: VERSION,
            address: String::new(),
            path: &arguments.path,
            files: opened.files.len(),
            tensors: opened.tensors(),
            bytes: opened.data_bytes(),
            lines: lines(opened, arguments),
        }
    }

    /// Prints them, with the address that clients connect to and the first version of files that are watched.
    fn announce(mut self, console: Console, listening: &str, change: Option<&Change>) {
        self.lines.extend(change.map(Change::line));
        self.address = match instead_of_all(listening) {
            Some(one) => {
                self.lines.push(format!(
                    "listening at all addresses of this host: take any that the client reaches, with port {}",
                    one.port()
                ));
                one.to_string()
            }
            None => listening.to_owned(),
        };
        self.lines.push(format!("address {}", self.address));
        console.event(&self);
        if let Some(change) = change {
            console.event(change);
        }
        console.say(&(self.lines.join("\n") + "\n"));
    }
}

/// The lines that say what is served.
fn lines(opened: &Opened, arguments: &Serve) -> Vec<String> {
    let files = match opened.files.as_slice() {
        [OpenFile { name: None, .. }] => String::new(),
        files => format!("{} files in ", files.len()),
    };
    let mut lines = vec![format!(
        "serving {} tensors, {}, of {files}{}",
        opened.tensors(),
        BinaryBytes(opened.data_bytes()),
        escaped(&arguments.path.display().to_string())
    )];
    let accesses = || opened.files.iter().map(|file| file.checkpoint.access());
    let unleased = accesses().find_map(|access| match access {
        Access::Unleased(why) => Some(why),
        _ => None,
    });
    lines.extend(unleased.map(|why| format!("read into memory instead of mapped: {why}")));
    if accesses().any(|access| matches!(access, Access::Mapped(_))) {
        lines.push(
            "mapped: sent from the file over TCP, copied once for each receiver over shared memory"
                .to_owned(),
        );
    }
    lines
}

/// Waits for a signal. Ends the server, too, if a mapped file changes and could not be copied before.
async fn until_woken(
    woken: oneshot::Receiver<()>,
    mapped: Vec<MappedFile>,
    console: Console,
) -> Result<(), Failure> {
    let lost = async {
        let mut lost: FuturesUnordered<_> = mapped.into_iter().map(|file| file.until_lost(console)).collect();
        match lost.next().await {
            Some(failure) => failure,
            None => pending().await,
        }
    };
    tokio::select! {
        _ = woken => Ok(()),
        failure = lost => Err(failure),
    }
}
