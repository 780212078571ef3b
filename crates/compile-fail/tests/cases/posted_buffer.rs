//! A buffer that a read fills is the fabric's until the read is over.

use tensorwire_memory::BufMut;
use tensorwire_fabric::{QueuePair, RemoteRange};

async fn read(queue_pair: QueuePair, remote: RemoteRange, mut into: BufMut) {
    let reading = queue_pair.read(remote, into);
    into.fill(0);
    let _ = reading.await;
}

fn main() {}
