//! A server that answers as Redis does, with what would harm its clients.

use std::cell::Cell;

use tensorwire_collective::store::{MemoryStore, Store, StoreError, StoreUrl};
use tensorwire_protocol::text::is_active;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::{LONG, keys, open_url, runtime};

/// More than the sockets' buffers hold.
const ENOUGH: usize = 64 << 20;

/// The error of a read to which the server answers `begin`, and then `rest` without end. Also how many bytes the server sent.
async fn answered(begin: &[u8], rest: &[u8]) -> (StoreError, usize) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: StoreUrl = format!("redis://{}", listener.local_addr().unwrap()).parse().unwrap();
    let sent = Cell::new(0);
    let serve = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            // `PING` and `MGET`, or `MGET` again on a new connection.
            while let Ok(1..) = stream.read(&mut request).await {
                if request.windows(4).any(|part| part == b"PING") {
                    request.fill(0);
                    stream.write_all(b"+PONG\r\n").await.unwrap();
                    continue;
                }
                let mut answer = begin;
                while let Ok(count @ 1..) = stream.write(answer).await {
                    sent.set(sent.get() + count);
                    answer = if rest.is_empty() || sent.get() > ENOUGH { b"" } else { rest };
                }
            }
        }
    };
    let read = async {
        let store = open_url(url, LONG).await.unwrap();
        store.get(&keys(["a", "b"])).await.unwrap_err()
    };
    tokio::select! {
        () = serve => unreachable!(),
        error = read => (error, sent.get()),
    }
}

#[tokio::test]
async fn s4_an_answer_of_redis_without_an_end_is_refused_at_a_bound() {
    let text = [b'x'; 1 << 16];
    let (numbers, nested) = (b":1\r\n".repeat(1 << 14), b"*1\r\n".repeat(1 << 14));
    let cases: [(&str, &[u8], &str); 6] = [
        ("*2000000000\r\n", &numbers, "more values than were asked for"),
        ("*2\r\n$536870912\r\n", &text, "a value longer than values are"),
        ("*2\r\n*1000000\r\n", &numbers, "no answer of Redis"),
        ("*1\r\n", &nested, "no answer of Redis"),
        ("+x", &text, "a line longer than any answer"),
        ("%1000000\r\n", &numbers, "no answer of Redis"),
    ];
    for (begin, rest, expected) in cases {
        let (error, sent) = answered(begin.as_bytes(), rest).await;
        assert!(error.to_string().contains(expected), "{begin:?}: {error}");
        // On two connections, with what the sockets hold.
        assert!(sent < 32 << 20, "{begin:?}: {sent} bytes");
    }
}

#[tokio::test]
async fn s5_what_redis_says_in_an_error_is_escaped_and_cut() {
    let said = format!("-ERR \x1b[2J\u{202e}forged\r line {}\r\n", "x".repeat(3000));
    let (error, _) = answered(said.as_bytes(), b"").await;
    let text = error.to_string();
    assert!(text.contains(r"\u{1b}[2J\u{202e}forged\r line xxx") && !text.contains(is_active), "{text}");
    assert!(text.len() < 1500, "{} bytes", text.len());
}

#[tokio::test]
async fn s5_keys_in_errors_are_escaped() {
    let store = MemoryStore::new(runtime());
    let key = "rank\n1 failed\x1b[2J";
    store.set(key, b"x").await.unwrap();
    let named = [key.to_owned(), "missing\n\u{9b}".to_owned()];
    let errors = [
        store.add(key, 1).await.unwrap_err(),
        store.wait(&named, super::SHORT).await.unwrap_err(),
        StoreError::Lost { key: key.to_owned() },
        "redis://h\n/x".parse::<StoreUrl>().unwrap_err(),
    ];
    for error in errors {
        assert!(!error.to_string().contains(is_active), "{error}");
    }
}
