//! Posts that wait for the send queue, in order.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use memory::Buf;
use protocol::ChannelError;
use tokio::sync::{Notify, oneshot};
use verbs_reactor::{FabricError, Immediate, Operation, QueuePair, WorkRequest};

use crate::link::connection::fabric_channel::{ContentWrite, lost};

/// Posts that found the send queue full: a fabric may report a completion later than the answer it caused. They
/// are posted in order by [`HeldPosts::post_when_possible`]. Contents wait here too: the peer's flow control
/// relies on what was posted before an ASK landing before it.
#[derive(Debug, Default)]
pub(crate) struct HeldPosts {
    queue: Mutex<VecDeque<HeldPost>>,
    some: Notify,
}

#[derive(Debug)]
struct HeldPost {
    request: WorkRequest,
    /// Told of the operation, if anybody awaits it.
    awaiting: Option<oneshot::Sender<Operation>>,
}

impl HeldPosts {
    /// Posts now, or holds the request behind those held already.
    pub(crate) fn post(&self, queue_pair: &QueuePair, request: WorkRequest) -> Result<(), ChannelError> {
        let mut queue = self.lock();
        match post_behind(&queue, queue_pair, &request)? {
            // Nobody awaits it: the slot keeps the bytes, and a failure shows as the connection's.
            Some(operation) => drop(operation),
            None => self.hold(&mut queue, queue_pair, HeldPost { request, awaiting: None })?,
        }
        Ok(())
    }

    /// As [`post`](Self::post), for a request whose end is awaited.
    pub(crate) fn post_awaited(&self, queue_pair: &QueuePair, request: WorkRequest) -> ContentWrite {
        let mut queue = self.lock();
        let posted = post_behind(&queue, queue_pair, &request).and_then(|posted| match posted {
            Some(operation) => Ok(ContentWrite::Posted(operation)),
            None => {
                let (sender, receiver) = oneshot::channel();
                self.hold(&mut queue, queue_pair, HeldPost { request, awaiting: Some(sender) })?;
                Ok(ContentWrite::Held(receiver))
            }
        });
        posted.unwrap_or_else(ContentWrite::Refused)
    }

    /// Lends now or not at all: neither behind held posts nor when the fabric refuses.
    pub(crate) fn lend(
        &self,
        queue_pair: &QueuePair,
        local: Buf,
        immediate: Immediate,
    ) -> Result<ContentWrite, FabricError> {
        let queue = self.lock();
        if !queue.is_empty() {
            return Err(FabricError::SendQueueFull { depth: queue_pair.config().send_depth });
        }
        queue_pair.lend_now(local, immediate).map(ContentWrite::Posted)
    }

    fn hold(
        &self,
        queue: &mut VecDeque<HeldPost>,
        queue_pair: &QueuePair,
        held: HeldPost,
    ) -> Result<(), ChannelError> {
        let most = queue_pair.config().send_depth as usize;
        if queue.len() >= most {
            return Err(ChannelError(format!("more than {most} posts wait for the send queue")));
        }
        queue.push_back(held);
        self.some.notify_one();
        Ok(())
    }

    /// Posts what is held as completions make room, until the queue pair fails.
    pub(crate) async fn post_when_possible(self: Arc<Self>, queue_pair: QueuePair) {
        while queue_pair.failure().is_none() {
            if self.lock().is_empty() {
                self.some.notified().await;
            }
            let weight = self.first_weight(queue_pair.capabilities().piece_bytes_max);
            queue_pair.room_of(weight).await;
            self.post_held(&queue_pair);
        }
        // Whoever awaits one of these learns that it is over.
        self.lock().clear();
    }

    /// What the first of them needs of the send queue.
    fn first_weight(&self, piece_bytes_max: u64) -> u64 {
        self.lock().front().map_or(1, |held| held.request.weight(piece_bytes_max))
    }

    fn post_held(&self, queue_pair: &QueuePair) {
        let mut queue = self.lock();
        while let Some(held) = queue.front() {
            let posted = queue_pair.post_now(&held.request);
            if let Err(FabricError::SendQueueFull { .. }) = posted {
                return;
            }
            let awaiting = queue.pop_front().and_then(|held| held.awaiting);
            if let (Some(awaiting), Ok(operation)) = (awaiting, posted) {
                // If nobody awaits it any more, the slot keeps the bytes all the same.
                let _ = awaiting.send(operation);
            }
        }
    }

    /// Lets [`post_when_possible`](Self::post_when_possible) see that the queue pair has failed.
    pub(crate) fn wake(&self) {
        self.some.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<HeldPost>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Posts now unless others wait or the send queue is full.
fn post_behind(
    queue: &VecDeque<HeldPost>,
    queue_pair: &QueuePair,
    request: &WorkRequest,
) -> Result<Option<Operation>, ChannelError> {
    let must_wait = !queue.is_empty() && !testpoints::planted!("a post goes past those that are held");
    if must_wait || testpoints::chance!("a post is held though the send queue has room") {
        return Ok(None);
    }
    match queue_pair.post_now(request) {
        Ok(operation) => Ok(Some(operation)),
        Err(FabricError::SendQueueFull { .. }) => Ok(None),
        Err(error) => Err(lost(&error)),
    }
}
