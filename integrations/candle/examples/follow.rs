//! A trainer fits a line, and a service follows its weights while it answers: `cargo run --release --example follow`. Both are in one
//! process here; the service knows the trainer by its address only.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module as _, Optimizer as _, SGD, VarBuilder, VarMap, linear, loss::mse};
use tensorwire::{Worker, sets::Policy};
use tensorwire_candle::{Error, Variables, named_tensors};

const STEPS: u64 = 200;

fn model(map: &VarMap) -> Result<Linear, Error> {
    Ok(linear(1, 1, VarBuilder::from_varmap(map, DType::F32, &Device::Cpu))?)
}

async fn train(worker: Worker) -> Result<(), Error> {
    let (map, set) = (VarMap::new(), worker.set("line"));
    let model = model(&map)?;
    let mut optimiser = SGD::new(map.all_vars(), 0.1)?;
    let inputs = Tensor::arange(0f32, 1.0, &Device::Cpu)?.reshape(((), 1))?;
    let inputs = Tensor::cat(&[&inputs, &inputs.affine(1.0, 1.0)?], 0)?;
    let outputs = inputs.affine(2.0, 1.0)?; // y = 2 x + 1
    for step in 1..=STEPS {
        optimiser.backward_step(&mse(&model.forward(&inputs)?, &outputs)?)?;
        set.commit(step, named_tensors(worker.pool(), &map)?).await?;
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

    let map = VarMap::new();
    let model = model(&map)?;
    let mut variables = Variables::new(map);
    let mut versions = peer.set("line").follow(Policy::Latest);
    while let Some(staged) = versions.next().await {
        let staged = staged?;
        let moved = staged.bytes_moved();
        variables.apply(&staged.apply())?;
        let question = Tensor::new(&[[3f32]], &Device::Cpu)?;
        let answer: f32 = model.forward(&question)?.to_vec2()?[0][0];
        let version = variables.version().unwrap_or_default();
        println!("version {version} ({moved} bytes): 2 · 3 + 1 is about {answer:.3}");
        if version == STEPS {
            break;
        }
    }
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}
