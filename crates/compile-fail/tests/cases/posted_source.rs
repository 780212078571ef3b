//! The bytes of a write are frozen before they can be posted.

use tensorwire_memory::BufMut;
use tensorwire_fabric::{QueuePair, RemoteRange};

async fn write(queue_pair: QueuePair, remote: RemoteRange, mut bytes: BufMut) {
    let writing = queue_pair.write(bytes.freeze(), remote);
    bytes.fill(0);
    let _ = writing.await;
}

fn main() {}
