//! Introductions on a control session.

use std::time::Duration;

use protocol::{
    limits::WIRE_VERSION,
    wire::control::{ControlFrame, FabricOffer},
};
use verbs_reactor::Runtime;

use super::{ControlError, ControlSession, Secret};

/// Who a worker says it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Its name.
    pub worker: String,
    /// Tells this life of it from others.
    pub incarnation: u64,
    /// Where it accepts sessions itself.
    pub listen_address: Option<String>,
    /// Numbers and reaches of the fabrics it has, best first.
    pub fabrics: Vec<(u8, Vec<u8>)>,
}

/// Introduces `me` to the worker that was dialled.
///
/// # Errors
/// [`ControlError::Lost`] or [`ControlError::Misbehaved`].
pub async fn dial(
    session: &mut ControlSession,
    me: &Introduction,
    secret: Option<&Secret>,
    runtime: &dyn Runtime,
    limit: Duration,
    address: &str,
) -> Result<Introduction, ControlError> {
    let _ = (secret, runtime, limit);
    introduce(session, me, address).await
}

/// Introduces `me` to the worker that dialled.
///
/// # Errors
/// As [`dial`].
pub async fn accept(
    session: &mut ControlSession,
    me: &Introduction,
    secret: Option<&Secret>,
    runtime: &dyn Runtime,
    limit: Duration,
) -> Result<Introduction, ControlError> {
    let _ = (secret, runtime, limit);
    introduce(session, me, "the dialling end").await
}

async fn introduce(
    session: &mut ControlSession,
    me: &Introduction,
    address: &str,
) -> Result<Introduction, ControlError> {
    let fabrics = me.fabrics.iter().map(|(kind, reach)| FabricOffer { kind: *kind, reach: reach.clone() });
    let hello = ControlFrame::Hello {
        wire_version: WIRE_VERSION,
        worker: me.worker.clone(),
        incarnation: me.incarnation,
        listen_address: me.listen_address.clone(),
        nonce: [0; 32],
    };
    let (worker, incarnation) = (me.worker.clone(), me.incarnation);
    let welcome = ControlFrame::Welcome { worker, incarnation, fabrics: fabrics.collect() };
    session.sender.send(hello.encode()).await?;
    session.sender.send(welcome.encode()).await?;
    let (hello, welcome) = (next(session, address).await?, next(session, address).await?);
    let (ControlFrame::Hello { listen_address, .. }, ControlFrame::Welcome { worker, incarnation, fabrics }) =
        (hello, welcome)
    else {
        let detail = "it did not introduce itself".to_owned();
        return Err(ControlError::Misbehaved { address: address.to_owned(), detail });
    };
    session.sender.admitted();
    let fabrics = fabrics.into_iter().map(|offer| (offer.kind, offer.reach)).collect();
    Ok(Introduction { worker, incarnation, listen_address, fabrics })
}

async fn next(session: &mut ControlSession, address: &str) -> Result<ControlFrame, ControlError> {
    let bytes = session.receiver.recv().await?;
    let bytes =
        bytes.ok_or_else(|| ControlError::Lost { detail: "the peer ended the session".to_owned() })?;
    let misbehaved = |error: protocol::wire::WireError| ControlError::Misbehaved {
        address: address.to_owned(),
        detail: error.to_string(),
    };
    ControlFrame::decode(&bytes).map_err(misbehaved)
}
