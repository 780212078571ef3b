//! An operation that is never polled may never be posted.

#![deny(unused_must_use)]

use tensorwire_memory::Buf;
use tensorwire_fabric::{QueuePair, RemoteRange};

fn write(queue_pair: &QueuePair, remote: RemoteRange, bytes: Buf) {
    queue_pair.write(bytes, remote);
}

fn main() {}
