//! A rank that sends without end does not delay the messages of others.

use std::{collections::BTreeSet, future::IntoFuture as _, time::Duration};

use futures::future::{Either, join, select};

use super::life::{LIMIT, Life};

const FLOOD: u64 = 200;
const ENOUGH: u64 = 201;

/// The rank that receives, and the rank that sends without end.
const RECEIVER: usize = 0;
const FLOODER: usize = 1;

/// Sends of the flood that are in progress together.
const TOGETHER: usize = 4;

const PAUSE: Duration = Duration::from_millis(1);

/// Messages of the flood that may be received before one of each other rank. Some pass while the others are in flight.
const MOST: u32 = 400;

impl Life {
    /// Runs while there are no faults.
    pub(super) async fn flood(&self) {
        if self.group.size() <= FLOODER {
            return;
        }
        let sends = async {
            if self.own() != FLOODER {
                self.tell(RECEIVER, FLOOD, &[0]);
            }
            // The others' messages have been sent before the flood begins.
            self.group.barrier().timeout(LIMIT).await.unwrap();
            if self.own() == FLOODER {
                self.send_until_enough().await;
            }
        };
        let receives = async {
            if self.own() == RECEIVER {
                self.receive_of_all().await;
            }
        };
        join(sends, receives).await;
    }

    async fn send_until_enough(&self) {
        let flooding = async {
            loop {
                // In a world without latencies, no time would pass otherwise, and the others wait for time to pass.
                self.rank.worker.runtime().sleep(PAUSE).await;
                let sent = [(); TOGETHER].map(|()| self.group.send(RECEIVER, FLOOD, self.tensor(&[0u8])));
                for sent in sent {
                    sent.unwrap().wait().timeout(LIMIT).await.unwrap();
                }
            }
        };
        let enough = self.group.recv(RECEIVER, ENOUGH).timeout(LIMIT);
        match select(enough.into_future(), Box::pin(flooding)).await {
            Either::Left((enough, _)) => drop(enough.unwrap()),
            Either::Right((never, _)) => never,
        }
    }

    async fn receive_of_all(&self) {
        let mut rng = self.private([11]);
        let all: Vec<usize> = (0..self.group.size()).collect();
        let mut awaited: BTreeSet<usize> = all.iter().copied().filter(|rank| *rank != FLOODER).collect();
        let mut flooded = 0;
        while !awaited.is_empty() && flooded <= MOST {
            match self.wait(&mut rng, "receive of any", &all, self.group.recv(.., FLOOD)).await {
                None => {}
                Some(Ok(message)) if message.rank == FLOODER => flooded += 1,
                Some(Ok(message)) => drop(awaited.remove(&message.rank)),
                Some(Err(_)) => break,
            }
        }
        if !awaited.is_empty() {
            self.fail_data(&format!("{flooded} messages of rank {FLOODER} came before those of {awaited:?}"));
        }
        self.tell(FLOODER, ENOUGH, &[]);
    }
}
