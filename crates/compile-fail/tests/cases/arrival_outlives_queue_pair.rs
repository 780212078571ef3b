//! A queue pair is not dropped while its arrivals are awaited.

use tensorwire_fabric::QueuePair;

async fn take(queue_pair: QueuePair) {
    let next = queue_pair.next_arrival();
    drop(queue_pair);
    let _ = next.await;
}

fn main() {}
