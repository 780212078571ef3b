//! The output of a training, for people and programs: its progress, and its result.

use std::{
    fmt,
    io::{self, Write as _},
};

use indicatif::{BinaryBytes, HumanCount, ProgressBar, ProgressState, ProgressStyle};

use crate::training::{Plan, train};

/// Writes a line to the standard error. Processes that share it write their lines one after the other, because each is written at once.
pub fn warn(line: fmt::Arguments<'_>) {
    // There is no other place for it.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// A bar on a terminal. Elsewhere a line for the first step, and then for each tenth of all.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    bar: ProgressBar,
    steps: u64,
    is_shown: bool,
}

impl Progress {
    /// The progress of `what`, which takes `steps` steps. Shows nothing unless `is_shown`.
    pub fn new(what: &'static str, steps: u64, is_shown: bool) -> Self {
        let bar = if is_shown { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        // A template that does not parse would show the default bar.
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:<24} {bar:30} {pos}/{len} steps  {rate}  {msg}")
        {
            bar.set_style(style.with_key("rate", |state: &ProgressState, to: &mut dyn fmt::Write| {
                // Writing to the bar's own buffer does not fail.
                let _ = write!(to, "{:.0}/s", state.per_sec());
            }));
        }
        Self { what, bar: bar.with_prefix(what), steps, is_shown }
    }

    /// Shows that `step` is reached.
    pub fn show(&self, step: u64, loss: f32) {
        let (former, tenth) = (self.bar.position(), self.steps.div_ceil(10));
        self.bar.set_position(step);
        self.bar.set_message(format!("loss {loss:.3}"));
        let is_news = step > former && (former == 0 || step / tenth > former / tenth);
        if is_news && self.bar.is_hidden() {
            self.print(&format!("{:<12} {step}/{} steps, loss {loss:.3}", self.what, self.steps));
        }
    }

    /// A line that stays.
    pub fn print(&self, line: &str) {
        let is_bar_drawn = !self.bar.is_hidden() && self.bar.position() > 0;
        match (self.is_shown, is_bar_drawn) {
            (false, _) => {}
            (true, false) => println!("{line}"),
            (true, true) => self.bar.println(line),
        }
    }

    /// Leaves the bar as it is.
    pub fn finish(&self) {
        self.bar.abandon();
    }
}

/// The result of a training on several processes.
#[derive(Debug)]
pub struct Trained {
    /// The last parameters.
    pub parameters: Vec<Vec<f32>>,
    /// Steps that the launcher has seen.
    pub steps: u64,
    /// How long they took.
    pub seconds: f64,
    /// Bytes that workers sent and received.
    pub moved: u64,
    /// The transport of these bytes.
    pub transport: String,
}

impl Trained {
    /// Measures the parameters, trains in this process to compare, and prints both, as text or as one line of JSON.
    ///
    /// # Errors
    /// The samples cannot be read.
    pub fn print_summary(&self, plan: &Plan, is_json: bool) -> io::Result<()> {
        let (mut model, progress) = (plan.load()?, Progress::new("comparing", plan.steps, !is_json));
        let alone = train(&mut model, plan, |step, loss| progress.show(step, loss));
        progress.finish();
        let accuracy = [&self.parameters, &alone].map(|parameters| model.accuracy(parameters) * 100.0);
        let loss = [&self.parameters, &alone].map(|parameters| model.loss(parameters));
        let difference = largest_difference(&self.parameters, &alone);
        if is_json {
            self.print_json(accuracy, loss, difference);
        } else {
            let held_out = format!("{} held-out {}", model.held_out(), plan.data.noun());
            self.print_words(accuracy, loss, difference, &held_out);
            if let Some((percent, source)) = plan.published() {
                println!("published    {percent} %: {source}");
            }
        }
        Ok(())
    }

    fn print_words(&self, accuracy: [f64; 2], loss: [f32; 2], difference: f32, held_out: &str) {
        let bytes = self.parameters.iter().flatten().count() * size_of::<f32>();
        let words = |at: usize| format!("{:.1} % of {held_out}, loss {:.4}", accuracy[at], loss[at]);
        println!("\naccuracy     {}", words(0));
        println!("one process  {}", words(1));
        match difference {
            0.0 => println!("difference   none: equal bit for bit"),
            largest => println!("difference   {largest:.1e} at most, in any parameter"),
        }
        println!("fingerprint  {:016x}", fingerprint(&self.parameters));
        let step = 1e3 / self.rate();
        println!(
            "steps/s      {:.0} ({step:.2} ms each; {} steps in {:.1} s)",
            self.rate(),
            self.steps,
            self.seconds
        );
        let (moved, human) = (HumanCount(self.moved), BinaryBytes(self.moved));
        println!("bytes moved  {moved} ({human}; parameters are {} bytes)", HumanCount(bytes as u64));
        println!("transport    {}", self.transport);
    }

    fn print_json(&self, [accuracy, alone]: [f64; 2], [loss, loss_alone]: [f32; 2], difference: f32) {
        let summary = serde_json::json!({
            "accuracy": accuracy,
            "one_process": alone,
            "loss": loss,
            "one_process_loss": loss_alone,
            "difference": difference,
            "fingerprint": format!("{:016x}", fingerprint(&self.parameters)),
            "steps_per_s": self.rate(),
            "bytes_moved": self.moved,
            "transport": self.transport,
        });
        println!("{summary}");
    }

    fn rate(&self) -> f64 {
        self.steps as f64 / self.seconds.max(1e-9)
    }
}

fn largest_difference(ones: &[Vec<f32>], others: &[Vec<f32>]) -> f32 {
    let pairs = ones.iter().flatten().zip(others.iter().flatten());
    pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

/// A hash that distinguishes parameters which differ in one bit (FNV-1a).
fn fingerprint(parameters: &[Vec<f32>]) -> u64 {
    let bytes = parameters.iter().flatten().flat_map(|value| value.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
