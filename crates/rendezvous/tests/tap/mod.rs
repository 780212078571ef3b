//! A control plane whose sessions are tapped: every frame that is sent or received is stored.

#![allow(clippy::unwrap_used)] // test support

use std::sync::{Arc, Mutex};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::wire::control::{Connect, ControlFrame};
use tensorwire_rendezvous::control::{
    ControlError, ControlPlane, ControlSession, FrameReceiver, FrameSender, GrpcPlane, Secret,
};

/// The number of a connection that a test makes up: what it carries is no secret.
pub(crate) const MADE_UP: u32 = 5_555;

type Frames = Arc<Mutex<Vec<ControlFrame>>>;

/// The frames that passed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tap(Frames);

/// The secrets in the frames that passed.
#[derive(Debug, Default)]
pub(crate) struct Secrets {
    pub(crate) values: Vec<(&'static str, Vec<u8>)>,
    pub(crate) nonces: usize,
    pub(crate) proofs: usize,
    pub(crate) tokens: usize,
    pub(crate) keys: Vec<u32>,
}

impl Tap {
    pub(crate) fn on(&self, plane: GrpcPlane) -> Tapped {
        Tapped { plane, frames: self.0.clone() }
    }

    pub(crate) fn frames(&self) -> Vec<ControlFrame> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn connects(&self) -> Vec<Connect> {
        let connect = |frame| match frame {
            ControlFrame::Connect(end) | ControlFrame::Connected(end) => Some(end),
            _ => None,
        };
        self.frames().into_iter().filter_map(connect).collect()
    }

    pub(crate) fn secrets(&self) -> Secrets {
        let mut found = Secrets::default();
        for frame in self.frames() {
            match frame {
                ControlFrame::Hello { nonce, .. } => {
                    found.nonces += 1;
                    found.values.push(("a nonce", nonce.to_vec()));
                }
                ControlFrame::Proof { proof } => {
                    found.proofs += 1;
                    found.values.push(("a proof", proof.to_vec()));
                }
                ControlFrame::RegionAdd { region, .. } => found.keys.push(region.key),
                _ => {}
            }
        }
        for end in self.connects().into_iter().filter(|end| end.connection != MADE_UP) {
            let token = end.data.len().saturating_sub(16);
            found.tokens += 1;
            found.values.push(("a token", end.data[token..].to_vec()));
            found.keys.extend(end.regions.iter().map(|region| region.key));
        }
        found.keys.sort_unstable();
        found.keys.dedup();
        // Short numbers are found everywhere.
        found.keys.retain(|key| *key > 10_000_000);
        found
    }
}

#[derive(Debug)]
pub(crate) struct Tapped {
    plane: GrpcPlane,
    frames: Frames,
}

fn keep(frames: &Frames, bytes: &[u8]) {
    frames.lock().unwrap().extend(ControlFrame::decode(bytes).ok());
}

#[derive(Debug)]
struct Sender(Arc<dyn FrameSender>, Frames);

impl FrameSender for Sender {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        keep(&self.1, &frame);
        self.0.send(frame)
    }

    fn admitted(&self) {
        self.0.admitted();
    }
}

#[derive(Debug)]
struct Receiver(Box<dyn FrameReceiver>, Frames);

impl FrameReceiver for Receiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(async {
            let frame = self.0.recv().await?;
            frame.iter().for_each(|bytes| keep(&self.1, bytes));
            Ok(frame)
        })
    }
}

fn tapped(session: ControlSession, frames: &Frames) -> ControlSession {
    let ControlSession { sender, receiver, addresses } = session;
    let sender = Arc::new(Sender(sender, frames.clone()));
    ControlSession { sender, receiver: Box::new(Receiver(receiver, frames.clone())), addresses }
}

impl ControlPlane for Tapped {
    fn local_address(&self) -> String {
        self.plane.local_address()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        let (dialling, frames) = (self.plane.dial(address), self.frames.clone());
        Box::pin(async move { Ok(tapped(dialling.await?, &frames)) })
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        Box::pin(async { Ok(tapped(self.plane.accept().await?, &self.frames)) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.plane.close()
    }

    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        self.plane.runtime()
    }

    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        self.plane.ambient_secret(address)
    }
}
