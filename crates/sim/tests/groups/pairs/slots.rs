//! Buffers of a slot, which is used again and again.

use tensorwire_collective::{
    GroupError,
    pair::{AHEAD, RecvBuffer, SendBuffer, Wait},
};
use tensorwire_sim::Rng;

use super::life::Life;

/// Rounds of a slot, each with new buffers.
const ROUNDS: u32 = 2;

const SLOT: u64 = 7;

/// A round of a slot, the same on both sides.
struct Round {
    length: usize,
    /// The offset of each part, its length, and its offset at the receiver.
    parts: Vec<[usize; 3]>,
    /// How many of them are awaited before the receive buffer is dropped.
    taken: usize,
    salt: u8,
}

impl Round {
    /// Whether all parts are awaited.
    fn is_whole(&self) -> bool {
        self.taken == self.parts.len()
    }

    /// The bytes of part `number`.
    fn content(&self, number: usize) -> Vec<u8> {
        let [_, length, _] = self.parts[number];
        (0..length).map(|at| (at * 7 + number * 13) as u8 ^ self.salt).collect()
    }
}

impl Life {
    fn round(&self, from: usize, to: usize, number: u32) -> Round {
        let mut rng = self.drawn([5, from, to, number as usize]);
        let length = rng.pick([0, 1, 64, 5000]);
        let parts: Vec<[usize; 3]> = (0..1 + rng.below(12))
            .map(|_| {
                let part = rng.below(length + 1);
                [rng.below(length - part + 1), part, rng.below(length - part + 1)]
            })
            .collect();
        let taken = if rng.chance(1, 3) { rng.below(parts.len()) } else { parts.len() };
        Round { length, parts, taken, salt: rng.next_u64() as u8 }
    }

    pub(super) async fn send_slot(&self, to: usize) {
        let mut rng = self.private([6, to]);
        for number in 0..ROUNDS {
            let round = self.round(self.own(), to, number);
            let mut buffer = match self.group.send_buffer(to, SLOT, round.length) {
                Ok(buffer) => buffer,
                Err(error) => return self.explain("send buffer", &[to], &error),
            };
            if let Err(error) = self.send_parts(&mut rng, (to, number), &round, &mut buffer).await
                && !matches!(error, GroupError::Gone { .. })
            {
                return;
            }
        }
    }

    async fn send_parts(
        &self,
        rng: &mut Rng,
        (to, number): (usize, u32),
        round: &Round,
        buffer: &mut SendBuffer,
    ) -> Result<(), GroupError> {
        for (at, [offset, length, roffset]) in round.parts.iter().copied().enumerate() {
            self.pause(rng).await;
            buffer.bytes_mut()[offset..offset + length].copy_from_slice(&round.content(at));
            self.of_slot(
                rng,
                "send of a buffer",
                (to, round),
                |buffer| buffer.send(offset, length, roffset),
                buffer,
            )
            .await?;
        }
        for at in 0..round.parts.len() {
            self.of_slot(rng, "wait for a send", (to, round), SendBuffer::wait_send, buffer).await?;
            self.note_landed((self.own(), to, number), Some(at + 1), None, round);
        }
        let further = buffer.wait_send().await;
        let is_counted = matches!(further, Err(GroupError::Argument { field: "wait_send", .. }));
        if !is_counted && self.group.failure().is_none() {
            self.fail_data(&format!("one send more was received than there were: {further:?}"));
        }
        Ok(())
    }

    /// Waits until it has ended. The other buffer may be dropped if it does not receive all parts.
    async fn of_slot(
        &self,
        rng: &mut Rng,
        what: &str,
        (to, round): (usize, &Round),
        begin: impl for<'a> Fn(&'a mut SendBuffer) -> Wait<'a, ()>,
        buffer: &mut SendBuffer,
    ) -> Result<(), GroupError> {
        loop {
            let wait = begin(buffer);
            let ended = if round.is_whole() {
                self.wait(rng, what, &[to], wait).await
            } else {
                self.wait_if_gone(rng, what, to, wait).await
            };
            if let Some(ended) = ended {
                return ended;
            }
        }
    }

    pub(super) async fn receive_slot(&self, from: usize) {
        let mut rng = self.private([8, from]);
        for number in 0..ROUNDS {
            let round = self.round(from, self.own(), number);
            let mut buffer = match self.group.recv_buffer(from, SLOT, round.length) {
                Ok(buffer) => buffer,
                Err(error) => return self.explain("receive buffer", &[from], &error),
            };
            if self.receive_parts(&mut rng, (from, number), &round, &mut buffer).await.is_err() {
                return;
            }
        }
    }

    async fn receive_parts(
        &self,
        rng: &mut Rng,
        (from, number): (usize, u32),
        round: &Round,
        buffer: &mut RecvBuffer,
    ) -> Result<(), GroupError> {
        for at in 0..round.taken {
            self.pause(rng).await;
            let landed = loop {
                let what = "wait for a part";
                if let Some(landed) = self.wait(rng, what, &[from], buffer.wait_recv()).await {
                    break landed?;
                }
            };
            let [_, length, roffset] = round.parts[at];
            if landed != (roffset..roffset + length) || buffer.bytes()[landed.clone()] != round.content(at) {
                self.fail_data(&format!("part {at} of round {number} from {from} landed at {landed:?}"));
            }
            self.books().reached.landed += 1;
            self.note_landed((from, self.own(), number), None, Some(at + 1), round);
        }
        if round.is_whole() {
            let end = loop {
                let what = "wait for the end of a buffer";
                if let Some(end) = self.wait_if_gone(rng, what, from, buffer.wait_recv()).await {
                    break end;
                }
            };
            match end {
                Err(GroupError::Gone { .. }) => {}
                Err(error) => return Err(error),
                Ok(landed) => self.fail_data(&format!("more parts of {from} than it sent: {landed:?}")),
            }
        }
        Ok(())
    }

    /// Checks that no more sends are acknowledged than a receive buffer accepts ahead.
    fn note_landed(
        &self,
        place: (usize, usize, u32),
        acknowledged: Option<usize>,
        taken: Option<usize>,
        round: &Round,
    ) {
        let mut books = self.books();
        let known = books.landed.entry(place).or_default();
        known.0 = acknowledged.unwrap_or(known.0);
        known.1 = taken.unwrap_or(known.1);
        let (acknowledged, taken) = *known;
        drop(books);
        if round.is_whole() && acknowledged > taken + AHEAD {
            self.fail_data(&format!("{acknowledged} parts of {place:?} are said to be there, of {taken}"));
        }
    }
}
