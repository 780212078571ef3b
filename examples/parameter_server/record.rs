//! What worker 0 records during the training: checkpoints, and the accuracy that is reached.

use std::{fmt::Write as _, time::Duration};

use tensorwire::sets::Snapshot;
use tensorwire_examples::{checkpoint, command_line::Flags, report::Progress, training::Model};
use tokio::time::Instant;

use crate::{
    following::parameters,
    node::{Failure, Node},
};

/// Under this name worker 0 publishes what it has measured: lines of a step and of a text.
pub(crate) const VALIDATIONS: &str = "validations";

pub(crate) struct Record<'node> {
    node: &'node Node,
    flags: &'node Flags,
    is_kept: bool,
    /// When the last checkpoint was written by this process.
    written: Option<Instant>,
    validations: String,
}

impl<'node> Record<'node> {
    /// Only worker 0 keeps one.
    pub(crate) fn new(node: &'node Node, flags: &'node Flags, index: u32) -> Result<Self, Failure> {
        let record = Self { node, flags, is_kept: index == 0, written: None, validations: "\n".to_owned() };
        node.publish_values(VALIDATIONS, record.validations.as_bytes())?;
        Ok(record)
    }

    /// Whether something is recorded at the beginning of `step`.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.is_kept && (self.is_validated(step) || self.is_written(step))
    }

    fn is_validated(&self, step: u64) -> bool {
        self.flags.steps_to_validate.is_some_and(|steps| step > 0 && step.is_multiple_of(steps))
    }

    /// The first checkpoint is written at once, so that the file is never that of another training.
    fn is_written(&self, step: u64) -> bool {
        let pause = Duration::from_secs(self.flags.checkpoint_secs);
        let is_time = self.written.is_none_or(|written| written.elapsed() >= pause);
        self.flags.checkpoint.is_some() && (is_time || step >= self.flags.steps)
    }

    /// Records what is due.
    pub(crate) async fn note(
        &mut self,
        model: &mut Model,
        step: u64,
        versions: &[Snapshot],
        progress: &Progress,
    ) -> Result<(), Failure> {
        if !self.is_due(step) {
            return Ok(());
        }
        let parameters = parameters(self.node, versions)?;
        if self.is_validated(step) {
            let (percent, loss) = (model.accuracy(&parameters) * 100.0, model.loss(&parameters));
            let of = format!("{} held-out {}", model.held_out(), self.node.plan.data.noun());
            let line = format!("validation   {step} steps: {percent:.1} % of {of}, loss {loss:.4}");
            progress.print(&line);
            writeln!(self.validations, "{step} {line}")?;
            self.node.publish_values(VALIDATIONS, self.validations.as_bytes())?;
        }
        if let Some(path) = self.flags.checkpoint.clone().filter(|_| self.is_written(step)) {
            let file = checkpoint::encoded(step, &self.node.tensors, &parameters)?;
            // On a thread, because this one serves the other processes.
            tokio::task::spawn_blocking(move || checkpoint::write(&path, &file)).await??;
            self.written = Some(Instant::now());
        }
        Ok(())
    }
}
