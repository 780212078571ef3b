//! zenoh: a query and its reply, over TCP or with replies in shared memory.

use std::{hint::black_box, io::Read, net::TcpListener};

use zenoh::{
    Config, Session, Wait,
    bytes::ZBytes,
    shm::{PosixShmProviderBackend, ShmProvider, ShmProviderBuilder, ZShm},
};

use crate::plan::{Fault, Figure, Plan, check_length, parent_is_done, ready};

pub(crate) type PosixProvider = ShmProvider<PosixShmProviderBackend>;

const KEY: &str = "pull";
/// Room for the allocator's own bytes besides the value.
const SHM_SLACK_BYTES: usize = 1 << 20;

pub(crate) async fn open(shared_memory: bool, settings: &[(&str, String)]) -> Result<Session, Fault> {
    let mut config = Config::default();
    let fixed = [
        ("mode", "\"peer\"".to_owned()),
        ("scouting/multicast/enabled", "false".to_owned()),
        ("transport/shared_memory/enabled", shared_memory.to_string()),
    ];
    for (key, value) in fixed.iter().chain(settings) {
        config.insert_json5(key, value)?;
    }
    zenoh::open(config).await
}

/// An address that is free now: zenoh needs a port.
pub(crate) fn free_address() -> Result<String, Fault> {
    Ok(format!("tcp/{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?))
}

/// Shared memory for values of this many bytes together.
pub(crate) fn provider(bytes: usize) -> Result<PosixProvider, Fault> {
    let backend = PosixShmProviderBackend::builder(bytes + SHM_SLACK_BYTES).wait();
    let backend = backend.map_err(|error| {
        format!("{error}; zenoh locks its shared memory: let {bytes} bytes and more be locked (ulimit -l)")
    })?;
    Ok(ShmProviderBuilder::backend(backend).wait())
}

/// The answer to queries: shared memory that is written once. The provider owns the segment.
fn shared(bytes: usize) -> Result<(PosixProvider, ZBytes), Fault> {
    let provider = provider(bytes)?;
    let mut buffer = provider.alloc(bytes).wait()?;
    buffer.fill(7);
    Ok((provider, ZBytes::from(ZShm::from(buffer))))
}

pub(crate) async fn serve(plan: &Plan) -> Result<(), Fault> {
    let address = free_address()?;
    let session = open(plan.shared_memory, &[("listen/endpoints", format!("[\"{address}\"]"))]).await?;
    let (_provider, source) = if plan.shared_memory {
        let (provider, source) = shared(plan.bytes)?;
        (Some(provider), source)
    } else {
        (None, ZBytes::from(vec![7; plan.bytes]))
    };
    let queryable = session.declare_queryable(KEY).await?;
    ready(address);
    let answer = async {
        while let Ok(query) = queryable.recv_async().await {
            query.reply(KEY, source.clone()).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = answer => ended,
        () = parent_is_done() => Ok(()),
    }
}

pub(crate) async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    let settings = [("connect/endpoints", format!("[\"{address}\"]")), ("listen/endpoints", "[]".to_owned())];
    let session = open(plan.shared_memory, &settings).await?;
    let mut target = vec![0; plan.bytes];
    // A query before the server's declaration has come has no reply.
    while session.get(KEY).payload(vec![0; 8]).await?.recv_async().await.is_err() {
        tokio::task::yield_now().await;
    }
    plan.time(async || {
        let replies = session.get(KEY).payload(8_u64.to_le_bytes().to_vec()).await?;
        let reply = replies.recv_async().await?;
        let sample = reply.result().map_err(|error| format!("{error:?}"))?;
        check_length(plan.bytes, sample.payload().len())?;
        sample.payload().reader().read_exact(&mut target)?;
        black_box(&target);
        Ok(())
    })
    .await
}
