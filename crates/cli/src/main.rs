//! The `tensorwire` command.

fn main() {}
