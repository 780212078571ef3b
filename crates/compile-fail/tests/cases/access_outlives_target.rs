//! While an access lives, so does what counts it.

use tensorwire_memory::{Block, RemoteAccess};

fn access(block: &Block) -> RemoteAccess<'static> {
    let target = block.remote_target(0, 64).unwrap();
    target.access(0, 64).unwrap()
}

fn main() {}
