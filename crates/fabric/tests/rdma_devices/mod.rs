//! The RDMA devices that tests use. Every test binary that needs a device, in any package, includes this file with
//! `#[path]`. Such a test is marked `#[ignore = "needs an RDMA device: …"]`, and fails if it runs without a device.
//!
//! - `TENSORWIRE_TEST_RDMA=LEFT,RIGHT` names a device for each of a test's two sides, as in the virtual machine,
//! - `TENSORWIRE_TEST_DEVICE=NAME` names one for both, as on a machine with one NIC,
//! - and without either, the fabric chooses the device of both sides.

#![allow(clippy::panic)] // test support: a setting that can't be read is a failed test
#![allow(unreachable_pub)] // each test binary compiles this as its own module

const PAIR: &str = "TENSORWIRE_TEST_RDMA";
const DEVICE: &str = "TENSORWIRE_TEST_DEVICE";

/// The devices of a test's two ends; `None` is the fabric's own choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ends {
    pub left: Option<String>,
    pub right: Option<String>,
}

/// The devices that the environment names.
pub fn ends() -> Ends {
    ends_from(variable(PAIR).as_deref(), variable(DEVICE).as_deref())
        .unwrap_or_else(|problem| panic!("{problem}"))
}

/// The ends for the two variables' values. If both are set, `pair` takes precedence.
pub fn ends_from(pair: Option<&str>, device: Option<&str>) -> Result<Ends, String> {
    let named = |name: &str| Some(name.to_owned());
    match (pair, device) {
        (None, None) => Ok(Ends { left: None, right: None }),
        (None, Some(name)) => Ok(Ends { left: named(name), right: named(name) }),
        (Some(pair), _) => match pair.split(',').collect::<Vec<_>>().as_slice() {
            [both] if !both.is_empty() => Ok(Ends { left: named(both), right: named(both) }),
            [left, right] if !left.is_empty() && !right.is_empty() => {
                Ok(Ends { left: named(left), right: named(right) })
            }
            _ => Err(format!("{PAIR} is `{pair}`: give one device or two, as LEFT,RIGHT")),
        },
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
