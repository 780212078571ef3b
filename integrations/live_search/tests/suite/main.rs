//! The example with an encoder and texts that are small enough for a test.

mod mixed;
mod processes;
mod tiny;
