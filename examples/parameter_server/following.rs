//! The parameters as the servers commit them, version after version.

use futures::future::try_join_all;
use tensorwire::{
    Tensor, WorkerError,
    sets::{Follow, Policy, Snapshot},
};
use tensorwire_examples::command_line::{Job, Role};
use tokio::time::timeout;

use crate::node::{Failure, Node, REPORT_EVERY};

/// The set in which a server commits its tensors.
pub(crate) const PARAMETERS: &str = "parameters";
/// The set in which a synchronous server commits the version before the newest one.
pub(crate) const BEFORE: &str = "parameters before";
/// A tensor of these sets: for each worker, how many of its gradients the version contains.
pub(crate) const CLOCKS: &str = "clocks";

/// All servers' sets.
pub(crate) struct Following<'node> {
    node: &'node Node,
    servers: Vec<(Role, Follow, Option<Snapshot>)>,
}

impl<'node> Following<'node> {
    pub(crate) fn new(node: &'node Node) -> Result<Self, WorkerError> {
        let follow = |server| Ok((server, node.peer(server)?.set(PARAMETERS).follow(Policy::Latest), None));
        Ok(Self { node, servers: node.all(Job::Ps).map(follow).collect::<Result<_, WorkerError>>()? })
    }

    /// The newest version of each server that has clocks of which `are_enough` is true; waits for it.
    pub(crate) async fn until(
        &mut self,
        are_enough: impl Fn(&[u64]) -> bool,
    ) -> Result<Vec<Snapshot>, Failure> {
        let (node, are_enough) = (self.node, &are_enough);
        let waiting = self.servers.iter_mut().map(|(server, versions, newest)| async move {
            loop {
                if let Some(newest) = newest
                    && are_enough(&clocks(newest)?)
                {
                    return Ok::<_, Failure>(newest.clone());
                }
                *newest = Some(next(node, *server, versions).await?);
            }
        });
        try_join_all(waiting).await
    }
}

/// The next version of a server, also after it was started again.
async fn next(node: &Node, server: Role, versions: &mut Follow) -> Result<Snapshot, Failure> {
    let attempt = async || match timeout(REPORT_EVERY, versions.next()).await {
        Err(_) => Err(format!("{server} commits no new version")),
        Ok(None) => Err("this worker is shut down".to_owned()),
        Ok(Some(Ok(staged))) => Ok(staged.apply()),
        Ok(Some(Err(error))) => {
            // It continues from an older copy, or from a checkpoint.
            if matches!(error, WorkerError::WentBack { .. }) {
                versions.accept_restart();
            }
            Err(error.to_string())
        }
    };
    node.patiently(attempt).await
}

/// For each worker, how many of its gradients a version contains.
pub(crate) fn clocks(version: &Snapshot) -> Result<Vec<u64>, Failure> {
    Ok(version
        .get(CLOCKS)
        .ok_or("a server commits no clocks; run one version of this example everywhere")?
        .values()?)
}

/// All parameters, which are in the servers' versions.
pub(crate) fn parameters<'a>(node: &Node, versions: &'a [Snapshot]) -> Result<Vec<&'a [f32]>, Failure> {
    let places = node.tensors.iter().enumerate();
    places
        .map(|(place, spec)| {
            let tensor = versions.get(place % versions.len()).and_then(|version| version.get(&spec.name));
            let values = tensor.map(Tensor::as_slice::<f32>).transpose()?;
            let values = values.filter(|values| values.len() == spec.elements());
            Ok(values.ok_or_else(|| {
                format!("no server has {spec:?}; run one version of this example everywhere")
            })?)
        })
        .collect()
}
