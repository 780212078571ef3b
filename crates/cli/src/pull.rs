//! `tensorwire pull`: a server's tensors, verified and written to a file.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::{StreamExt, stream};
use indicatif::ProgressBar;
use tensorwire::{Peer, PeerInfo, Worker};

use crate::{
    arguments::Pull,
    failure::Failure,
    output::Output,
    plan::Plan,
    progress::byte_bar,
    round::Round,
    sink::{Sink, Task},
    tls,
};

/// Fetches under way at once.
const FETCHES_MAX: usize = 32;

/// Fetches what `arguments` name, as often as they say.
pub(crate) async fn pull(arguments: &Pull) -> Result<(), Failure> {
    let worker = start_worker(arguments).await?;
    let pulled = pull_with(&worker, arguments).await;
    worker.shutdown().await;
    if let Some((output, path)) = pulled? {
        output.finish().map_err(|source| Failure::Output { path: path.clone(), source })?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

async fn start_worker(arguments: &Pull) -> Result<Worker, Failure> {
    // One host may run many pulls at once; a server tells them apart by their names.
    let mut builder = Worker::builder(&format!("/job:pull/replica:0/task:{}", std::process::id()));
    builder =
        builder.validation(arguments.validate.checksum.validation()).trust(arguments.trust.peers.trust());
    if let Some(kind) = arguments.fabric.required() {
        builder = builder.require(kind);
    }
    if let Some(path) = &arguments.secret.secret_file {
        builder = builder.secret_file(path);
    }
    Ok(tls::apply(builder, &arguments.tls)?.start().await?)
}

/// All rounds; gives the file, complete but for its name.
async fn pull_with(worker: &Worker, arguments: &Pull) -> Result<Option<(Output, PathBuf)>, Failure> {
    let server = worker.peer_at(&arguments.address).await?;
    let plan = Arc::new(Plan::make(worker, &server, arguments).await?);
    let mut output = arguments.output.as_ref().map(|path| create(path, &plan)).transpose()?;
    for number in 1..=arguments.repeat.get() {
        let task = Task { plan: plan.clone(), verify: arguments.verify, output };
        let before = info(worker, &server);
        let round = Round::begin(number, before);
        let bar = byte_bar(&format!("round {number}"), plan.header.data_bytes());
        let task = fetch_all(worker, &server, task, &bar).await?;
        bar.finish_and_clear();
        let after = info(worker, &server);
        println!("{}", round.end(after.as_ref(), &plan, bar.elapsed(), arguments.stats));
        output = task.output;
    }
    Ok(output)
}

fn create(path: &Path, plan: &Plan) -> Result<(Output, PathBuf), Failure> {
    let failed = |source| Failure::Output { path: path.to_owned(), source };
    let output = Output::create(path, plan.header.data_start() + plan.header.data_bytes()).map_err(failed)?;
    output.write_at(&plan.header.prefix(), 0).map_err(failed)?;
    Ok((output, path.to_owned()))
}

/// One round. The first failure ends it: of a fetch, or of the thread that takes the tensors.
async fn fetch_all(worker: &Worker, server: &Peer, task: Task, bar: &ProgressBar) -> Result<Task, Failure> {
    let plan = task.plan.clone();
    let sink = Sink::start(task);
    let fetches = plan.header.entries().iter().enumerate().map(|(index, entry)| async move {
        worker.fetch(server, &entry.name).await.map(|tensor| (index, tensor))
    });
    let mut fetched = stream::iter(fetches).buffer_unordered(FETCHES_MAX);
    while let Some(next) = fetched.next().await {
        let (index, tensor) = next?;
        bar.inc(tensor.bytes().len() as u64);
        if let Some(transport) = info(worker, server).and_then(|info| info.transport) {
            bar.set_message(format!("over {transport}"));
        }
        if !sink.put(index, tensor).await {
            break;
        }
    }
    sink.finish().await
}

/// What the worker knows of the server now.
fn info(worker: &Worker, server: &Peer) -> Option<PeerInfo> {
    worker.peers().into_iter().find(|info| info.name == server.name())
}
