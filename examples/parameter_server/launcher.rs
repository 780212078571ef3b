//! The launcher: it starts the other processes on this machine, follows the training, and measures the result.

use std::time::Duration;

use tensorwire_examples::{
    command_line::{Flags, Job, Role},
    processes::{Children, Start, free_addresses},
    report::{Progress, Trained},
};
use tokio::time::{Instant, sleep};

use crate::{
    following::{Following, parameters},
    node::{Failure, Node, STEP},
    record::VALIDATIONS,
    worker::{LOSS, MOVED, TRANSPORT},
};

/// How often the launcher fetches the progress of the training.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Starts all processes, waits for the end of the training, and prints the result.
pub(crate) async fn run(mut flags: Flags) -> Result<(), Failure> {
    let mut addresses = free_addresses(usize::from(flags.servers + flags.workers))?;
    flags.worker_hosts = Some(addresses.split_off(flags.servers.into()).join(","));
    flags.ps_hosts = Some(addresses.join(","));
    let (node, progress) =
        (Node::start(&flags, None).await?, Progress::new("training", flags.steps, !flags.json));
    let starts = node.all(Job::Ps).chain(node.all(Job::Worker)).map(|role| start(&flags, role)).collect();
    let mut children = Children::start(starts, flags.restarts, &progress)?;
    let trained = tokio::select! {
        failure = children.keep_running() => Err(failure),
        trained = follow(&node, &flags, &progress) => trained,
    }?;
    progress.finish();
    node.worker.shutdown().await;
    children.let_go().await?;
    trained.print_summary(&node.plan, flags.json)?;
    Ok(())
}

/// The command that starts this program again as one process, with the user's flags.
fn start(flags: &Flags, role: Role) -> Start {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    arguments.extend([
        "--launched".to_owned(),
        format!("--job-name={}", role.job.name()),
        format!("--task-index={}", role.index),
        format!("--ps-hosts={}", flags.hosts(Job::Ps)),
        format!("--worker-hosts={}", flags.hosts(Job::Worker)),
    ]);
    (role.to_string(), arguments)
}

/// Shows the progress of worker 0 until the training is over, and fetches the result.
async fn follow(node: &Node, flags: &Flags, progress: &Progress) -> Result<Trained, Failure> {
    let worker_0 = Role { job: Job::Worker, index: 0 };
    let (first, _) = look(node, worker_0).await?;
    let (mut step, mut validated, began) = (first, 0, Instant::now());
    loop {
        if flags.steps_to_validate.is_some() {
            validated = print_validations(node, worker_0, validated, progress).await?;
        }
        if step >= flags.steps {
            break;
        }
        sleep(LOOK_EVERY).await;
        let loss;
        (step, loss) = look(node, worker_0).await?;
        progress.show(step, loss);
    }
    let (steps, seconds) = (flags.steps - first.min(flags.steps), began.elapsed().as_secs_f64());
    let (mut moved, mut transports) = (0, Vec::new());
    for worker in node.all(Job::Worker) {
        let fetched = node.fetch(worker, &[MOVED, TRANSPORT].map(str::to_owned)).await?;
        moved += fetched[0].values::<u64>()?.iter().sum::<u64>();
        transports.push(String::from_utf8(fetched[1].values()?)?);
    }
    transports.sort();
    transports.dedup();
    let versions =
        Following::new(node)?.until(|clocks| clocks.iter().all(|&clock| clock >= flags.steps)).await?;
    let parameters = parameters(node, &versions)?.into_iter().map(<[f32]>::to_vec).collect();
    Ok(Trained { parameters, steps, seconds, moved, transport: transports.join(" and ") })
}

/// The step that a worker has reached, and its loss.
async fn look(node: &Node, worker: Role) -> Result<(u64, f32), Failure> {
    let fetched = node.fetch(worker, &[STEP, LOSS].map(str::to_owned)).await?;
    let (step, loss) = (fetched[0].values()?.first().copied(), fetched[1].values()?.first().copied());
    Ok((step.unwrap_or(0), loss.unwrap_or(f32::NAN)))
}

/// Prints what worker 0 has measured after step `printed`. Returns the step of the last line.
async fn print_validations(
    node: &Node,
    worker_0: Role,
    printed: u64,
    progress: &Progress,
) -> Result<u64, Failure> {
    let lines = String::from_utf8(node.fetch(worker_0, &[VALIDATIONS.to_owned()]).await?[0].values()?)?;
    let mut last = printed;
    for (step, line) in lines.lines().filter_map(|line| line.split_once(' ')) {
        let step = step.parse()?;
        if step > last {
            progress.print(line);
            last = step;
        }
    }
    Ok(last)
}
