//! A process that views tensors and never lets go of them.

use std::time::Duration;

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Sharing, Tensor, Worker};

use crate::{
    harness::{Other, bounded, parents_lines, role, say, step},
    stage::{HONEST, SERVER, builder, until},
};

const BYTES: usize = 256 << 10;

/// What the owner has for all it publishes, and what of it one process may view.
const SOURCE_BYTES: u64 = 8 << 20;
const VIEWED_BYTES_MAX: u64 = SOURCE_BYTES / 4;

/// More than the owner's memory holds.
const EDITIONS: u8 = 100;

/// Too long for a catalogue, so that each view of it is lent.
fn lent() -> String {
    "x".repeat(113)
}

/// Found in the catalogue, and viewed without the owner's doing.
const FOUND: &str = "x";

fn publish(owner: &Worker, name: &str, edition: u8) {
    let mut buffer = owner.pool().try_alloc(BYTES).unwrap();
    buffer.fill(edition);
    owner.publish(name, Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
}

async fn fetch(worker: &Worker, (address, name): (&str, &str), sharing: Sharing, edition: u8) -> Tensor {
    let peer = worker.peer_at(address).await.unwrap();
    let fetched = step("a fetch", async { peer.fetch(name).sharing(sharing).await }).await.unwrap();
    assert!(fetched.bytes().iter().all(|&byte| byte == edition));
    fetched
}

async fn hoard(words: Vec<String>, name: &str) {
    let hoarder = builder("/job:hoarder/replica:0/task:0", FabricKind::SHM).start().await.unwrap();
    let (mut told, mut hoard) = (parents_lines(), Vec::new());
    say("up");
    while let Some(edition) = told.recv().await {
        let whole = (words[1].as_str(), name);
        // Makes the pages resident: what is not is lent.
        drop(fetch(&hoarder, whole, Sharing::Copy, edition.parse().unwrap()).await);
        hoard.push(fetch(&hoarder, whole, Sharing::View, edition.parse().unwrap()).await);
        say("held");
    }
}

#[test]
fn s4_views_that_are_never_let_go_pin_a_part_of_the_owners_memory_and_then_come_as_copies() {
    hoarded(
        "hoarding::s4_views_that_are_never_let_go_pin_a_part_of_the_owners_memory_and_then_come_as_copies",
        &lent(),
        VIEWED_BYTES_MAX,
    );
}

#[test]
fn s4_views_out_of_the_catalogue_count_with_those_that_are_lent() {
    let most_lent = VIEWED_BYTES_MAX / 2;
    hoarded("hoarding::s4_views_out_of_the_catalogue_count_with_those_that_are_lent", FOUND, most_lent);
}

/// Hoards views of `name`, of which the owner lends at most so many bytes, and all of them if it lends each.
fn hoarded(test: &'static str, name: &str, most_lent: u64) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| hoard(words, name));
    }
    let _turn = crate::stage::alone();
    bounded(Duration::from_secs(90), |_| async {
        let owner = builder(SERVER, FabricKind::SHM)
            .memory(|memory| memory.source_bytes = SOURCE_BYTES)
            .start()
            .await
            .unwrap();
        let address = owner.address().to_owned();
        let mut hoarder = Other::start(test, &format!("hoard {address}"));
        assert_eq!(hoarder.hear().await, "up");
        let honest = builder(HONEST, FabricKind::SHM).start().await.unwrap();
        for edition in 1..=EDITIONS {
            publish(&owner, name, edition);
            hoarder.tell(&edition.to_string());
            assert_eq!(hoarder.hear().await, "held");
            drop(fetch(&honest, (&address, name), Sharing::Copy, edition).await);
            drop(fetch(&honest, (&address, name), Sharing::View, edition).await);
        }
        let peer = owner.peers().into_iter().find(|peer| peer.name.contains("hoarder")).unwrap();
        let (lent, used) = (peer.counters.loan_bytes_sent, owner.pool().stats().used_bytes);
        assert!(lent <= most_lent && (name == FOUND || lent == VIEWED_BYTES_MAX), "{lent} bytes are lent");
        assert!(used >= VIEWED_BYTES_MAX, "{used} bytes are viewed");
        assert!(owner.pool().stats().used_bytes <= VIEWED_BYTES_MAX + 4 * BYTES as u64);
        // With its process, what it held is the owner's again.
        hoarder.kill();
        until("the memory's return", || owner.pool().stats().used_bytes <= 2 * BYTES as u64).await;
        assert_eq!(owner.pool().stats().leaked_bytes, 0);
        honest.shutdown().await;
        owner.shutdown().await;
    });
}
