//! A camera films a ball that falls. An archive stores every frame, and the camera waits for it; a screen that is slower than both shows
//! the newest frame whenever it is ready for one.
//!
//! `cargo run --release --example frames`
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)] // it runs on tokio's runtime

use std::{error::Error, time::Duration};

use tensorwire::{Peer, Tensor, Worker, subscriptions::Policy};
use tokio::time::sleep;

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
    let stored = tokio::spawn(store(archive.peer_at(camera.address()).await?));
    let shown = tokio::spawn(show(screen.peer_at(camera.address()).await?));
    film(&camera).await?;
    println!("the archive has stored {} of {FRAMES} frames", stored.await??);
    let (frames, left_out) = shown.await??;
    println!("the screen has shown {frames} frames and left out {left_out}");
    for worker in [archive, screen, camera] {
        worker.shutdown().await;
    }
    Ok(())
}

/// Publishes the frames, each when the archive has taken the one before.
async fn film(camera: &Worker) -> Result<(), Failure> {
    for number in 1..=FRAMES {
        let mut frame = camera.pool().alloc(ROWS * COLUMNS).await?;
        frame.fill(0);
        // The ball is one row of light.
        let row = (number * number) as usize * ROWS / (FRAMES * FRAMES + 1) as usize;
        frame[row * COLUMNS..][..COLUMNS].fill(255);
        let frame = Tensor::new(frame, tensorwire::DataType::U8, &[ROWS as u64, COLUMNS as u64])?;
        camera.publish_in_turn("frame", frame).await?;
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// The row of the ball.
fn row(frame: &Tensor) -> Option<usize> {
    frame.bytes().chunks(COLUMNS).position(|row| row.contains(&255))
}

/// Takes every frame until the last one. Returns how many.
async fn store(camera: Peer) -> Result<u64, Failure> {
    let mut frames = camera.subscribe("frame").policy(Policy::Every);
    let mut stored = 0;
    while let Some(frame) = frames.next().await {
        stored += 1;
        if frame?.version.is_some_and(|version| version.number() == FRAMES) {
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
        let number = frame.version.map_or(0, |version| version.number());
        println!("frame {number:2}: the ball is in row {:?}", row(&frame.tensor));
        if number == FRAMES {
            break;
        }
        sleep(REFRESH).await;
    }
    Ok((shown, left_out))
}
