//! The process that a user starts: it starts the others, shows progress, and measures. It never trains, until the end,
//! when it trains in one process to compare.

use std::{
    fmt,
    process::ExitStatus,
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tensorwire_examples::{digits::Digits, mlp::Mlp, training};

use crate::{
    WORKERS,
    children::{Event, Process},
    failure::Failure,
    options::Options,
    report::Report,
    server,
    summary::{Summary, Traffic},
};

/// The server's place among the children; worker `n` follows at `n + 1`.
const SERVER: usize = 0;
/// Events that wait to be read, at most.
const EVENTS_MAX: usize = 256;
/// How long all children may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the children may take to end after the launcher has let go of them, or after one of them has died.
const END_MAX: Duration = Duration::from_secs(10);

/// Starts all processes, waits for the end of the training, measures, and prints the result.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let mut launcher = Launcher::new(options.clone());
    let address = launcher.start_all()?;
    println!("starting     {} steps with seed {}", options.steps, options.seed);
    let trained = launcher.train();
    let (traffic, elapsed) = match trained {
        Ok(trained) => trained,
        Err(failure) => {
            launcher.tell_how_children_end();
            return Err(failure);
        }
    };
    let parameters = server::fetch_parameters(options.fabric, &address)?;
    launcher.end_children()?;

    let digits = Digits::load();
    let mut mlp = Mlp::for_digits();
    let accuracy = mlp.accuracy(&parameters, &digits.held_out);
    let baseline = train_alone(options, &digits);
    let summary = Summary {
        accuracy,
        accuracy_alone: mlp.accuracy(&baseline, &digits.held_out),
        held_out: digits.held_out.len(),
        steps: options.steps,
        elapsed,
        parameter_bytes: mlp.parameter_bytes(),
        traffic,
    };
    println!("\n{summary}");
    Ok(())
}

/// The children and what they say.
struct Launcher {
    options: Options,
    children: Vec<Process>,
    sender: SyncSender<(usize, Event)>,
    events: Receiver<(usize, Event)>,
    /// Children whose output has not ended.
    running: usize,
}

impl Launcher {
    fn new(options: Options) -> Self {
        let (sender, events) = mpsc::sync_channel(EVENTS_MAX);
        Self { options, children: Vec::new(), sender, events, running: 0 }
    }

    /// Starts the server and the workers, and introduces them to each other. Gives the server's address.
    fn start_all(&mut self) -> Result<String, Failure> {
        let server = self.start("server".to_owned(), &["server"])?;
        for index in 0..WORKERS {
            let number = index.to_string();
            let address =
                self.start(format!("worker {index}"), &["worker", "--server", &server, "--index", &number])?;
            self.children[SERVER].tell(&Report::of("worker", address)).map_err(Failure::Pipe)?;
        }
        Ok(server)
    }

    /// Starts one child and waits for its address.
    fn start(&mut self, name: String, role: &[&str]) -> Result<String, Failure> {
        let mut arguments = self.options.to_arguments();
        arguments.extend(role.iter().map(|&argument| argument.to_owned()));
        let index = self.children.len();
        let process = Process::start(name, &arguments, index, self.sender.clone()).map_err(Failure::Start)?;
        self.children.push(process);
        self.running += 1;
        loop {
            let (from, report) = self.next_report()?;
            if let Some(address) = report.value::<String>("address").filter(|_| from == index) {
                let child = &self.children[index];
                println!("{:<12} pid {:<8} at {address}", child.name(), child.id());
                return Ok(address);
            }
        }
    }

    /// The next report of any child; a child that ends meanwhile is a failure.
    fn next_report(&mut self) -> Result<(usize, Report), Failure> {
        match self.events.recv_timeout(SILENCE_MAX) {
            Ok((from, Event::Report(report))) => Ok((from, report)),
            Ok((from, Event::Ended)) => {
                self.running -= 1;
                let child = &mut self.children[from];
                let status = child.wait().map_err(Failure::Start)?;
                Err(Failure::ChildEnded { name: child.name().to_owned(), status })
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(Failure::Silence { limit: SILENCE_MAX })
            }
        }
    }

    /// Shows progress until every worker has finished. Gives their traffic, and how long the steps took.
    fn train(&mut self) -> Result<(Vec<Traffic>, Duration), Failure> {
        let bar = progress_bar("training", self.options.steps);
        let mut traffic = Vec::new();
        let mut applied = 0;
        while traffic.len() < WORKERS || applied < self.options.steps {
            let (_, report) = self.next_report()?;
            if let Some(count) = report.value("applied") {
                applied = count;
                show_progress(&bar, applied, report.value("loss").unwrap_or(f32::NAN));
            }
            traffic.extend(Traffic::from_report(&report));
        }
        let elapsed = bar.elapsed();
        bar.finish();
        Ok((traffic, elapsed))
    }

    /// Lets go of the children and waits for each.
    fn end_children(&mut self) -> Result<(), Failure> {
        self.children.iter_mut().for_each(Process::release);
        for (index, status) in self.ended_children() {
            if !status.success() {
                let name = self.children[index].name().to_owned();
                return Err(Failure::ChildEnded { name, status });
            }
        }
        Ok(())
    }

    /// After a failure: which children noticed it and ended by themselves. The others are killed on drop.
    fn tell_how_children_end(&mut self) {
        for (index, status) in self.ended_children() {
            eprintln!("{} ended by itself: {status}", self.children[index].name());
        }
    }

    /// Children that end within [`END_MAX`] of each other.
    fn ended_children(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        while self.running > 0 {
            match self.events.recv_timeout(END_MAX) {
                Ok((_, Event::Report(_))) => {}
                Ok((index, Event::Ended)) => {
                    self.running -= 1;
                    if let Ok(status) = self.children[index].wait() {
                        ended.push((index, status));
                    }
                }
                Err(_) => break,
            }
        }
        ended
    }
}

fn train_alone(options: &Options, digits: &Digits) -> Vec<Vec<f32>> {
    let bar = progress_bar("one process, to compare", options.steps);
    let parameters = training::train(digits, options.steps, options.seed, |loss| {
        bar.inc(1);
        bar.set_message(format!("loss {loss:.3}"));
    });
    bar.finish();
    parameters
}

/// On a terminal the bar moves. Elsewhere there is a line for the first step, and then for each tenth of all.
fn show_progress(bar: &ProgressBar, applied: usize, loss: f32) {
    bar.set_position(applied as u64);
    bar.set_message(format!("loss {loss:.3}"));
    let steps = bar.length().map_or(1, |steps| steps as usize);
    if bar.is_hidden() && (applied == 1 || applied.is_multiple_of(steps.div_ceil(10).max(1))) {
        println!("training     {applied}/{steps} steps, loss {loss:.3}");
    }
}

fn progress_bar(what: &'static str, steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64).with_prefix(what);
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
