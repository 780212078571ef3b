//! The kinds of fabrics.

use std::fmt;

/// Names a kind of fabric, in settings, errors, logs and metrics. Two fabrics are of one kind if their names are equal.
///
/// The constants are the fabrics of this workspace. A fabric that is written elsewhere has a kind of its own:
///
/// ```
/// use tensorwire_fabric::FabricKind;
///
/// const KIND: FabricKind = FabricKind::new("ucx");
/// assert_eq!(KIND.to_string(), "ucx");
/// assert_eq!(format!("{:?}", Some(KIND)), "Some(ucx)");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FabricKind(&'static str);

impl FabricKind {
    /// RDMA through libibverbs.
    pub const VERBS: Self = Self::new("verbs");
    /// Shared memory on one host.
    pub const SHM: Self = Self::new("shm");
    /// TCP.
    pub const TCP: Self = Self::new("tcp");
    /// The simulator's fabric.
    pub const SIM: Self = Self::new("sim");

    /// The kind of this name: a short word in lower case.
    pub const fn new(name: &'static str) -> Self {
        Self(name)
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

/// Prints the name, like [`Display`](fmt::Display): it is the whole value, and short where a program prints it.
impl fmt::Debug for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
