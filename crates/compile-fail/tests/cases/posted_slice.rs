//! Borrowed bytes cannot be posted: the operation outlives its future.

use tensorwire_fabric::{QueuePair, RemoteRange};

async fn write(queue_pair: QueuePair, remote: RemoteRange, bytes: &[u8]) {
    let _ = queue_pair.write(bytes, remote).await;
}

fn main() {}
