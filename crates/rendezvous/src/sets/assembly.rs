//! Contents that are made of a held one and deltas.

use tensorwire_memory::{Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Checksums, Validation};

use crate::{
    peer_memory::import::yield_once,
    values::{
        sets::{
            delta::{PIECE_BYTES, Runs},
            manifest::ManifestEntry,
            reading::Problem,
        },
        tensor::Tensor,
    },
};

/// Runs that are written before other tasks have their turn.
const RUNS_PER_TURN: usize = 16 << 10;

/// Why a content cannot be made: the whole one is needed.
#[derive(Debug)]
pub(super) enum Doubt {
    /// The deltas are not those of this tensor.
    Wrong(Problem),
    /// There is no memory at the moment.
    NoMemory,
}

/// The content of `entry`, made of `base`, which stays as it is, and `deltas`. Everything that the peer says in them is checked before
/// memory is allocated, and the result is compared with the checksum in the manifest.
pub(super) async fn assembled(
    pool: &Pool,
    base: &Tensor,
    deltas: &[Tensor],
    entry: &ManifestEntry,
) -> Result<Tensor, Doubt> {
    let metadata = &entry.metadata;
    for delta in deltas {
        Runs::new(delta.bytes(), metadata).and_then(Runs::check).map_err(Doubt::Wrong)?;
        yield_once().await;
    }
    let mut buffer = pool.try_alloc(base.bytes().len()).map_err(|_| Doubt::NoMemory)?;
    for (into, from) in buffer.chunks_mut(PIECE_BYTES).zip(base.bytes().chunks(PIECE_BYTES)) {
        copy_bytes(into, from, CopyReason::Local);
        yield_once().await;
    }
    for delta in deltas {
        write(&mut buffer, delta, entry).await.map_err(Doubt::Wrong)?;
    }
    let buffer = buffer.freeze();
    let found = Checksums::default().sum(Validation::Xxh3, &buffer).await;
    if found.is_none() || found != entry.checksum {
        return Err(Doubt::Wrong("the checksum of the result differs"));
    }
    Ok(Tensor::received(metadata.clone(), buffer, None))
}

/// Writes the runs of `delta` into `buffer`.
async fn write(buffer: &mut [u8], delta: &Tensor, entry: &ManifestEntry) -> Result<(), Problem> {
    let mut runs = Runs::new(delta.bytes(), &entry.metadata)?;
    loop {
        for _ in 0..RUNS_PER_TURN {
            let Some(run) = runs.read()? else { return Ok(()) };
            let place = buffer.get_mut(run.offset..run.offset + run.values.len());
            place.ok_or("a run ends behind the content")?.copy_from_slice(run.values);
        }
        yield_once().await;
    }
}
