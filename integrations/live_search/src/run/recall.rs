//! How good the services' answers are.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::{model::Answer, run::http};

/// The parts of the held-out packages that their synopses find.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Recall {
    /// As the best answer.
    pub(crate) at_1: f64,
    /// Among the ten best.
    pub(crate) at_10: f64,
}

/// Asks both services in turn, at the same time, for each held-out package. An answer of another version than `version` is an error.
pub(crate) async fn measure(
    addresses: &Arc<[String]>,
    held_out: &[(String, String)],
    version: u64,
) -> Result<Recall> {
    let shares = addresses.iter().enumerate().map(|(turn, address)| {
        let mine = held_out.iter().skip(turn).step_by(addresses.len()).cloned().collect::<Vec<_>>();
        tokio::spawn(found(address.clone(), mine, version))
    });
    let (mut best, mut among_ten) = (0, 0);
    for share in shares.collect::<Vec<_>>() {
        let places = share.await??;
        best += places.iter().filter(|&&place| place == 0).count();
        among_ten += places.iter().filter(|&&place| place < 10).count();
    }
    let part = |count| count as f64 / held_out.len() as f64;
    Ok(Recall { at_1: part(best), at_10: part(among_ten) })
}

/// The places of the packages that were found.
async fn found(address: String, queries: Vec<(String, String)>, version: u64) -> Result<Vec<usize>> {
    let mut places = Vec::new();
    for (name, path) in queries {
        let answer: Answer = http::get(&address, &path).await?;
        ensure!(
            answer.version == version,
            "{address} answered with version {} instead of {version}",
            answer.version
        );
        places.extend(answer.packages.iter().position(|package| package.name == name));
    }
    Ok(places)
}
