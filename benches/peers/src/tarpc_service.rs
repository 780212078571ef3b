//! tarpc over TCP with bincode, one call each. Bytes are serialized as bytes, not one by one.

use std::hint::black_box;

use bytes::Bytes;
use futures::StreamExt;
use tarpc::{
    client, context,
    server::{BaseChannel, Channel},
    tokio_serde::formats::Bincode,
};

use crate::plan::{Fault, Figure, Plan, check_length, parent_is_done, ready};

/// Largest message.
const FRAME_BYTES_MAX: usize = 128 << 20;

#[tarpc::service]
trait Pull {
    async fn pull(number: u64) -> Bytes;
}

#[derive(Debug, Clone)]
struct Server {
    source: Bytes,
}

impl Pull for Server {
    async fn pull(self, _: context::Context, _number: u64) -> Bytes {
        self.source
    }
}

pub(crate) async fn serve(plan: &Plan) -> Result<(), Fault> {
    let mut listener = tarpc::serde_transport::tcp::listen("127.0.0.1:0", Bincode::default).await?;
    listener.config_mut().max_frame_length(FRAME_BYTES_MAX);
    ready(listener.local_addr());
    let server = Server { source: Bytes::from(vec![7; plan.bytes]) };
    let accept = async {
        while let Some(Ok(transport)) = listener.next().await {
            transport.get_ref().set_nodelay(true)?;
            let answers = BaseChannel::with_defaults(transport).execute(server.clone().serve());
            tokio::spawn(answers.for_each(|answer| async move {
                tokio::spawn(answer);
            }));
        }
        Ok(())
    };
    tokio::select! {
        ended = accept => ended,
        () = parent_is_done() => Ok(()),
    }
}

pub(crate) async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    let mut connecting = tarpc::serde_transport::tcp::connect(address, Bincode::default);
    connecting.config_mut().max_frame_length(FRAME_BYTES_MAX);
    let transport = connecting.await?;
    transport.get_ref().set_nodelay(true)?;
    let client = PullClient::new(client::Config::default(), transport).spawn();
    plan.time(async || {
        let pulled = client.pull(context::current(), 8).await?;
        check_length(plan.bytes, black_box(&pulled).len())
    })
    .await
}
