//! What attackers do, each in a process of its own.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, future::join_all, stream};
use tensorwire_fabric::{Runtime, timeout};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
};

use crate::{
    harness::{parents_lines, say},
    stage::raise_descriptor_limit,
};

/// Connections that are being opened at once.
const AT_ONCE: usize = 64;

/// How long one may take: the kernel's queue may be full.
const DIAL_LIMIT: Duration = Duration::from_secs(20);

/// Between two bytes of one who is slow on purpose.
const SLOWNESS: Duration = Duration::from_millis(100);

fn port(word: &str) -> SocketAddr {
    SocketAddrV4::new(Ipv4Addr::LOCALHOST, word.parse().unwrap()).into()
}

async fn dial(address: SocketAddr, runtime: &dyn Runtime) -> Option<TcpStream> {
    timeout(runtime, DIAL_LIMIT, TcpStream::connect(address)).await.ok()?.ok()
}

/// Opens so many connections and sends nothing on them, or the beginning of a hello. Whether they are closed is ignored.
pub(crate) async fn half_open(words: &[String], runtime: Arc<dyn Runtime>) {
    raise_descriptor_limit();
    let (address, count) = (port(&words[1]), words[2].parse::<usize>().unwrap());
    let said = if words[3] == "data" { HALF_A_HELLO } else { &[] };
    let dials = stream::iter(0..count).map(|_| async {
        let mut stream = dial(address, &*runtime).await?;
        let _may_be_cut = stream.write_all(said).await;
        Some(stream)
    });
    let dials = dials.buffer_unordered(AT_ONCE);
    let mut open = Vec::new();
    let mut dials = std::pin::pin!(dials);
    while let Some(dialled) = dials.next().await {
        open.extend(dialled);
        if open.len() == count.min(200) {
            say("flooding");
        }
    }
    say(&format!("open {}", open.len()));
    parents_lines().recv().await;
}

/// The first bytes that the dialler of a data connection sends.
pub(crate) const HALF_A_HELLO: &[u8] = b"twtcp-h\n\x01\0 and so";

/// What an HTTP/2 client sends first: the preface and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A call that opens a session, as HTTP/2 headers of stream 1.
fn attach() -> Vec<u8> {
    let path = b"/tensorwire.control.v1.Control/Attach";
    let mut block = vec![0x83, 0x86, 0x04, path.len() as u8];
    block.extend(path);
    block.extend(b"\x01\x01h\x0f\x10\x10application/grpc\x00\x02te\x08trailers");
    [&[0, 0, block.len() as u8, 1, 4, 0, 0, 0, 1][..], &block].concat()
}

/// All that a client sends until its session is open.
pub(crate) fn opening() -> Vec<u8> {
    [PREFACE, &attach()].concat()
}

/// What is sent at once, and what comes byte by byte, at each stage of a connection's life.
fn stage(name: &str) -> (Vec<u8>, Vec<Vec<u8>>) {
    let one_by_one = |bytes: &[u8]| bytes.iter().map(|&byte| vec![byte]).collect();
    match name {
        "preface" => (Vec::new(), one_by_one(&[PREFACE, &[0; 200]].concat())),
        "attach" => (PREFACE.to_vec(), one_by_one(&[attach(), vec![0; 200]].concat())),
        "hello" => {
            let message = [&[0, 0, 0, 4, 0, 0x0a][..], &[0xFA, 7], &[0; 1000]].concat();
            let frames = message.iter().map(|&byte| vec![0, 0, 1, 0, 0, 0, 0, 0, 1, byte]).collect();
            (opening(), frames)
        }
        "data" => (Vec::new(), one_by_one(&[&b"twtcp-h\n\x01\0"[..], &[0; 39]].concat())),
        other => panic!("unknown stage {other}"),
    }
}

/// Sends until the peer closes the connection. True if it did so before all was sent.
async fn trickle(address: SocketAddr, stage_name: &str, runtime: &dyn Runtime) -> bool {
    let Some(mut stream) = dial(address, runtime).await else { return false };
    let (first, rest) = stage(stage_name);
    if stream.write_all(&first).await.is_err() {
        return true;
    }
    let mut heard = [0; 256];
    for part in rest {
        if stream.write_all(&part).await.is_err() {
            return true;
        }
        match timeout(runtime, SLOWNESS, stream.read(&mut heard)).await {
            Ok(Ok(0) | Err(_)) => return true,
            Ok(Ok(_)) => runtime.sleep(SLOWNESS).await,
            Err(_) => {}
        }
    }
    false
}

/// So many connections that send a byte now and then.
pub(crate) async fn loris(words: &[String], runtime: Arc<dyn Runtime>) {
    raise_descriptor_limit();
    let (address, count) = (port(&words[1]), words[3].parse::<usize>().unwrap());
    say("flooding");
    let ends = join_all((0..count).map(|_| trickle(address, &words[2], &*runtime))).await;
    say(&format!("cut {}", ends.into_iter().filter(|cut| *cut).count()));
    parents_lines().recv().await;
}

/// Meaningless bytes, until the peer closes the connection.
pub(crate) async fn garbage(port_word: &str, runtime: &dyn Runtime) {
    let Some(mut stream) = dial(port(port_word), runtime).await else { return };
    let _may_be_cut = stream.write_all(&[0xA5; 4096]).await;
    let _ended = timeout(runtime, DIAL_LIMIT, stream.read(&mut [0; 256])).await;
}

/// One connection of an attack that goes on until it is cut, or `is_on` no longer.
pub(crate) async fn until_off(
    port_word: &str,
    stage_name: &str,
    mut is_on: watch::Receiver<bool>,
    runtime: &dyn Runtime,
) {
    let attack = async {
        if stage_name == "silent" {
            let Some(mut stream) = dial(port(port_word), runtime).await else { return };
            let _ended = stream.read(&mut [0; 1]).await;
        } else {
            trickle(port(port_word), stage_name, runtime).await;
        }
    };
    let off = is_on.wait_for(|on| !*on);
    let _either = futures::future::select(std::pin::pin!(attack), std::pin::pin!(off)).await;
}
