//! The limit on descriptors of the process that worlds run in.

use std::sync::Once;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to the hard limit. A node that crashes leaves memory behind that its peers may still write: it is leaked on
/// purpose, and each block of it is a descriptor. A real process would free it at exit, but this process runs many worlds.
pub(crate) fn raise_limit() {
    static RAISED: Once = Once::new();
    RAISED.call_once(|| {
        let limit = getrlimit(Resource::Nofile);
        // If that is refused, fewer worlds can run.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    });
}
