//! For tests that break the machine's network: take links down, lose packets, remove devices. Include it with `#[path]`.
//!
//! `TENSORWIRE_TEST_NETEM=1` means that the machine is used for tests only, so they may do that.

#![allow(unreachable_pub)] // each test binary compiles this as its own module

const NETEM: &str = "TENSORWIRE_TEST_NETEM";

/// Fails, with the remedy, if the test may not break this machine's network.
#[track_caller]
pub fn need_own_network() {
    assert!(
        std::env::var(NETEM).is_ok_and(|value| value == "1"),
        "this test breaks the machine's network: run it with scripts/rxe-vm/suite, or set {NETEM}=1 on a machine of its own"
    );
}
