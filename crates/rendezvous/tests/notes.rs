//! Notes over shm, tcp and verbs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::{FutureExt as _, future::join};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Notes, Peer, Worker, WorkerError};

use crate::{
    bounded::bounded,
    editions::{CLIENT, SERVER},
    fabrics::over,
    rdma::patient,
};

const CHANNEL: u64 = 7;
const ROUNDS: u8 = 100;

struct Two {
    server: Worker,
    client: Worker,
    /// The server, as the client knows it.
    peer: Peer,
    notes: [Notes; 2],
}

async fn two(kind: FabricKind) -> Two {
    let start = |name| over(Worker::builder(name), kind).timeout(patient(Duration::from_secs(20))).start();
    let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
    let peer = client.peer_at(server.address()).await.unwrap();
    peer.connect().await.unwrap();
    let back = server.peer(client.name()).unwrap();
    let (notes, answers) = join(peer.notes(CHANNEL, 2), back.notes(CHANNEL, 2)).await;
    Two { server, client, peer, notes: [notes.unwrap(), answers.unwrap()] }
}

/// Both sides send in both lanes, and take what the other one has sent, in order.
async fn exchange(kind: FabricKind) {
    let Two { server, client, notes: [notes, answers], .. } = two(kind).await;
    let long = vec![9; Notes::BYTES_MAX - 1];
    for round in 0..ROUNDS {
        for notes in [&notes, &answers] {
            notes.send(0, &[&[round], b" in ", b"parts"]).await.unwrap();
            notes.send(1, &[&[round], &long]).await.unwrap();
        }
        for notes in [&notes, &answers] {
            let next = async |lane| match round % 2 {
                0 => notes.recv(lane).await.unwrap(),
                _ => notes.recv_beside(lane).await.unwrap(),
            };
            assert_eq!(next(1).await[..], [&[round], long.as_slice()].concat());
            assert_eq!(next(0).await[..], *[&[round], &b" in parts"[..]].concat());
        }
    }
    let empty = notes.send(0, &[b"", b""]).await;
    assert!(matches!(empty, Err(WorkerError::Config { field: "note", .. })), "{empty:?}");
    drop((notes, answers));
    client.shutdown().await;
    server.shutdown().await;
}

fn run(kind: FabricKind) {
    bounded(patient(Duration::from_secs(60)), exchange(kind));
}

#[test]
fn notes_over_shm() {
    run(FabricKind::SHM);
}

#[test]
fn notes_over_tcp() {
    run(FabricKind::TCP);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn notes_over_verbs() {
    run(FabricKind::VERBS);
}

/// Whoever waits is polled first, so it has said that it sleeps when the other sends; and so has that one, when it is answered.
#[test]
fn a_side_that_sleeps_is_woken_for_each_note() {
    bounded(Duration::from_secs(60), async {
        let Two { server, client, notes: [notes, answers], .. } = two(FabricKind::SHM).await;
        for round in 0..ROUNDS {
            let waits = async {
                let note = answers.recv(0).await.unwrap();
                answers.send(0, &[&note]).await.unwrap();
            };
            let asks = async {
                notes.send(0, &[&[round]]).await.unwrap();
                assert_eq!(notes.recv(0).await.unwrap()[..], [round]);
            };
            join(waits, asks).await;
        }
        drop((notes, answers));
        client.shutdown().await;
        server.shutdown().await;
    });
}

/// Only a side that sleeps is woken, and `next` does not announce a sleep.
#[test]
fn a_note_that_has_come_is_taken_without_a_sleep() {
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        bounded(Duration::from_secs(60), async move {
            let Two { server, client, notes: [notes, answers], .. } = two(kind).await;
            assert!(notes.polls());
            for round in 0..ROUNDS {
                assert_eq!(answers.next(1).unwrap(), None);
                match notes.put(1, &[&[round]]) {
                    Some(put) => assert!(!put.seems_asleep()),
                    None => notes.send(1, &[&[round]]).await.unwrap(),
                }
                let note = loop {
                    if let Some(note) = answers.next(1).unwrap() {
                        break note;
                    }
                    answers.poll_once();
                    // Posts that wait for credits are sent by the drivers.
                    tokio::task::yield_now().await;
                };
                assert_eq!(note[..], [round]);
            }
            drop((notes, answers));
            client.shutdown().await;
            server.shutdown().await;
        });
    }
}

/// Each note is in the mailbox when it is looked for, so a task that takes many of them would never wait.
#[test]
fn other_tasks_get_a_turn_however_many_notes_lie_there() {
    bounded(Duration::from_secs(60), async {
        let Two { server, client, notes: [notes, answers], .. } = two(FabricKind::SHM).await;
        let mut turns = 0;
        for round in 0..1000u16 {
            let text = round.to_le_bytes();
            notes.send(0, &[&text]).await.unwrap();
            let received = match answers.recv(0).now_or_never() {
                Some(received) => received,
                None => {
                    turns += 1;
                    answers.recv(0).await
                }
            };
            assert_eq!(received.unwrap()[..], text);
            answers.send(0, &[&text]).await.unwrap();
            assert_eq!(notes.recv(0).await.unwrap()[..], text);
        }
        assert!((3..20).contains(&turns), "{turns}");
        drop((notes, answers));
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn a_channel_ends_with_its_connection() {
    bounded(Duration::from_secs(60), async {
        let Two { server, client, notes: [notes, answers], .. } = two(FabricKind::SHM).await;
        for [from, to] in [[&notes, &answers], [&answers, &notes]] {
            from.send(0, &[b"met"]).await.unwrap();
            to.recv(0).await.unwrap();
        }
        assert!(notes.put(0, &[b"put"]).is_some());
        let (waited, ()) = join(notes.recv(0), server.shutdown()).await;
        assert!(matches!(waited, Err(WorkerError::PeerLost { .. })), "{waited:?}");
        let sent = notes.send(0, &[b"late"]).await;
        assert!(matches!(sent, Err(WorkerError::PeerLost { .. })), "{sent:?}");
        assert!(notes.put(0, &[b"late"]).is_none());
        client.shutdown().await;
    });
}

#[test]
fn what_a_channel_cannot_be_is_refused_by_name() {
    bounded(Duration::from_secs(60), async {
        let Two { client, peer, notes: [notes, _answers], .. } = two(FabricKind::SHM).await;
        let itself = client.peer(client.name()).unwrap();
        let refused = [
            ("channel", peer.notes(CHANNEL, 1).await.unwrap_err()),
            ("lanes", peer.notes(8, 0).await.unwrap_err()),
            ("lanes", peer.notes(8, Notes::LANES_MAX + 1).await.unwrap_err()),
            ("peer", itself.notes(8, 1).await.unwrap_err()),
            ("note", notes.send(0, &[&[0; Notes::BYTES_MAX], &[0]]).await.unwrap_err()),
            ("note", notes.send(0, &[&[], &[]]).await.unwrap_err()),
        ];
        for (expected, error) in refused {
            assert!(matches!(error, WorkerError::Config { field, .. } if field == expected), "{error}");
        }
        drop(notes);
        assert!(peer.notes(CHANNEL, 1).await.is_ok(), "it was closed");
    });
}

/// A message has its channel's number alone, so the later opening takes it for one of its own.
#[test]
fn notes_come_in_order_after_both_sides_opened_the_channel_again_beside_a_message() {
    bounded(Duration::from_secs(60), async {
        let Two { server, client, peer, notes: [notes, answers] } = two(FabricKind::SHM).await;
        for [from, to] in [[&notes, &answers], [&answers, &notes]] {
            from.send(0, &[b"met"]).await.unwrap();
            to.recv(0).await.unwrap();
        }
        // The mailbox has room for three.
        for _ in 0..4 {
            notes.send(0, &[&[1; Notes::BYTES_MAX]]).await.unwrap();
        }
        drop(answers);
        let answers = server.peer(client.name()).unwrap().notes(CHANNEL, 2).await.unwrap();
        let earlier = answers.recv(0).now_or_never();
        drop(notes);
        let notes = peer.notes(CHANNEL, 2).await.unwrap();
        let mut received = Vec::from_iter(earlier.map(Result::unwrap));
        for round in 0..4 {
            notes.send(0, &[&[round]]).await.unwrap();
            while received.last().is_none_or(|note| note[..] != [round]) {
                received.push(answers.recv(0).await.unwrap());
            }
        }
        assert_eq!(received.iter().filter(|note| note.len() == 1).count(), 4, "{received:?}");
        drop((notes, answers));
        client.shutdown().await;
        server.shutdown().await;
    });
}
