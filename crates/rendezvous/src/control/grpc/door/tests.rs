//! Tests of the door: its reaction to the bytes of strangers, and its log lines.

#![allow(clippy::disallowed_methods)] // tests of a door run on tokio's own clock

use std::{pin::pin, time::Duration};

use tensorwire_fabric::Runtime;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::values::steps::tests::Clock;

const LIMIT: Duration = Duration::from_secs(30);

/// A reception, and connections to it.
struct Lobby {
    reception: Arc<Reception>,
    listener: TcpListener,
    clock: Clock,
}

impl Lobby {
    async fn new() -> Self {
        Self::with_limit(64).await
    }

    async fn with_limit(strangers_max: usize) -> Self {
        let clock = Clock::default();
        let runtime: Arc<dyn Runtime> = Arc::new(clock.clone());
        let reception = Reception {
            door: Door::new(strangers_max, LIMIT, runtime.clone()),
            security: Security::None,
            data: DataPort::new(),
            log: LogQuota::new(runtime),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { reception: Arc::new(reception), listener, clock }
    }

    /// One more connection, which sends `bytes`, and the door's result for it.
    async fn receive(&self, bytes: &[u8]) -> (TcpStream, Option<GuestStream>) {
        let mut client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
        client.write_all(bytes).await.unwrap();
        let newcomer = self.reception.door.accept(&self.listener).await;
        let received = tokio::time::timeout(LIMIT, self.reception.clone().receive(newcomer)).await;
        (client, received.unwrap())
    }

    /// One more connection for a session, which sends `bytes`.
    async fn hear(&self, bytes: &[u8]) -> (TcpStream, GuestStream) {
        let (client, guest) = self.receive(bytes).await;
        (client, guest.unwrap())
    }

    /// Whether lines about this host may still be logged.
    fn has_lines(&self) -> bool {
        self.reception.log.line("127.0.0.1").is_some()
    }
}

fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
    let [_, a, b, c] = u32::try_from(length).unwrap().to_be_bytes();
    [&[b'P'; 24][..], &[a, b, c, kind, flags, 0, 0, 0, 1], &vec![0; length]].concat()
}

#[tokio::test]
async fn a_connection_is_for_what_its_first_bytes_say() {
    let lobby = Lobby::new().await;
    let (client, session) = lobby.hear(b"P").await;
    let guest = session.connect_info();
    assert_eq!(guest.addresses().peer, client.local_addr().unwrap());
    assert!(guest.proven.is_none());
    // The hello of a data connection whose token was never issued.
    let hello = [&b"twtcp-h\n\x01\0"[..], &[7; 40]].concat();
    let (mut client, guest) = lobby.receive(&hello).await;
    assert!(guest.is_none());
    assert!(matches!(client.read(&mut [0; 1]).await, Ok(0) | Err(_)), "it is closed");
}

#[tokio::test]
async fn the_rest_of_a_hello_is_awaited() {
    let lobby = Lobby::new().await;
    let mut client = TcpStream::connect(lobby.listener.local_addr().unwrap()).await.unwrap();
    client.write_all(b"t").await.unwrap();
    let newcomer = lobby.reception.door.accept(&lobby.listener).await;
    let mut received = pin!(lobby.reception.clone().receive(newcomer));
    let early = tokio::time::timeout(Duration::from_millis(50), received.as_mut()).await;
    assert!(early.is_err(), "it waits for the rest");
    drop(client);
    assert!(tokio::time::timeout(LIMIT, received).await.unwrap().is_none());
}

#[tokio::test]
async fn a_session_is_evicted_as_one() {
    let lobby = Lobby::with_limit(3).await;
    let (_session, session) = lobby.hear(b"P").await;
    let mut data = Vec::new();
    for _ in 0..2 {
        let client = TcpStream::connect(lobby.listener.local_addr().unwrap()).await.unwrap();
        let newcomer = lobby.reception.door.accept(&lobby.listener).await;
        data.push((client, newcomer));
    }
    for (client, _) in &mut data {
        client.write_all(b"t").await.unwrap();
    }
    let mut guests = Vec::new();
    for (client, newcomer) in data {
        let guest = newcomer.await.unwrap();
        guest.presence.stranger().note(Visit::Data);
        guests.push((client, guest));
    }
    lobby.clock.pass(LIMIT / 2);
    let _newest = lobby.hear(b"P").await;
    let gone: Vec<_> = guests.iter().map(|(_, guest)| guest.presence.stranger().is_evicted()).collect();
    assert_eq!((gone, session.guest.stranger.is_evicted()), (vec![true, false], false));
}

#[tokio::test]
async fn a_cut_connection_carries_nothing_more() {
    let lobby = Lobby::new().await;
    let (_client, mut stream) = lobby.hear(b"P").await;
    assert!(stream.is_write_vectored());
    assert_eq!(stream.write(b"x").await.unwrap(), 1);
    // Sixty-four newer ones arrive, each after the grace period of the earlier ones.
    stream.guest.stranger.leave();
    let mut others = Vec::new();
    while !stream.guest.stranger.is_evicted() {
        others.push(lobby.hear(b"P").await);
        assert!(others.len() <= 64);
    }
    let errors = [
        stream.write(b"x").await.unwrap_err(),
        stream.write_vectored(&[io::IoSlice::new(b"x")]).await.unwrap_err(),
        stream.read_u8().await.unwrap_err(),
    ];
    assert_eq!(errors.map(|error| error.kind()), [io::ErrorKind::ConnectionAborted; 3]);
}

#[tokio::test]
async fn s4_a_stranger_that_sent_all_that_it_may_is_held_back_and_named_in_the_log() {
    for is_admitted in [true, false] {
        let lobby = Lobby::new().await;
        for _ in 0..8 {
            let (_client, mut stream) = lobby.hear(&frame(0, 0, STRANGER_BYTES)).await;
            if is_admitted {
                stream.guest.stranger.admit();
            }
            stream.read_exact(&mut vec![0; STRANGER_BYTES]).await.unwrap();
            assert!(!stream.presence.is_held_back());
            let mut more = [0; 24 + 9];
            let read = tokio::time::timeout(Duration::from_millis(50), stream.read_exact(&mut more)).await;
            assert_eq!((read.is_ok(), stream.presence.is_held_back()), (is_admitted, !is_admitted));
        }
        assert_eq!(lobby.has_lines(), is_admitted, "the lines of this host are used up, or not");
    }
}

#[tokio::test]
async fn what_was_wrong_with_a_peers_bytes_is_told() {
    let lobby = Lobby::new().await;
    for _ in 0..8 {
        assert!(lobby.reception.log.line("127.0.0.2").is_some());
        // It acknowledges a PING that was not sent.
        let (_client, mut stream) = lobby.hear(&frame(6, 1, 8)).await;
        stream.guest.stranger.attach();
        assert!(stream.read_exact(&mut [0; 41]).await.is_err());
    }
    assert!(!lobby.has_lines(), "the lines of this host are used up");
}
