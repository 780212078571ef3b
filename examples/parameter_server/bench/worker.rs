//! A worker of the bench: it does the rounds that the launcher asks for, and reports how long they took.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use tensorwire::{Runtime, TokioRuntime};

use super::{grpc, server::Client, transport::Transport};
use crate::{children::lines, failure::Failure, report::Report, server::runtime};

/// Does rounds until the launcher lets go.
pub(crate) async fn run(index: usize, sizes: &[usize]) -> Result<(), Failure> {
    let mut launcher = lines();
    let mut bench = Bench {
        runtime: runtime()?,
        grpc_runtime: super::grpc_runtime().map_err(Failure::Runtime)?,
        ours: BTreeMap::new(),
        grpc: None,
    };
    while let Some(line) = launcher.recv().await {
        let Some(transport) = line.value::<Transport>("transport") else { continue };
        if let Some(address) = line.value::<String>("address") {
            bench.connect(transport, &address, index, sizes).await?;
        } else {
            bench.round(transport, line.value("update").unwrap_or(false)).await?;
        }
    }
    join_all(bench.ours.values().map(Client::shutdown)).await;
    bench.grpc_runtime.shutdown_background();
    Ok(())
}

struct Bench {
    runtime: TokioRuntime,
    grpc_runtime: tokio::runtime::Runtime,
    ours: BTreeMap<Transport, Client>,
    grpc: Option<grpc::Client>,
}

impl Bench {
    async fn connect(
        &mut self,
        transport: Transport,
        address: &str,
        index: usize,
        sizes: &[usize],
    ) -> Result<(), Failure> {
        let uses = if transport == Transport::Grpc {
            let (address, sizes) = (address.to_owned(), sizes.to_vec());
            let connecting = async move { grpc::Client::connect(&address, index, &sizes).await };
            self.grpc = Some(self.on_grpc_runtime(connecting).await?);
            transport.to_string()
        } else {
            let client = Client::connect(transport, address, index, sizes).await?;
            let uses = client.uses();
            self.ours.insert(transport, client);
            uses
        };
        Report::of("connected", transport).with("uses", uses).print();
        Ok(())
    }

    async fn round(&mut self, transport: Transport, update: bool) -> Result<(), Failure> {
        let (pull, push) = match (self.ours.get_mut(&transport), self.grpc.clone()) {
            (Some(client), _) => {
                let began = self.runtime.now();
                let parameters = client.pull().await?;
                let pulled = self.runtime.now();
                client.push(update).await?;
                let pushed = self.runtime.now();
                drop(parameters);
                (pulled - began, pushed - pulled)
            }
            (None, Some(client)) => {
                let runtime = self.runtime.clone();
                let round = async move {
                    let began = runtime.now();
                    let parameters = client.pull().await?;
                    let pulled = runtime.now();
                    client.push(update).await?;
                    let pushed = runtime.now();
                    drop(parameters);
                    Ok((pulled - began, pushed - pulled))
                };
                self.on_grpc_runtime(round).await?
            }
            (None, None) => (Duration::ZERO, Duration::ZERO),
        };
        Report::of("pull", pull.as_secs_f64()).with("push", push.as_secs_f64()).print();
        Ok(())
    }

    async fn on_grpc_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, tonic::codegen::StdError>> + Send + 'static,
    ) -> Result<T, Failure> {
        match self.grpc_runtime.handle().spawn(work).await {
            Ok(worked) => worked.map_err(|error| Failure::Grpc(error.to_string())),
            Err(ended) => Err(Failure::Grpc(ended.to_string())),
        }
    }
}
