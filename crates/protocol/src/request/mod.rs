//! The receiver's half of a transfer.

mod index;
