//! Applies the options that all commands with a peer have.

use tensorwire::WorkerBuilder;

use crate::{arguments::Peering, failure::Failure, tls};

impl Peering {
    /// Applies the options to a worker's settings.
    pub(crate) fn apply(&self, builder: WorkerBuilder) -> Result<WorkerBuilder, Failure> {
        let mut builder = builder.trust(self.trust.peers.trust()).liveness(self.liveness.limit());
        if let Some(path) = &self.secret.secret_file {
            builder = builder.secret_file(path);
        }
        tls::apply(builder, &self.tls)
    }
}
