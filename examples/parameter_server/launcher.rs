//! The process that a user starts: it starts the others, and again those that are killed, shows progress, and measures.
//! It never trains, until the end, when it trains in one process to compare.

mod cluster;

use std::{collections::BTreeMap, fmt, time::Duration};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tensorwire::{ClusterSpec, Worker};
use tensorwire_examples::training::train;

use self::cluster::Cluster;
use crate::{
    block_on,
    children::Event,
    failure::Failure,
    link::{configured, latest},
    options::{AtStep, Fault, RoleName, Settings},
    report::Report,
    server_link::unpack,
    summary::{Summary, Traffic, print_traffic},
};

/// Starts all processes, waits for the end of the training, measures, and prints the result.
pub(crate) fn run(settings: &Settings) -> Result<(), Failure> {
    let mut cluster = Cluster::start(settings)?;
    println!("starting     {} steps with seed {}", settings.steps, settings.flags.seed);
    let mut training = Training::new(settings);
    if let Err(failure) = training.watch(&mut cluster, settings.workers) {
        cluster.tell_how_children_end();
        return Err(failure);
    }
    let elapsed = training.bar.elapsed();
    training.bar.finish();
    let parameters = block_on(fetch_parameters(settings, cluster.spec()))?;
    cluster.end()?;

    let summary = Summary::beside(settings, &parameters, &train_alone(settings));
    println!("\n{summary}");
    training.print(elapsed);
    let parameter_bytes = parameters.iter().flatten().count() * size_of::<f32>();
    print_traffic(&training.traffic.values().collect::<Vec<_>>(), parameter_bytes as u64);
    Ok(())
}

/// What the launcher knows of the training.
struct Training {
    steps: u64,
    bar: ProgressBar,
    /// The first step that was reported, where the time begins.
    first: Option<u64>,
    last: Report,
    traffic: BTreeMap<usize, Traffic>,
    kills: Vec<Fault<AtStep>>,
}

impl Training {
    fn new(settings: &Settings) -> Self {
        Self {
            steps: settings.steps,
            bar: progress_bar("training", settings.steps),
            first: None,
            last: Report::default(),
            traffic: BTreeMap::new(),
            kills: settings.flags.kill.clone(),
        }
    }

    /// Shows progress until every worker has finished.
    fn watch(&mut self, cluster: &mut Cluster, workers: usize) -> Result<(), Failure> {
        while self.traffic.len() < workers {
            match cluster.next_event()? {
                (_, Event::Text(line)) => self.tell(&line),
                (role, Event::Report(report)) => self.note(cluster, role, report),
                (role, Event::Ended) => {
                    let line = cluster.start_again(role)?;
                    self.tell(&line);
                }
            }
        }
        Ok(())
    }

    fn note(&mut self, cluster: &mut Cluster, role: RoleName, report: Report) {
        if let (RoleName::Worker(index), Some(traffic)) = (role, Traffic::from_report(&report)) {
            self.traffic.insert(index, traffic);
        }
        if let Some(restored) = report.value::<u64>("restored")
            && report.value("epoch") != Some(1)
        {
            self.tell(&format!("restored     the checkpoint of step {restored}"));
        }
        let (Some(step), Some(_)) = (report.value("step"), report.value::<f32>("loss")) else { return };
        if self.first.is_none() {
            self.first = Some(step);
            self.bar.reset_elapsed();
        }
        self.show(step, report.value("loss").unwrap_or(f32::NAN));
        self.last = report;
        for fault in self.kills.extract_if(.., |fault| fault.value.0 <= step).collect::<Vec<_>>() {
            cluster.kill(fault.role);
            self.tell(&format!("killing      {} at step {step}", fault.role));
        }
    }

    /// On a terminal the bar moves. Elsewhere there is a line for the first step, and then for each tenth of all.
    fn show(&self, step: u64, loss: f32) {
        let tenth = self.steps.div_ceil(10).max(1);
        let is_new_tenth = step / tenth > self.bar.position() / tenth;
        self.bar.set_position(step);
        self.bar.set_message(format!("loss {loss:.3}"));
        if self.bar.is_hidden() && (Some(step) == self.first || is_new_tenth) {
            println!("training     {step}/{} steps, loss {loss:.3}", self.steps);
        }
    }

    /// A line that stays.
    fn tell(&self, line: &str) {
        if self.bar.is_hidden() { println!("{line}") } else { self.bar.println(line) }
    }

    fn print(&self, elapsed: Duration) {
        let (steps, seconds) = (self.steps - self.first.unwrap_or(0).min(self.steps), elapsed.as_secs_f64());
        println!("steps/s      {:.0} ({steps} steps in {seconds:.1} s)", steps as f64 / seconds.max(1e-9));
        let count = |what| self.last.value::<u64>(what).unwrap_or(0);
        println!(
            "gradients    {} dropped as late; a worker was {} steps ahead at most",
            count("late"),
            count("ahead")
        );
    }
}

/// As any client could: fetches the parameters from the servers.
async fn fetch_parameters(settings: &Settings, cluster: ClusterSpec) -> Result<Vec<Vec<f32>>, Failure> {
    let client = Worker::builder("/job:launcher/replica:0/task:0").cluster(cluster);
    let client = configured(client, settings).start().await?;
    let fetched = fetch_with(&client, settings).await;
    client.shutdown().await;
    fetched
}

async fn fetch_with(client: &Worker, settings: &Settings) -> Result<Vec<Vec<f32>>, Failure> {
    let mut parameters = settings.model.open(settings.flags.seed).zeros();
    for (server, pieces) in settings.pieces().iter().enumerate() {
        let peer = client.peer(&RoleName::Server(server).worker_name())?;
        let names: Vec<String> = pieces.iter().map(latest).collect();
        let fetched = client.fetch_many(&peer, &names).await?;
        unpack(pieces, &fetched, &mut parameters)
            .map_err(|problem| Failure::Message { from: peer.name().to_owned(), problem })?;
    }
    Ok(parameters)
}

fn train_alone(settings: &Settings) -> Vec<Vec<f32>> {
    let bar = progress_bar("one process, to compare", settings.steps);
    let parameters = train(&settings.alone(), |loss| {
        bar.inc(1);
        bar.set_message(format!("loss {loss:.3}"));
    });
    bar.finish();
    parameters
}

fn progress_bar(what: &'static str, steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps).with_prefix(what);
    let template = "{prefix:<24} {bar:30} {pos}/{len} steps  {rate}  {msg}";
    // A template that does not parse would show the default bar.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.with_key("rate", |state: &ProgressState, to: &mut dyn fmt::Write| {
            // Writing to the bar's own buffer does not fail.
            let _ = write!(to, "{:.0}/s", state.per_sec());
        }));
    }
    bar
}
