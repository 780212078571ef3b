//! The limit on descriptors of the process that worlds run in.

use std::sync::Once;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// As many as this process may have at all. A node that crashes leaves memory behind that its peers may still write: it is
/// leaked on purpose, and each block of it is a descriptor. A real process takes that with it, but a process runs many worlds.
pub(crate) fn raise_limit() {
    static RAISED: Once = Once::new();
    RAISED.call_once(|| {
        let limit = getrlimit(Resource::Nofile);
        // Where it is refused, few worlds still run.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    });
}
