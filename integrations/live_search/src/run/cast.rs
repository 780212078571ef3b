//! A trainer and two services, as processes of their own.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use tokio::time::{sleep, timeout};

use crate::{
    inputs::Inputs,
    run::{LIMIT, http, process::Process},
    service::Stats,
};

/// Between two looks at something that cannot be waited for.
const LOOK: Duration = Duration::from_millis(20);
/// The services and the only fabric that each uses.
const SERVICES: [(&str, &str); 2] = [("search-shm", "shm"), ("search-tcp", "tcp")];

/// The processes of a run.
pub(super) struct Cast {
    pub(super) trainer: Process,
    pub(super) services: Vec<Process>,
    pub(super) addresses: Arc<[String]>,
    pub(super) held_out: Vec<(String, String)>,
    pub(super) queries: Arc<[String]>,
}

impl Cast {
    pub(super) async fn start(inputs: &Inputs, held_out: Vec<(String, String)>) -> Result<Self> {
        let [at, first, second] = free_addresses()?;
        let addresses: Arc<[String]> = [first, second].into();
        let of = |command: &str, rest: &[&str]| {
            let rest = rest.iter().map(|&argument| argument.to_owned());
            std::iter::once(command.to_owned()).chain(inputs.arguments()).chain(rest).collect::<Vec<_>>()
        };
        let trainer =
            Process::start("trainer", &inputs.work, of("trainer", &["--bind", &at, "--controlled"]))?;
        let services = SERVICES.iter().zip(&*addresses).map(|((name, fabric), http)| {
            let rest = ["--name", name, "--trainer", &at, "--http", http, "--fabric", fabric];
            Process::start(name, &inputs.work, of("service", &rest))
        });
        let queries = held_out.iter().map(|(_, path)| path.clone()).collect();
        let mut cast =
            Self { trainer, services: services.collect::<Result<_>>()?, addresses, held_out, queries };
        cast.wait_for_version(1).await?;
        Ok(cast)
    }

    /// Waits until both services use this version or a newer one.
    pub(super) async fn wait_for_version(&mut self, version: u64) -> Result<()> {
        let reached = async {
            loop {
                self.trainer.ensure_runs()?;
                self.services.iter_mut().try_for_each(Process::ensure_runs)?;
                let stats = stats(&self.addresses).await.unwrap_or_default();
                if !stats.is_empty() && stats.iter().all(|stats| stats.version >= version) {
                    return Ok(());
                }
                sleep(LOOK).await;
            }
        };
        let late = || format!("waited {LIMIT:?} for both services to use version {version}");
        timeout(LIMIT, reached).await.with_context(late)?
    }

    pub(super) async fn end(self) -> Result<()> {
        for service in self.services {
            service.end().await?;
        }
        self.trainer.end().await
    }
}

pub(super) async fn stats(addresses: &[String]) -> Result<Vec<Stats>> {
    let mut all = Vec::new();
    for address in addresses {
        all.push(http::get(address, "/stats").await?);
    }
    Ok(all)
}

/// Addresses that nobody uses now. Each process binds one of them a moment later.
fn free_addresses() -> Result<[String; 3]> {
    let listeners = [(); 3].map(|()| std::net::TcpListener::bind("127.0.0.1:0"));
    let mut addresses = listeners.iter().map(|listener| match listener {
        Ok(listener) => Ok(listener.local_addr()?.to_string()),
        Err(error) => anyhow::bail!("a free port of 127.0.0.1: {error}"),
    });
    let mut next = || addresses.next().context("three addresses")?;
    Ok([next()?, next()?, next()?])
}
