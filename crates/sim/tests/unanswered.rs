//! A peer whose session is alive, and that never answers a request to connect.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::wire::control::ControlFrame;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    control::{ControlError, ControlPlane, ControlSession, FrameReceiver, Secret},
};
use tensorwire_sim::{Handle, Node, World};

use crate::common::builder;

/// Longest set-up of a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Additional time: the session's own set-up, and late packets.
const SLACK: Duration = Duration::from_secs(2);

/// A control plane on which the peer's CONNECTED never arrives.
#[derive(Debug)]
struct Unanswered(Arc<dyn ControlPlane>);

#[derive(Debug)]
struct Receiver(Box<dyn FrameReceiver>);

impl FrameReceiver for Receiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(async {
            loop {
                let frame = self.0.recv().await?;
                let decoded = frame.as_ref().and_then(|bytes| ControlFrame::decode(bytes).ok());
                if !matches!(decoded, Some(ControlFrame::Connected(_))) {
                    return Ok(frame);
                }
            }
        })
    }
}

impl ControlPlane for Unanswered {
    fn local_address(&self) -> String {
        self.0.local_address()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        let dialling = self.0.dial(address);
        Box::pin(async move {
            let ControlSession { sender, receiver, addresses } = dialling.await?;
            Ok(ControlSession { sender, receiver: Box::new(Receiver(receiver)), addresses })
        })
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        self.0.accept()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.0.close()
    }

    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        self.0.runtime()
    }

    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        self.0.ambient_secret(address)
    }
}

async fn worker(node: &Node, name: &str, plane: Arc<dyn ControlPlane>) -> Worker {
    builder(node, name).dangerous_control_plane(plane).start().await.unwrap()
}

async fn unanswered(handle: Handle) {
    let nodes = ["left:1", "right:1"].map(|address| handle.start_node(address).unwrap());
    let deaf = Arc::new(Unanswered(nodes[0].control_plane()));
    let left = worker(&nodes[0], "/job:a/replica:0/task:0", deaf).await;
    let right = worker(&nodes[1], "/job:b/replica:0/task:0", nodes[1].control_plane()).await;
    right.publish("x", Tensor::from_values(right.pool(), &[1], &[7u32]).unwrap()).unwrap();
    let peer = left.peer_at("right:1").await.unwrap();
    let began = handle.now();
    let error = peer.fetch("x").await.unwrap_err();
    let took = handle.now() - began;
    assert!(matches!(error, WorkerError::NoFabric { .. }), "{error}");
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!((CONNECT_LIMIT..CONNECT_LIMIT + SLACK).contains(&took), "{took:?}");
    futures::future::join(left.shutdown(), right.shutdown()).await;
}

#[test]
fn l1_a_request_to_connect_that_is_never_answered_ends_within_the_limit() {
    for seed in 0..20 {
        let world = World::new(seed);
        world.replayed_by("unanswered");
        world.run(unanswered(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
