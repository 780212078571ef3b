//! An access cannot outlive the target that counts it.

use tensorwire_memory::{Block, RemoteAccess};

fn access(block: &Block) -> RemoteAccess<'static> {
    let target = block.remote_target(0, 64).unwrap();
    target.access(0, 64).unwrap()
}

fn main() {}
