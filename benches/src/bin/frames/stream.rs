//! The two sides of a stream of Tensorwire.

use std::time::Duration;

use tensorwire::{DataType, FabricKind, Sharing, Tensor, Worker, WorkerError, subscriptions};
use tensorwire_benches::{
    Failure,
    frames::{Check, Part, Policy, Reading, Writing, fill, now, sign},
};
use tokio::{sync::oneshot, task::spawn_blocking, time};

/// The name that frames are published under.
const FRAME: &str = "frame";

/// Between two looks whether the writer is still connected.
const LOOK: Duration = Duration::from_millis(10);

pub(crate) async fn run(part: Part) -> Result<(), Failure> {
    let kind = if part.way == "tcp" { FabricKind::TCP } else { FabricKind::SHM };
    if part.writes { write(part, kind).await } else { read(part, kind).await }
}

async fn write(part: Part, kind: FabricKind) -> Result<(), Failure> {
    let worker = Worker::builder("writer").require(kind).start().await?;
    let address = worker.address().to_owned();
    let mut writing = spawn_blocking(move || Writing::begin(address, part.pause)).await?;
    while let Some(number) = writing.due_frame().await {
        let mut frame = worker.pool().alloc(part.bytes).await?;
        fill(&mut frame, number);
        let frame = Tensor::new(frame, DataType::U8, &[part.bytes as u64])?;
        match part.policy {
            Policy::Every => worker.publish_in_turn(FRAME, frame).await?,
            Policy::Latest => worker.publish(FRAME, frame)?,
        };
        writing.published();
    }
    writing.report();
    // The process ends with its standard input.
    std::future::pending().await
}

async fn read(part: Part, kind: FabricKind) -> Result<(), Failure> {
    let worker = Worker::builder("reader").require(kind).start().await?;
    let writer = worker.peer_at(&part.address).await?;
    let (stop, mut stopped) = oneshot::channel();
    // Without a receiver the reader has ended.
    let mut reading = Reading::begin(move || stop.send(()).unwrap_or_default());
    let policy = match part.policy {
        Policy::Every => subscriptions::Policy::Every,
        Policy::Latest => subscriptions::Policy::Latest,
    };
    let sharing = if part.way == "view" { Sharing::View } else { Sharing::Copy };
    let mut frames = writer.subscribe(FRAME).policy(policy).ahead(part.ahead).sharing(sharing);
    let mut look = time::interval(LOOK);
    let mut was_connected = false;
    loop {
        tokio::select! {
            frame = frames.next() => match frame {
                Some(frame) => see(&mut reading, frame, part.pause).await,
                None => break sign("the stream ends"),
            },
            _ = look.tick() => {
                let is_connected = worker.peers().iter().any(|peer| peer.transport.is_some());
                if was_connected && !is_connected {
                    sign("no connection in `peers()`");
                }
                was_connected = is_connected;
            }
            _ = &mut stopped => break,
        }
    }
    reading.report();
    Ok(())
}

/// Reads a frame after the time that the reader takes for it.
async fn see(reading: &mut Reading, frame: Result<subscriptions::Update, WorkerError>, pause: Duration) {
    match frame {
        Ok(update) => {
            let at = now();
            if !pause.is_zero() {
                time::sleep(pause).await;
            }
            let mut check = Check::default();
            check.bytes(update.tensor.bytes());
            reading.saw(check.number(), at, update.dropped);
        }
        Err(error) => sign(format!("the stream: {error}")),
    }
}
