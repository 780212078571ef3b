//! Two processes: one publishes a tensor, the other fetches it into its own memory.
//!
//! `cargo run --release --example quickstart` is the first process, and starts itself as the second.
#![forbid(unsafe_code)]

use std::error::Error;

use tensorwire::{Tensor, Worker};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => producer().await,
        Some(address) => consumer(&address).await,
    }
}

async fn producer() -> Result<(), Box<dyn Error>> {
    let worker = Worker::builder("producer").start().await?;
    let weights = Tensor::from_values(worker.pool(), &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    worker.publish("weights", weights)?;
    println!("producer: weights are at {}", worker.address());

    let this_program = std::env::current_exe()?;
    let ended =
        tokio::process::Command::new(this_program).arg(worker.address()).kill_on_drop(true).status().await?;
    worker.shutdown().await;
    if ended.success() { Ok(()) } else { Err(format!("the consumer failed: {ended}").into()) }
}

async fn consumer(address: &str) -> Result<(), Box<dyn Error>> {
    let worker = Worker::client().start().await?;
    let producer = worker.peer_at(address).await?;
    let weights = producer.fetch("weights").await?;
    println!("consumer: {weights:?} = {:?}", weights.values::<f32>()?);
    for peer in worker.peers() {
        if let Some(fabric) = peer.transport {
            println!("consumer: {} bytes came over {fabric} from {}", peer.fabric.bytes_received, peer.name);
        }
    }
    worker.shutdown().await;
    Ok(())
}
