//! Two processes: `prefill` computes the key-value cache of each request in blocks, and writes them into the pages of `decode` that are
//! kept for the request. The note behind them tells `decode` which request is ready. One request is cancelled midway, and another one gets
//! its blocks and its pages.
//!
//! `cargo run --release --example kv_cache` is `decode`, and starts itself as `prefill`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)] // it runs on tokio's runtime

use std::{error::Error, time::Duration};

use futures::poll;
use tensorwire::{
    Worker,
    pages::{Arena, Exposed, Pages, RemoteArena},
};
use tokio::{process::Command, time::sleep};

const PAGE_BYTES: usize = 64 << 10;

/// Pages of each request.
const LENGTH: u32 = 256;

/// The request whose client goes away.
const CANCELLED: u64 = 2;

const LAST: u64 = 3;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => decode().await,
        Some(address) => prefill(&address).await,
    }
}

/// The pages of `decode` for a request. A scheduler would choose them: here the last request gets those of the cancelled one.
fn pages_of(request: u64) -> Pages {
    Pages::strided(u32::from(request >= CANCELLED), 2, LENGTH)
}

/// What stands for the keys and values in block `number` of a request.
fn value(request: u64, number: usize) -> u8 {
    (request as usize * 100 + number) as u8
}

async fn decode() -> Result<(), Box<dyn Error>> {
    let worker = Worker::builder("decode").start().await?;
    let cache = worker.arena(2 * LENGTH, PAGE_BYTES).await?;
    let mut exposed = worker.expose("kv", &cache)?;
    let this_program = std::env::current_exe()?;
    let mut prefill = Command::new(this_program).arg(worker.address()).kill_on_drop(true).spawn()?;
    tokio::select! {
        shown = show(&worker, &cache, &mut exposed) => shown?,
        ended = prefill.wait() => return Err(format!("prefill ended too early: {}", ended?).into()),
    }
    let ended = prefill.wait().await?;
    exposed.end().await;
    worker.shutdown().await;
    if ended.success() { Ok(()) } else { Err(format!("prefill failed: {ended}").into()) }
}

/// Checks the pages of each request whose note comes.
async fn show(worker: &Worker, cache: &Arena, exposed: &mut Exposed) -> Result<(), Box<dyn Error>> {
    let mut transport = None;
    loop {
        let written = exposed.next().await;
        let pages = pages_of(written.note);
        for (number, page) in pages.numbers().iter().enumerate() {
            let value = value(written.note, number);
            if cache.page(*page)?.iter().any(|byte| *byte != value) {
                return Err(format!("page {page} is not that of request {}", written.note).into());
            }
        }
        let bytes = pages.len() * PAGE_BYTES;
        // After the last request the peer may be gone.
        transport = worker.peers().into_iter().find_map(|peer| peer.transport).or(transport);
        let transport = transport.ok_or("no connection")?;
        println!("decode: request {}: {} pages, {bytes} bytes over {transport}", written.note, pages.len());
        if written.note == LAST {
            break;
        }
    }
    Ok(())
}

async fn prefill(address: &str) -> Result<(), Box<dyn Error>> {
    let worker = Worker::client().start().await?;
    let remote = worker.peer_at(address).await?.arena("kv").await?;
    let blocks = worker.arena(LENGTH, PAGE_BYTES).await?;
    for request in 1..=LAST {
        // As a cache is after a while: its blocks are in no order.
        let free: Pages = (0..LENGTH).rev().collect();
        for (number, block) in free.numbers().iter().enumerate() {
            blocks.page_mut(*block)?.fill(value(request, number));
        }
        if request == CANCELLED {
            give_up(&remote, &blocks, &free).await?;
        } else {
            remote.write(&blocks, &free, &pages_of(request)).note(request).await?;
        }
    }
    worker.shutdown().await;
    Ok(())
}

/// Begins to write, and cancels it. Then no block is being sent, and all can be filled again.
async fn give_up(remote: &RemoteArena, blocks: &Arena, free: &Pages) -> Result<(), Box<dyn Error>> {
    let mut write = remote.write(blocks, free, &pages_of(CANCELLED)).note(CANCELLED);
    // It takes many more polls than these.
    for _ in 0..4 {
        if poll!(&mut write).is_ready() {
            return Err("the write has ended before it was cancelled".into());
        }
        sleep(Duration::from_millis(1)).await;
    }
    write.cancel().await;
    println!("prefill: request {CANCELLED} is cancelled");
    Ok(())
}
