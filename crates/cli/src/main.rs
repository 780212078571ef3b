//! The `tensorwire` command.
#![forbid(unsafe_code)]

mod arguments;
mod checkpoint;
mod header;
mod manifest;
mod output;

fn main() {}
