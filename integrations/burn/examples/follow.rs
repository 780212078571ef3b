//! A trainer fits a line, and a service follows its weights while it answers: `cargo run --release --example follow`. Both are in one
//! process here; the service knows the trainer by its address only.

use std::time::Duration;

use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    store::ModuleSnapshot as _,
    tensor::{Device, Tensor},
};
use tensorwire::{Worker, sets::Policy};
use tensorwire_burn::{Error, SnapshotStore, named_tensors};

const STEPS: u64 = 200;

async fn train(worker: Worker) -> Result<(), Error> {
    let (device, set) = (Device::flex().autodiff(), worker.set("line"));
    let mut model: Linear = LinearConfig::new(1, 1).init(&device);
    let mut optimiser = SgdConfig::new().init();
    let inputs = Tensor::<2>::from_floats([[0.0], [1.0]], &device);
    let outputs = inputs.clone().mul_scalar(2.0).add_scalar(1.0); // y = 2 x + 1
    for step in 1..=STEPS {
        let loss = (model.forward(inputs.clone()) - outputs.clone()).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimiser.step(0.2, model, gradients);
        set.commit(step, named_tensors(worker.pool(), &model)?).await?;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let trainer = Worker::builder("trainer").start().await?;
    let service = Worker::client().start().await?;
    let peer = service.peer_at(trainer.address()).await?;
    tokio::spawn(train(trainer.clone()));

    let device = Device::flex();
    let mut model: Linear = LinearConfig::new(1, 1).init(&device);
    let mut versions = peer.set("line").follow(Policy::Latest);
    while let Some(staged) = versions.next().await {
        let staged = staged?;
        let (version, moved) = (staged.version(), staged.bytes_moved());
        model.load_from(&mut SnapshotStore::new(&staged.apply()))?;
        let question = Tensor::<2>::from_floats([[3.0]], &device);
        let answer: f32 = model.forward(question).into_scalar();
        println!("version {version} ({moved} bytes): 2 · 3 + 1 is about {answer:.3}");
        if version == STEPS {
            break;
        }
    }
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}
