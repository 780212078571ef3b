//! Granting consumes the buffer.

use tensorwire_memory::{BufMut, Granted};

fn grant(mut buffer: BufMut) -> Granted {
    let granted = buffer.grant();
    buffer.fill(0);
    granted
}

fn main() {}
