//! Lists of the sets of peers.

use std::pin::pin;

use tensorwire_protocol::{ReceiveOptions, Scope, SetContent};

use crate::{
    error::WorkerError,
    sets::fetching::Link,
    values::{
        SET_LIST,
        sets::listing::{ListedSet, decode},
    },
    worker::peer::Peer,
};

impl Peer {
    /// Lists the sets of the peer that this worker may read, sorted by name. [`list`](Self::list) lists its published tensors. The deadline
    /// is the worker's [`timeout`](crate::WorkerBuilder::timeout).
    ///
    /// # Errors
    /// [`WorkerError::PeerLost`], [`WorkerError::NoFabric`] and [`WorkerError::DeadlineExceeded`]; [`WorkerError::Local`] with
    /// INVALID_ARGUMENT if the list contradicts itself.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn list_sets(&self) -> Result<Vec<ListedSet>, WorkerError> {
        let set = self.set("");
        let listed = async {
            let scope = Scope::SetContent(SetContent { edition: SET_LIST, number: 0, is_last: true });
            let transfer = set.transfer();
            let list = match set.link().await? {
                Link::Own => self.worker.node.values().set_list(None).tensor,
                Link::Connected(connection) => {
                    connection.receive(&scope, &transfer, &ReceiveOptions::default()).await?.0
                }
            };
            decode(list.bytes()).map_err(|problem| set.misbehaved(problem))
        };
        let limit = self.worker.operations.defaults.limit;
        let what = || format!("listing the sets of {}", self.name());
        self.worker.within(limit, what, "does the peer run?", pin!(listed)).await
    }
}
