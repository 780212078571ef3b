//! Memory that a peer lends can be read, and not written.

use tensorwire_fabric::Arrival;

fn overwrite(arrival: Arrival) {
    if let Arrival::Loan { mut buffer, .. } = arrival {
        buffer[0] = 1;
    }
}

fn main() {}
