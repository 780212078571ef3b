//! A rank: it joins the group, trains, and continues if other ranks are lost.

use std::{collections::BTreeSet, time::Duration};

use tensorwire::{
    FabricKind, Tensor, Worker,
    collective::{Group, GroupBuilder, GroupError, launch::Launch},
};
use tensorwire_examples::{
    command_line::DataParallel as Flags,
    report::{Progress, Trained, warn},
};
use tokio::time::Instant;

use crate::{Failure, step::Trainee};

/// Trains until all steps are done. Rank 0 of the last group prints the result.
pub(crate) async fn run(flags: &Flags, launch: Launch) -> Result<(), Failure> {
    let mut builder = launch.worker(&format!("rank_{}", launch.rank));
    let named = [FabricKind::SHM, FabricKind::TCP, FabricKind::VERBS];
    if let Some(kind) = named.into_iter().find(|kind| kind.name() == flags.fabric) {
        builder = builder.require(kind);
    }
    let worker = builder.start().await?;
    let group = join(&worker, launch, Duration::from_secs(flags.patience)).await?;
    let (rank, trained) = train(flags, group).await?;
    worker.shutdown().await;
    if rank == 0 {
        trained.print_summary(&flags.plan(), flags.json)?;
    }
    Ok(())
}

async fn join(worker: &Worker, launch: Launch, limit: Duration) -> Result<Group, Failure> {
    let store = launch.open_store(limit, worker).await?;
    let group = Group::builder(store, launch.rank, launch.size).name("data_parallel").timeout(limit);
    let group = launch.job.into_iter().fold(group, GroupBuilder::job);
    Ok(group.join(worker).await?)
}

/// Returns this rank's last number, and the training result.
async fn train(flags: &Flags, mut group: Group) -> Result<(usize, Trained), Failure> {
    let plan = flags.plan();
    let mut trainee = Trainee::new(&plan)?;
    let shown = |group: &Group| Progress::new("training", flags.steps, group.rank() == 0 && !flags.json);
    let (mut progress, mut step, mut seconds, began) = (shown(&group), 0, 0.0, Instant::now());
    let (moved, transport) = loop {
        let error = if step == plan.steps {
            match finish(&group).await {
                Ok(traffic) => break traffic,
                Err(error) => error,
            }
        } else {
            let ended;
            (trainee, ended) = trainee.step(&group, &plan, step).await?;
            match ended {
                Ok(loss) => {
                    step += 1;
                    progress.show(step, loss);
                    seconds = began.elapsed().as_secs_f64();
                    continue;
                }
                Err(error) => error,
            }
        };
        (group, step) = go_on(group, error, step, &mut trainee.parameters).await?;
        progress = shown(&group);
        progress.print(&format!("going on     with {} ranks after {step} steps", group.size()));
    };
    progress.finish();
    Ok((
        group.rank(),
        Trained { parameters: trainee.parameters, steps: plan.steps, seconds, moved, transport },
    ))
}

/// Shrinks the group. Returns it with the step at which training continues. If no rank is lost, the error ends the
/// training.
async fn go_on(
    mut group: Group,
    mut error: GroupError,
    step: u64,
    parameters: &mut Vec<Vec<f32>>,
) -> Result<(Group, u64), Failure> {
    loop {
        warn(format_args!("rank {} of {}, after {step} steps: {error}", group.rank(), group.size()));
        let smaller = group.shrink().await?;
        if smaller.size() == group.size() {
            return Err(error.into());
        }
        group = smaller;
        match newest(&group, step, parameters).await {
            Ok((step, newest)) => {
                *parameters = newest;
                return Ok((group, step));
            }
            Err(another) => error = another,
        }
    }
}

/// The furthest step of any rank, with its parameters: some ranks may have completed a step that failed on others.
async fn newest(
    group: &Group,
    step: u64,
    parameters: &[Vec<f32>],
) -> Result<(u64, Vec<Vec<f32>>), GroupError> {
    let pool = group.worker().pool();
    let mut steps = vec![0; group.size()];
    steps[group.rank()] = step;
    group.all_reduce(&mut steps).await?;
    let (root, furthest) = steps.into_iter().enumerate().max_by_key(|(_, step)| *step).unwrap_or((0, step));
    let mut newest = Vec::new();
    for values in parameters {
        let own = (group.rank() == root).then(|| Tensor::from_values(pool, &[values.len() as u64], values));
        newest.push(group.broadcast(root, own.transpose()?).await?.values()?);
    }
    Ok((furthest, newest))
}

/// Ends the group. Returns how many bytes all ranks have sent and received by the fabrics' counters, and the transports.
async fn finish(group: &Group) -> Result<(u64, String), GroupError> {
    let peers = group.worker().peers();
    let mut moved =
        [peers.iter().map(|peer| peer.fabric.bytes_sent + peer.fabric.bytes_received).sum::<u64>()];
    group.all_reduce(&mut moved).await?;
    group.clone().close().await?;
    let transports: BTreeSet<_> = peers.iter().filter_map(|peer| peer.transport).collect();
    let transports: Vec<String> = transports.iter().map(ToString::to_string).collect();
    Ok((moved[0], if transports.is_empty() { "none".to_owned() } else { transports.join(" and ") }))
}
