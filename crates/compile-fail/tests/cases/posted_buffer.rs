//! The fabric owns the destination of a read until the read is complete.

use tensorwire_memory::BufMut;
use tensorwire_fabric::{QueuePair, RemoteRange};

async fn read(queue_pair: QueuePair, remote: RemoteRange, mut into: BufMut) {
    let reading = queue_pair.read(remote, into);
    into.fill(0);
    let _ = reading.await;
}

fn main() {}
