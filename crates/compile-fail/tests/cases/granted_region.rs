//! A region's memory is accessed only through a target, which counts accesses and gives no slice.

use tensorwire_fabric::{RegionTable, RemoteRange};

fn write(table: &RegionTable, range: &RemoteRange, key: u32) {
    let (mut target, _) = table.write_target(range, key).unwrap();
    target[0] = 1;
}

fn main() {}
