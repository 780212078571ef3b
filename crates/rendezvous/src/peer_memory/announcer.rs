//! Announces regions to a peer. A request uses a region only after the peer has confirmed it.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard, OnceLock, PoisonError, Weak},
};

use tensorwire_fabric::{RemoteRegion, Runtime, timeout};
use tensorwire_memory::BlockId;
use tensorwire_protocol::{Code, Status, limits::REGIONS_MAX, wire::control::ControlFrame};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::oneshot;

use crate::{
    control::{FAREWELL, FrameSender},
    error::Lost,
    peer_memory::region_record::record,
};

/// The regions of this worker that the peer of one data connection knows.
#[derive(Debug)]
pub(crate) struct Announcer {
    connection: u32,
    /// Weak, because connections that have ended are still referenced, and must not keep their session open.
    sender: Weak<dyn FrameSender>,
    runtime: Arc<dyn Runtime>,
    state: Mutex<AnnouncedRegions>,
    /// The first region that was confirmed for a request, and its block. A block has one region on a connection.
    first: OnceLock<(BlockId, RemoteRegion)>,
}

#[derive(Debug, Default)]
struct AnnouncedRegions {
    regions: BTreeMap<u32, Announced>,
    over: Option<String>,
}

#[derive(Debug)]
enum Announced {
    Waiting(Vec<oneshot::Sender<()>>),
    Confirmed,
}

impl Announcer {
    /// `known` are the regions sent with the connection's set-up, which confirms them.
    pub(crate) fn new(
        connection: u32,
        sender: &Arc<dyn FrameSender>,
        runtime: Arc<dyn Runtime>,
        known: &[RemoteRegion],
    ) -> Self {
        let regions = known.iter().map(|region| (region.region.0, Announced::Confirmed)).collect();
        let sender = Arc::downgrade(sender);
        let state = Mutex::new(AnnouncedRegions { regions, over: None });
        Self { connection, sender, runtime, state, first: OnceLock::new() }
    }

    /// The number of the connection in its session.
    pub(crate) fn connection(&self) -> u32 {
        self.connection
    }

    /// The region of `block`, if it was remembered.
    pub(crate) fn remembered(&self, block: BlockId) -> Option<RemoteRegion> {
        let (known, region) = self.first.get()?;
        let is_forgotten = tensorwire_testpoints::chance!("a confirmed region is looked up again");
        (*known == block && !is_forgotten).then_some(*region)
    }

    /// Remembers the confirmed `region` of `block`, if it is the first: most destinations are in the first block.
    pub(crate) fn remember(&self, block: BlockId, region: RemoteRegion) {
        let _is_first = self.first.set((block, region));
    }

    /// Announces `region`, unless it was announced before, and waits until the peer has confirmed it.
    ///
    /// # Errors
    /// UNAVAILABLE with the reason for which the connection has ended; RESOURCE_EXHAUSTED if the peer knows too many regions.
    pub(crate) async fn confirmed(&self, region: RemoteRegion) -> Result<(), Status> {
        let Some(confirmation) = self.announce(region)? else { return Ok(()) };
        if tensorwire_testpoints::planted!("a region counts as confirmed once it is announced") {
            return Ok(());
        }
        confirmation.await.map_err(|_| Status::new(Code::Unavailable, self.over()))
    }

    /// `None` if the peer has already confirmed the region.
    fn announce(&self, region: RemoteRegion) -> Result<Option<oneshot::Receiver<()>>, Status> {
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(Status::new(Code::Unavailable, why.clone()));
        }
        let (confirm, confirmation) = oneshot::channel();
        let is_full = state.regions.len() >= REGIONS_MAX;
        match state.regions.get_mut(&region.region.0) {
            Some(known @ Announced::Confirmed) => {
                if !tensorwire_testpoints::chance!("a region is announced again") {
                    return Ok(None);
                }
                *known = Announced::Waiting(vec![confirm]);
            }
            Some(Announced::Waiting(waiting)) => {
                waiting.retain(|waiter| !waiter.is_closed());
                waiting.push(confirm);
                return Ok(Some(confirmation));
            }
            None if is_full => {
                let message = format!(
                    "a connection has at most {REGIONS_MAX} regions in its life: keep arenas for longer"
                );
                return Err(Status::new(Code::ResourceExhausted, message));
            }
            None => {
                state.regions.insert(region.region.0, Announced::Waiting(vec![confirm]));
            }
        }
        drop(state);
        let frame = ControlFrame::RegionAdd { connection: self.connection, region: record(&region) };
        let sender = self.sender.clone();
        // Sent by a separate task: if the receive that announces the region is dropped, others still wait for this
        // frame.
        self.runtime.spawn(
            "announce region",
            Box::pin(async move {
                let Some(sender) = sender.upgrade() else { return };
                if let Err(error) = sender.send(frame.encode()).await {
                    log!(DEBUG, %error, "a region could not be announced");
                }
            }),
        );
        Ok(Some(confirmation))
    }

    /// The peer confirmed `region`.
    pub(crate) fn confirm(&self, region: u32) {
        let before = {
            let mut state = self.lock();
            let Some(entry) = state.regions.get_mut(&region) else { return };
            std::mem::replace(entry, Announced::Confirmed)
        };
        if let Announced::Waiting(waiting) = before {
            for waiter in waiting {
                let _ = waiter.send(());
            }
        }
    }

    /// Sends the peer a `Disconnected` frame with the reason `why`. Needed for fabrics whose peer does not notice the
    /// end of the connection by itself. Does nothing if the session has ended.
    pub(crate) async fn send_end(&self, why: &Lost) {
        let Some(sender) = self.sender.upgrade() else { return };
        let frame = ControlFrame::Disconnected { connection: self.connection, status: why.status() };
        // The limit is for a peer that reads nothing, which must not delay the release of memory.
        let told = timeout(&*self.runtime, FAREWELL, sender.send(frame.encode())).await;
        if !matches!(told, Ok(Ok(()))) {
            log!(DEBUG, ?told, "the end of a connection could not be sent to the peer");
        }
    }

    /// The connection has ended: all waits fail.
    pub(crate) fn fail(&self, why: &str) {
        let regions = {
            let mut state = self.lock();
            state.over.get_or_insert_with(|| why.to_owned());
            std::mem::take(&mut state.regions)
        };
        drop(regions);
    }

    fn over(&self) -> String {
        self.lock().over.clone().unwrap_or_else(|| "the connection is over".to_owned())
    }

    fn lock(&self) -> MutexGuard<'_, AnnouncedRegions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_fabric::{BoxFuture, RegionGeneration, RegionId, TokioRuntime};

    use super::*;
    use crate::control::ControlError;

    /// Takes every frame.
    #[derive(Debug)]
    struct Taking;

    impl FrameSender for Taking {
        fn send(&self, _: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
            Box::pin(std::future::ready(Ok(())))
        }
    }

    fn region(number: usize) -> RemoteRegion {
        let (region, generation) = (RegionId(number as u32), RegionGeneration(1));
        RemoteRegion { region, generation, base: 0, length: 1, key: 0 }
    }

    #[tokio::test]
    async fn a_connection_that_has_all_its_regions_refuses_another_one() {
        let sender: Arc<dyn FrameSender> = Arc::new(Taking);
        let known: Vec<_> = (0..REGIONS_MAX).map(region).collect();
        let runtime = Arc::new(TokioRuntime::current().unwrap());
        let announcer = Announcer::new(1, &sender, runtime, &known);
        announcer.confirmed(region(REGIONS_MAX - 1)).await.unwrap();
        let refused = announcer.confirmed(region(REGIONS_MAX)).await.unwrap_err();
        assert!(refused.code == Code::ResourceExhausted && refused.message.contains("65536"), "{refused}");
    }
}
