//! Offered tensors, between two workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Ticket, Worker};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    bounded::bounded,
    fabrics::{kinds, over, over_verbs},
    rdma::patient,
    two::Two,
};

const LIMIT: Duration = Duration::from_secs(20);
const BYTES: usize = 100_000;

/// Where the number of the cell begins in a ticket, behind incarnation and edition.
const CELL_AT: usize = 16;

fn run(test: impl Future<Output = ()>) {
    bounded(patient(Duration::from_secs(60)), test);
}

impl Two {
    async fn start(kind: FabricKind) -> Self {
        Self::of(|name| over(Worker::builder(name), kind)).await
    }

    fn tensor(&self, seed: u8) -> Tensor {
        let mut buffer = self.server.pool().try_alloc(BYTES).unwrap();
        buffer.fill(seed);
        Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()
    }

    async fn fetch(&self, ticket: Ticket) -> Option<Tensor> {
        self.peer.fetch_offered(ticket, patient(LIMIT)).await.unwrap()
    }
}

fn holds(tensor: Option<&Tensor>, seed: u8) -> bool {
    tensor.is_some_and(|tensor| {
        tensor.bytes().len() == BYTES && tensor.bytes().iter().all(|byte| *byte == seed)
    })
}

const USUAL: &[FabricKind] = &[FabricKind::SHM, FabricKind::TCP];

#[test]
fn an_offer_is_read_by_its_ticket_until_it_ends() {
    for kind in kinds(USUAL) {
        run(async {
            let two = Two::start(*kind).await;
            let offer = two.server.offer(two.tensor(1));
            // It travels as bytes.
            let bytes = offer.ticket().as_bytes().to_vec();
            let ticket = Ticket::read_from_bytes(&bytes).unwrap();
            let first = two.fetch(ticket).await;
            assert!(holds(first.as_ref(), 1) && holds(two.fetch(ticket).await.as_ref(), 1));
            drop(offer);
            assert!(two.fetch(ticket).await.is_none());
            // The next one takes the same cell, and another ticket.
            let other = two.server.offer(two.tensor(2));
            assert!(other.ticket().as_bytes()[CELL_AT..] == bytes[CELL_AT..] && other.ticket() != ticket);
            assert!(two.fetch(ticket).await.is_none());
            assert!(holds(two.fetch(other.ticket()).await.as_ref(), 2));
            assert!(holds(first.as_ref(), 1), "what was read stays");
            two.end().await;
        });
    }
}

#[test]
fn offers_of_one_after_the_other_are_views_without_a_message() {
    run(async {
        let two = Two::start(FabricKind::SHM).await;
        let (mut before, mut in_sequence) = (two.messages(), 0);
        // The first ones are asked for: the client gets the memory that they lie in.
        for number in 0..10_000 {
            let offer = two.server.offer(two.tensor(number as u8));
            let tensor = two.fetch(offer.ticket()).await;
            assert!(holds(tensor.as_ref(), number as u8) && tensor.unwrap().buf().is_foreign());
            let now = two.messages();
            in_sequence = if now == before { in_sequence + 1 } else { 0 };
            before = now;
            if in_sequence == 100 {
                assert!(
                    two.server.pool().stats().used_bytes <= 2 * BYTES as u64,
                    "ended offers hold no memory"
                );
                return two.end().await;
            }
            tokio::task::yield_now().await;
        }
        panic!("there are messages for every offer");
    });
}

#[test]
fn an_offer_that_ends_holds_its_memory_while_it_is_viewed() {
    run(async {
        let two = Two::start(FabricKind::SHM).await;
        let offers = [two.server.offer(two.tensor(1)), two.server.offer(two.tensor(2))];
        let views = [two.fetch(offers[0].ticket()).await, two.fetch(offers[1].ticket()).await];
        drop(offers);
        let used = two.server.pool().stats().used_bytes;
        assert!(used >= 2 * BYTES as u64 && holds(views[0].as_ref(), 1) && holds(views[1].as_ref(), 2));
        drop(views);
        while two.server.pool().stats().used_bytes > 0 {
            tokio::task::yield_now().await;
        }
        two.end().await;
    });
}

#[test]
fn offers_are_not_listed_and_have_no_names() {
    run(async {
        let two = Two::start(FabricKind::TCP).await;
        let offers = [1, 2, 3].map(|seed| two.server.offer(two.tensor(seed)));
        two.server.publish("offer", two.tensor(4)).unwrap();
        let listed = two.peer.list().await.unwrap();
        assert_eq!(listed.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["offer"]);
        assert!(holds(two.fetch(offers[0].ticket()).await.as_ref(), 1));
        assert!(holds(Some(&two.peer.fetch("offer").await.unwrap()), 4));
        two.end().await;
    });
}

/// More than the catalogue has room for.
#[test]
fn any_number_of_offers_exist_at_a_time() {
    for kind in kinds(USUAL) {
        run(async {
            let two = Two::start(*kind).await;
            let small = |number: u32| {
                let tensor = Tensor::from_values(two.server.pool(), &[1], &[number]).unwrap();
                two.server.offer(tensor)
            };
            for _ in 0..2 {
                let offers: Vec<_> = (0..600).map(small).collect();
                for (number, offer) in (0..600_u32).zip(&offers) {
                    let fetched = two.fetch(offer.ticket()).await.unwrap();
                    assert_eq!(fetched.values::<u32>().unwrap(), [number]);
                }
            }
            two.end().await;
        });
    }
}

/// A peer may have any ticket: it gets an offer whose numbers it has guessed, and nothing else.
#[test]
fn s5_a_ticket_with_other_numbers_gives_nothing() {
    for kind in kinds(USUAL) {
        run(async {
            let two = Two::start(*kind).await;
            let offer = two.server.offer(two.tensor(1));
            let honest = offer.ticket();
            for _ in 0..2 {
                // Incarnation, edition and cell.
                for (at, length) in [(0, 8), (8, 8), (CELL_AT, 4)] {
                    for lie in [0, 1, 2, 5, 255, 256, 4095, 4096, u64::MAX - 4095, u64::MAX] {
                        let mut bytes = honest.as_bytes().to_vec();
                        bytes[at..at + length].copy_from_slice(&lie.to_le_bytes()[..length]);
                        let ticket = Ticket::read_from_bytes(&bytes).unwrap();
                        assert_eq!(two.fetch(ticket).await.is_some(), ticket == honest, "{at}: {lie}");
                    }
                }
                assert!(holds(two.fetch(honest).await.as_ref(), 1));
            }
            // Nor does the worker itself.
            let own = two.server.peer(two.server.name()).unwrap();
            drop(offer);
            assert!(own.fetch_offered(honest, LIMIT).await.unwrap().is_none());
            two.end().await;
        });
    }
}

over_verbs! { an_offer_is_read_by_its_ticket_until_it_ends }
