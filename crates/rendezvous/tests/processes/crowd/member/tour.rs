//! All of a pool is read through a peer's mapping once: what is resident then does not grow because a value comes to lie
//! where none has lain before.

use std::hint::black_box;

use tensorwire_protocol::{DataType, Sharing};
use tensorwire_rendezvous::Tensor;

use super::Member;

/// Bytes of a part: small enough for parts to fill what published values leave.
const PART: usize = 64 << 10;

/// Bytes of a page.
const PAGE: usize = 4096;

fn part(number: usize) -> String {
    format!("part {number}")
}

impl Member {
    /// Publishes all that is left of the source pool, in parts; returns how many.
    pub(super) fn publish_parts(&self) -> usize {
        let free = std::iter::from_fn(|| self.worker.pool().try_alloc(PART).ok());
        // All of them first, so that none reuses the memory of another.
        let buffers: Vec<_> = free.collect();
        let parts = buffers.len();
        for (number, mut buffer) in buffers.into_iter().enumerate() {
            buffer.fill(1);
            let tensor = Tensor::new(buffer, DataType::U8, &[PART as u64]).unwrap();
            self.worker.publish(&part(number), tensor).unwrap();
        }
        parts
    }

    /// Reads the parts of `peer`, where they lie.
    pub(super) async fn read_parts(&self, peer: usize, parts: usize) {
        let handle = self.peer(peer);
        for number in 0..parts {
            let fetched = handle.fetch(&part(number)).sharing(Sharing::View).await.unwrap();
            for byte in fetched.bytes().iter().step_by(PAGE) {
                assert_eq!(*black_box(byte), 1, "part {number} of {peer}");
            }
        }
    }

    pub(super) fn withdraw_parts(&self, parts: usize) {
        (0..parts).for_each(|number| assert!(self.worker.withdraw(&part(number)), "part {number}"));
    }
}
