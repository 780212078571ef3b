//! `tensorwire list`: what a worker has published, and its sets.

use indicatif::HumanCount;
use serde::Serialize;
use tensorwire::{Published, Worker, sets::ListedSet};
use tensorwire_protocol::text::escaped;

use crate::{arguments::List, console::document, failure::Failure, print};

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
    let mut text = table(["tensor", "type", "shape", "bytes", "version"], rows.collect());
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
        text += &table(["set", "tensors", "bytes", "version"], rows.collect());
    }
    text
}

/// Rows below a head, in columns. The last two are numbers, and end at the same place.
fn table<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut all = vec![head.map(str::to_owned)];
    all.extend(rows);
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &all {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column + 2 < N { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text += &cells.collect::<Vec<_>>().join("  ");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![
            ["größe".to_owned(), "u8".to_owned(), "1".to_owned()],
            ["b".to_owned(), "bool".to_owned(), "22".to_owned()],
        ];
        assert_eq!(table(["name", "type", "x"], rows), "name   type   x\ngröße    u8   1\nb      bool  22\n");
    }
}
