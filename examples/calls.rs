//! An embedding service and its clients, in processes of their own: tokens go to a handler, and the mean of their vectors comes back. One
//! client asks for a token that is not in the vocabulary, and one has too little patience.
//!
//! `cargo run --release --example calls` is the service, and starts itself as the clients.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)] // it runs on tokio's runtime

use std::{error::Error, sync::Arc, time::Duration};

use tensorwire::{
    Code, Status, Tensor, Worker, WorkerError,
    calls::{Call, Handling},
};
use tokio::process::Command;

type Failure = Box<dyn Error + Send + Sync>;

const TOKENS: u32 = 1000;
const WIDTH: usize = 64;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    match std::env::args().nth(1) {
        None => serve().await,
        Some(address) => ask(&address).await,
    }
}

async fn serve() -> Result<(), Failure> {
    let service = Worker::builder("embeddings").start().await?;
    let _handling = [embed(&service)?, retrain(&service)?];
    let this_program = std::env::current_exe()?;
    for _ in 0..2 {
        let client = Command::new(&this_program).arg(service.address()).kill_on_drop(true).status().await?;
        if !client.success() {
            return Err(format!("a client failed: {client}").into());
        }
    }
    service.shutdown().await;
    Ok(())
}

/// Vector number `token` of the table.
fn vector(token: u32) -> impl Iterator<Item = f32> {
    (0..WIDTH as u32).map(move |column| ((token * 31 + column * 17) % 97) as f32 / 97.0)
}

/// Answers `embed` with the mean of the tokens' vectors.
fn embed(service: &Worker) -> Result<Handling, WorkerError> {
    let pool = service.pool().clone();
    let table: Arc<Vec<f32>> = Arc::new((0..TOKENS).flat_map(vector).collect());
    service.handle("embed", move |call: Call| {
        let (pool, table) = (pool.clone(), table.clone());
        async move {
            let [tokens] = call.arguments() else {
                return Err(Status::new(Code::InvalidArgument, "give one tensor of tokens"));
            };
            let mut mean = vec![0.0f32; WIDTH];
            let tokens = tokens.as_slice::<u32>()?;
            for token in tokens {
                let at = *token as usize * WIDTH;
                let row = table.get(at..at + WIDTH).ok_or_else(|| unknown(*token))?;
                mean.iter_mut().zip(row).for_each(|(sum, value)| *sum += value / tokens.len() as f32);
            }
            Ok(Tensor::from_values(&pool, &[WIDTH as u64], &mean)?)
        }
    })
}

/// The details are for programs: the token.
fn unknown(token: u32) -> Status {
    let message = format!("token {token} is not in the vocabulary of {TOKENS}");
    Status { details: token.to_le_bytes().to_vec(), ..Status::new(Code::OutOfRange, message) }
}

/// Says when its future is dropped.
struct Training;

impl Drop for Training {
    fn drop(&mut self) {
        println!("service: nobody waits for the training, so it has stopped");
    }
}

/// Answers `retrain` after an hour.
fn retrain(service: &Worker) -> Result<Handling, WorkerError> {
    service.handle("retrain", |_| async {
        let _training = Training;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        Ok::<_, Status>(())
    })
}

async fn ask(address: &str) -> Result<(), Failure> {
    let client = Worker::client().start().await?;
    let service = client.peer_at(address).await?;
    let tokens = |tokens: &[u32]| Tensor::from_values(client.pool(), &[tokens.len() as u64], tokens);

    let answer = service.call("embed", tokens(&[1, 5, 900])?).await?;
    println!("client: {:?} begins with {:.3?}", answer[0], &answer[0].as_slice::<f32>()?[..3]);

    match service.call("embed", tokens(&[7, 1234])?).await {
        Err(WorkerError::Remote { status, .. }) if status.code == Code::OutOfRange => {
            println!("client: refused, {}; details {:?}", status.message, status.details);
        }
        other => return Err(format!("an unknown token was answered with {other:?}").into()),
    }

    match service.call("retrain", ()).timeout(Duration::from_millis(50)).await {
        Err(WorkerError::DeadlineExceeded { .. }) => println!("client: the training takes too long"),
        other => return Err(format!("the training has ended with {other:?}").into()),
    }
    client.shutdown().await;
    Ok(())
}
