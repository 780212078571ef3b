//! Memory that a peer may write has no bytes that this process could borrow.

use tensorwire_memory::BufMut;

fn first(buffer: BufMut) -> u8 {
    let granted = buffer.grant();
    let bytes: &[u8] = &granted;
    bytes[0]
}

fn main() {}
