//! A camera films a ball that falls. An archive stores every frame, and the camera waits for it; a screen that is slower than both shows
//! the newest frame whenever it is ready for one.
//!
//! `cargo run --release --example frames`
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)] // it runs on tokio's runtime

use std::{error::Error, time::Duration};

use tensorwire::{
    DataType, Peer, Tensor, Worker,
    subscriptions::{Policy, Update},
};
use tokio::{sync::oneshot, time::sleep};

type Failure = Box<dyn Error + Send + Sync>;

const FRAMES: u64 = 60;
const ROWS: usize = 480;
const COLUMNS: usize = 640;

/// The time that the screen takes for a frame.
const REFRESH: Duration = Duration::from_millis(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let camera = Worker::builder("camera").start().await?;
    let archive = Worker::client().start().await?;
    let screen = Worker::client().start().await?;
    camera.publish("frame", frame(&camera, 0).await?)?;
    let (ready, is_ready) = oneshot::channel();
    let stored = tokio::spawn(store(archive.peer_at(camera.address()).await?, ready));
    let shown = tokio::spawn(show(screen.peer_at(camera.address()).await?));
    is_ready.await?;
    for number in 1..=FRAMES {
        // Waits until the archive has taken the frame before.
        camera.publish_in_turn("frame", frame(&camera, number).await?).await?;
        sleep(Duration::from_millis(2)).await;
    }
    println!("the archive has stored {} of {FRAMES} frames", stored.await??);
    let (frames, left_out) = shown.await??;
    println!("the screen has shown {frames} frames and left out {left_out}");
    for worker in [archive, screen, camera] {
        worker.shutdown().await;
    }
    Ok(())
}

/// Frame `number`: the ball is one row of light.
async fn frame(camera: &Worker, number: u64) -> Result<Tensor, Failure> {
    let mut frame = camera.pool().alloc(ROWS * COLUMNS).await?;
    frame.fill(0);
    let row = (number * number) as usize * ROWS / (FRAMES * FRAMES + 1) as usize;
    frame[row * COLUMNS..][..COLUMNS].fill(255);
    Ok(Tensor::new(frame, DataType::U8, &[ROWS as u64, COLUMNS as u64])?)
}

/// The number of a frame: the blank one before the first was the first version.
fn number(frame: &Update) -> u64 {
    frame.version.map_or(0, |version| version.number() - 1)
}

/// The row of the ball.
fn row(frame: &Tensor) -> Option<usize> {
    frame.bytes().chunks(COLUMNS).position(|row| row.contains(&255))
}

/// Takes every frame until the last one. Returns how many.
async fn store(camera: Peer, ready: oneshot::Sender<()>) -> Result<u64, Failure> {
    let mut frames = camera.subscribe("frame").policy(Policy::Every);
    let (mut ready, mut stored) = (Some(ready), 0);
    while let Some(frame) = frames.next().await {
        let number = number(&frame?);
        stored += u64::from(number > 0);
        // From now on no frame is left out.
        ready.take().map(|ready| ready.send(()));
        if number == FRAMES {
            break;
        }
    }
    Ok(stored)
}

/// Shows the newest frame until the last one. Returns how many were shown, and left out.
async fn show(camera: Peer) -> Result<(u64, u64), Failure> {
    let mut frames = camera.subscribe("frame");
    let (mut shown, mut left_out) = (0, 0);
    while let Some(frame) = frames.next().await {
        let frame = frame?;
        shown += 1;
        left_out += frame.dropped;
        println!("frame {:2}: the ball is in row {:?}", number(&frame), row(&frame.tensor));
        if number(&frame) == FRAMES {
            break;
        }
        sleep(REFRESH).await;
    }
    Ok((shown, left_out))
}
