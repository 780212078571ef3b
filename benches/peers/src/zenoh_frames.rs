//! Frames by zenoh, over TCP or in shared memory: with `CongestionControl::Block` and a queue, or with `Drop` and a ring. The reader also
//! watches a liveliness token of the writer.

use std::io::Read;

use tokio::{sync::oneshot, task::spawn_blocking, time};
use zenoh::{
    Session,
    bytes::ZBytes,
    handlers::{FifoChannel, RingChannel},
    qos::CongestionControl,
    sample::{Sample, SampleKind},
    shm::{BlockOn, GarbageCollect},
};

use crate::{
    frames::{Check, Part, Policy, Reading, Writing, fill, now, sign},
    plan::Fault,
    zenoh_session::{PosixProvider, free_address, open, provider},
};

const FRAME: &str = "frame";
const ALIVE: &str = "alive";

/// Frames that wait at the writer at most, besides those that wait at the reader.
const QUEUED: usize = 4;

/// What a frame is read through.
const BLOCK: usize = 64 << 10;

pub(crate) async fn run(part: Part) -> Result<(), Fault> {
    if part.writes { write(part).await } else { read(part).await }
}

async fn write(part: Part) -> Result<(), Fault> {
    let is_shared = part.way == "shm";
    let address = free_address()?;
    let session = open(is_shared, &[("listen/endpoints", format!("[\"{address}\"]"))]).await?;
    let _alive = session.liveliness().declare_token(ALIVE).await?;
    let frames = usize::from(part.ahead) + QUEUED;
    let provider = if is_shared { Some(provider(part.bytes * frames)?) } else { None };
    let congestion = match part.policy {
        Policy::Every => CongestionControl::Block,
        Policy::Latest => CongestionControl::Drop,
    };
    let publisher = session.declare_publisher(FRAME).congestion_control(congestion).await?;
    let mut writing = spawn_blocking(move || Writing::begin(address, part.pause)).await?;
    while let Some(number) = writing.due_frame().await {
        publisher.put(frame(part.bytes, number, provider.as_ref()).await?).await?;
        writing.published();
    }
    writing.report();
    // The process ends with its standard input.
    std::future::pending().await
}

async fn frame(bytes: usize, number: u64, provider: Option<&PosixProvider>) -> Result<ZBytes, Fault> {
    if let Some(provider) = provider {
        let mut frame = provider.alloc(bytes).with_policy::<BlockOn<GarbageCollect>>().await?;
        fill(&mut frame, number);
        return Ok(frame.into());
    }
    // Without zeros, which would be written for nothing.
    let mut frame = Vec::with_capacity(bytes);
    let mut block = [0; 4096];
    fill(&mut block, number);
    while frame.len() < bytes {
        frame.extend_from_slice(&block[..block.len().min(bytes - frame.len())]);
    }
    Ok(frame.into())
}

async fn read(part: Part) -> Result<(), Fault> {
    let settings =
        [("connect/endpoints", format!("[\"{}\"]", part.address)), ("listen/endpoints", "[]".to_owned())];
    let session = open(part.way == "shm", &settings).await?;
    let ahead = usize::from(part.ahead);
    match part.policy {
        Policy::Every => {
            let frames = session.declare_subscriber(FRAME).with(FifoChannel::new(ahead)).await?;
            follow(&part, &session, async || frames.recv_async().await).await
        }
        Policy::Latest => {
            let frames = session.declare_subscriber(FRAME).with(RingChannel::new(ahead)).await?;
            follow(&part, &session, async || frames.recv_async().await).await
        }
    }
}

async fn follow(
    part: &Part,
    session: &Session,
    mut next: impl AsyncFnMut() -> Result<Sample, Fault>,
) -> Result<(), Fault> {
    let lives = session.liveliness().declare_subscriber(ALIVE).history(true).await?;
    lives.recv_async().await?;
    let (stop, mut stopped) = oneshot::channel();
    // Without a receiver the reader has ended.
    let mut reading = Reading::begin(move || stop.send(()).unwrap_or_default());
    let mut block = vec![0; BLOCK];
    loop {
        tokio::select! {
            frame = next() => match frame {
                Ok(frame) => {
                    let at = now();
                    if !part.pause.is_zero() {
                        time::sleep(part.pause).await;
                    }
                    reading.saw(number(&frame, &mut block)?, at, 0);
                }
                Err(error) => break sign(format!("the stream: {error}")),
            },
            life = lives.recv_async() => if life?.kind() == SampleKind::Delete {
                sign("the liveliness token is gone");
            },
            _ = &mut stopped => break,
        }
    }
    reading.report();
    Ok(())
}

/// Reads a frame, which may be in many pieces of any length.
fn number(frame: &Sample, block: &mut [u8]) -> Result<Option<u64>, Fault> {
    let (mut check, mut left, mut reader) =
        (Check::default(), frame.payload().len(), frame.payload().reader());
    while left > 0 {
        let length = left.min(block.len());
        let piece = &mut block[..length];
        reader.read_exact(piece)?;
        check.bytes(piece);
        left -= length;
    }
    Ok(check.number())
}
