//! Members of a group that send frames by hand.

use std::time::Duration;

use tensorwire_protocol::wire::control::ControlFrame;
use tensorwire_rendezvous::control::{
    ControlPlane, ControlSession, GrpcConfig, GrpcPlane, Secret,
    handshake::{self, Introduction},
};

use super::{
    LONG, runtime,
    worker::{SECRET, Serving},
};

fn secret() -> Secret {
    Secret::new(SECRET).unwrap()
}

fn plane() -> GrpcPlane {
    GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Some(secret()))).unwrap()
}

fn introduction(name: &str, address: &str) -> Introduction {
    let listen_address = Some(address.to_owned());
    Introduction { worker: name.to_owned(), incarnation: 1, listen_address, fabrics: Vec::new() }
}

/// A session with a worker.
pub(super) struct Member {
    session: ControlSession,
    _plane: Option<GrpcPlane>,
}

impl Member {
    pub(super) async fn of(serving: &Serving) -> Self {
        Self::at(serving.worker.address()).await
    }

    /// Dials the worker at `address`.
    pub(super) async fn at(address: &str) -> Self {
        let (plane, clock) = (plane(), runtime());
        let me = format!("/job:member_{}/replica:0/task:0", clock.random());
        let mut session = plane.dial(address).await.unwrap();
        let me = introduction(&me, &plane.local_address());
        handshake::dial(&mut session, &me, Some(&secret()), &*clock, LONG, address).await.unwrap();
        Self { session, _plane: Some(plane) }
    }

    /// Sends a frame, unless the session is over.
    pub(super) async fn send(&self, frame: ControlFrame) {
        let _ = self.session.sender.send(frame.encode()).await;
    }

    /// The next frame, except pings.
    pub(super) async fn receive(&mut self) -> ControlFrame {
        loop {
            let bytes = self.session.receiver.recv().await.unwrap().expect("a frame");
            match ControlFrame::decode(&bytes).unwrap() {
                ControlFrame::Ping { .. } => {}
                frame => return frame,
            }
        }
    }
}

/// Where such a member listens.
pub(super) struct Place {
    plane: GrpcPlane,
    pub(super) address: String,
}

impl Place {
    pub(super) async fn open() -> Self {
        let plane = plane();
        let address = plane.local_address();
        Self { plane, address }
    }

    pub(super) async fn accept(&self) -> Member {
        let mut session = self.plane.accept().await.unwrap();
        let me = introduction("/job:place/replica:0/task:0", &self.address);
        let limit = Duration::from_secs(10);
        handshake::accept(&mut session, &me, Some(&secret()), &*runtime(), limit).await.unwrap();
        Member { session, _plane: None }
    }
}
