//! Training goes on when a rank is killed. Each rank is a process: this test binary again, with a rank's variables.

use std::{
    error::Error,
    fmt::Write as _,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use burn::{
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams},
    store::ModuleSnapshot as _,
    tensor::{Device, Tensor},
};
use tensorwire::{
    FabricKind,
    collective::{Group, GroupError, launch::Launch},
};
use tensorwire_burn::{Error as BurnError, Replicas};

type Failure = Box<dyn Error + Send + Sync>;

/// The fabric of a rank's process.
const FABRIC: &str = "TENSORWIRE_BURN_TEST_FABRIC";
/// The limit of a call of the group.
const LIMIT: Duration = Duration::from_secs(5);
/// How long the test waits for a line of a rank.
const PATIENCE: Duration = Duration::from_secs(60);
/// The steps after the loss.
const MORE: u64 = 20;

/// A rank that prints `@@ step N`, `@@ lost ERROR`, `@@ left N` and at last `@@ weights BYTES`.
#[tokio::main]
async fn rank(launch: &Launch, fabric: FabricKind) -> Result<(), Failure> {
    let worker = launch.worker(&format!("rank_{}", launch.rank)).require(fabric).start().await?;
    let store = launch.open_store(PATIENCE, &worker).await?;
    let group = Group::builder(store, launch.rank, launch.size).timeout(LIMIT).join(&worker).await?;
    let device = Device::flex().autodiff();
    let mut model: Linear = LinearConfig::new(4, 2).init(&device);
    let mut optimiser = AdamConfig::new().init();
    let inputs = Tensor::<2>::ones([2, 4], &device).mul_scalar(1 + launch.rank as u32);
    let (mut replicas, mut step) = Replicas::align(&group, 0, &mut model, &mut optimiser).await?;
    let mut end = u64::MAX;
    while step < end {
        let loss = model.forward(inputs.clone()).sub_scalar(step as f32 / 100.0).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        match replicas.average(&model, gradients).await {
            Ok(gradients) => {
                model = optimiser.step(0.001, model, gradients);
                step += 1;
                println!("@@ step {step}");
            }
            Err(BurnError::Group(error @ (GroupError::RankLost { .. } | GroupError::Over { .. }))) => {
                println!("@@ lost {error}");
                let group = replicas.group().shrink().await?;
                (replicas, step) = Replicas::align(&group, step, &mut model, &mut optimiser).await?;
                println!("@@ left {}", group.size());
                end = step + MORE;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let mut text = String::new();
    for tensor in model.collect(None, None, false) {
        write!(text, "{:?}", &tensor.into_bytes().map_err(|error| error.to_string())?[..])?;
    }
    println!("@@ weights {text}");
    replicas.group().clone().close().await?;
    worker.shutdown().await;
    Ok(())
}

/// A rank's process, killed when dropped.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(test: &str, fabric: FabricKind, rank: usize, store: &Path) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([test, "--exact", "--nocapture"]).env(FABRIC, fabric.name());
        command.env("TENSORWIRE_RANK", rank.to_string()).env("TENSORWIRE_SIZE", "3");
        command.env("TENSORWIRE_STORE", format!("file://{}", store.display()));
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let from = BufReader::new(child.stdout.take().ok_or("no output")?);
        let (found, lines) = channel();
        thread::spawn(move || {
            for line in from.lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once("@@ ") {
                    let _ = found.send(said.to_owned());
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// What follows `what` in the next line that begins with it.
    fn hear(&self, what: &str) -> Result<String, Failure> {
        loop {
            let line = self.lines.recv_timeout(PATIENCE)?;
            if let Some(rest) = line.strip_prefix(what) {
                return Ok(rest.trim().to_owned());
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn two_go_on(test: &str, fabric: FabricKind) -> Result<(), Failure> {
    if std::env::var(FABRIC).is_ok_and(|own| own == fabric.name()) {
        return rank(&Launch::from_env()?, fabric);
    }
    let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}_{}", std::process::id()));
    std::fs::create_dir_all(&store)?;
    let start = |rank| Process::start(test, fabric, rank, &store);
    let mut ranks = (0..3).map(start).collect::<Result<Vec<_>, Failure>>()?;
    let mut killed = ranks.pop().ok_or("there are three")?;
    killed.hear("step 5")?;
    killed.child.kill()?; // SIGKILL
    killed.child.wait()?;
    let killed_at = std::time::Instant::now();
    for rank in &ranks {
        let error = rank.hear("lost")?;
        assert!(killed_at.elapsed() < LIMIT, "{error}, {:?} after the loss", killed_at.elapsed());
    }
    let mut weights = Vec::new();
    for rank in &mut ranks {
        assert_eq!(rank.hear("left")?, "2");
        weights.push(rank.hear("weights")?);
        assert!(rank.child.wait()?.success());
    }
    assert_eq!(weights[0], weights[1]);
    std::fs::remove_dir_all(&store)?;
    Ok(())
}

#[test]
fn two_ranks_go_on_without_the_third_over_shm() -> Result<(), Failure> {
    two_go_on("two_ranks_go_on_without_the_third_over_shm", FabricKind::SHM)
}

#[test]
fn two_ranks_go_on_without_the_third_over_tcp() -> Result<(), Failure> {
    two_go_on("two_ranks_go_on_without_the_third_over_tcp", FabricKind::TCP)
}
