//! Processes train one network together: `cargo run --release --example data_parallel -- 3` starts itself once for each of 3 ranks. Kill
//! one while they train, and the others go on. torchrun or srun can start the ranks, too.

use std::{process::Command, time::Duration};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Tensor, activation::tanh},
};
use tensorwire::collective::{
    Group, Reduction,
    launch::{Launch, LaunchError},
};
use tensorwire_burn::{Error, Replicas};

type Failure = Box<dyn std::error::Error>;

const STEPS: u64 = 2000;
const SAMPLES: usize = 120;

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self { hidden: LinearConfig::new(1, 32).init(device), output: LinearConfig::new(32, 1).init(device) }
    }

    /// The mean square error of sin(x) over the samples of this rank.
    fn loss(&self, rank: usize, size: usize, device: &Device) -> Tensor<1> {
        let own = (rank..SAMPLES).step_by(size).map(|sample| sample as f32 / 20.0 - 3.0);
        let own: Vec<f32> = own.collect();
        let inputs = Tensor::<1>::from_floats(own.as_slice(), device).unsqueeze_dim::<2>(1);
        let outputs = self.output.forward(tanh(self.hidden.forward(inputs.clone())));
        // Ranks with more samples count more in the mean over all.
        let share = own.len() as f32 * size as f32 / SAMPLES as f32;
        (outputs - inputs.sin()).powi_scalar(2).mean().mul_scalar(share)
    }
}

fn main() -> Result<(), Failure> {
    match Launch::from_env() {
        Ok(launch) => rank(&launch),
        Err(LaunchError::NotFound) => start(std::env::args().nth(1).map_or(Ok(2), |ranks| ranks.parse())?),
        Err(error) => Err(error.into()),
    }
}

/// Starts this program as each rank.
fn start(ranks: usize) -> Result<(), Failure> {
    let store = std::env::temp_dir().join(format!("data_parallel_{}", std::process::id()));
    std::fs::create_dir_all(&store)?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("TENSORWIRE_RANK", rank.to_string()).env("TENSORWIRE_SIZE", ranks.to_string());
        let child = command.env("TENSORWIRE_STORE", format!("file://{}", store.display())).spawn()?;
        println!("rank {rank} is process {}", child.id());
        children.push(child);
    }
    for (rank, mut child) in children.into_iter().enumerate() {
        println!("rank {rank} has ended: {}", child.wait()?);
    }
    Ok(std::fs::remove_dir_all(store)?)
}

#[tokio::main]
async fn rank(launch: &Launch) -> Result<(), Failure> {
    let worker = launch.worker(&format!("rank_{}", launch.rank)).start().await?;
    let store = launch.open_store(Duration::from_secs(30), &worker).await?;
    let group = Group::builder(store, launch.rank, launch.size).name("trainers").join(&worker).await?;

    let device = Device::flex().autodiff();
    let (mut net, mut optimiser) = (Net::new(&device), AdamConfig::new().init());
    let (mut replicas, mut step) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
    while step < STEPS {
        let (rank, size) = (replicas.group().rank(), replicas.group().size());
        let loss = net.loss(rank, size, &device);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        match replicas.average(&net, gradients).await {
            Ok(gradients) => {
                net = optimiser.step(0.003, net, gradients);
                step += 1;
            }
            Err(Error::Group(error)) => {
                println!("rank {rank}, after {step} steps: {error}");
                let group = replicas.group().shrink().await?;
                (replicas, step) = Replicas::align(&group, step, &mut net, &mut optimiser).await?;
            }
            Err(error) => return Err(error.into()),
        }
        if step.is_multiple_of(200) && step > 0 {
            let mut mean = [loss.into_scalar::<f32>()];
            // If a rank is lost here, the next step shows it.
            let shown = replicas.group().all_reduce(&mut mean).reduction(Reduction::Mean).await;
            if shown.is_ok() && rank == 0 {
                println!("step {step} of {STEPS}, {size} ranks: loss {:.6}", mean[0]);
            }
        }
    }
    replicas.group().clone().close().await?;
    worker.shutdown().await;
    Ok(())
}
