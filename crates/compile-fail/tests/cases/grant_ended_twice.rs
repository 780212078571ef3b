//! A grant ends once.

use tensorwire_memory::{BufMut, GrantEnd};

fn end(buffer: BufMut) {
    let granted = buffer.grant();
    let first = granted.end(GrantEnd::Content);
    let second = granted.end(GrantEnd::Content);
    drop((first, second));
}

fn main() {}
