//! `tensorwire list`: what a worker has published, and its sets.

use indicatif::HumanCount;
use serde::Serialize;
use tensorwire::{Published, Worker, sets::ListedSet};
use tensorwire_protocol::text::escaped;

use crate::{arguments::List, console::document, failure::Failure, print, table::table};

/// Version of the JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct ListJson<'a> {
    version: u32,
    worker: &'a str,
    tensors: Vec<TensorJson<'a>>,
    sets: Vec<SetJson<'a>>,
}

#[derive(Debug, Serialize)]
struct SetJson<'a> {
    name: &'a str,
    tensors: u64,
    bytes: u64,
    version: u64,
}

#[derive(Debug, Serialize)]
struct TensorJson<'a> {
    name: &'a str,
    dtype: String,
    shape: &'a [u64],
    bytes: u64,
    version: u64,
}

/// Prints the tensors and the sets of the worker at the address.
pub(crate) async fn list(arguments: &List) -> Result<(), Failure> {
    let worker = arguments.peering.apply(Worker::client())?.start().await?;
    let peer = worker.peer_at(&arguments.address).await?;
    let (listed, sets) = (peer.list().await?, peer.list_sets().await?);
    worker.shutdown().await;
    print(&if arguments.console.json { json(peer.name(), &listed, &sets)? } else { text(&listed, &sets) })
}

fn json(worker: &str, listed: &[Published], sets: &[ListedSet]) -> Result<String, Failure> {
    let tensors = listed.iter().map(|Published { name, metadata, version, .. }| TensorJson {
        name,
        dtype: metadata.dtype.to_string(),
        shape: metadata.shape.dimensions(),
        bytes: metadata.byte_length,
        version: version.number(),
    });
    let sets = sets.iter().map(|ListedSet { name, version, tensors, bytes, .. }| SetJson {
        name,
        tensors: *tensors,
        bytes: *bytes,
        version: *version,
    });
    let list = ListJson { version: VERSION, worker, tensors: tensors.collect(), sets: sets.collect() };
    document(&list)
}

fn text(listed: &[Published], sets: &[ListedSet]) -> String {
    let rows = listed.iter().map(|Published { name, metadata, version, .. }| {
        [
            escaped(name).to_string(),
            metadata.dtype.to_string(),
            metadata.shape.to_string(),
            HumanCount(metadata.byte_length).to_string(),
            version.number().to_string(),
        ]
    });
    let mut text = table(3, ["tensor", "type", "shape", "bytes", "version"], rows.collect());
    if !sets.is_empty() {
        let rows = sets.iter().map(|ListedSet { name, version, tensors, bytes, .. }| {
            [
                escaped(name).to_string(),
                HumanCount(*tensors).to_string(),
                HumanCount(*bytes).to_string(),
                version.to_string(),
            ]
        });
        text.push('\n');
        text += &table(2, ["set", "tensors", "bytes", "version"], rows.collect());
    }
    text
}
