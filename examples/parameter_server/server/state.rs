//! What a server knows: its parameters, and whose turn it is.

use std::collections::BTreeSet;

use tensorwire::{Tensor, Worker};
use tensorwire_examples::{
    barrier::{Barrier, Pushed},
    sgd::SgdConfig,
    shards::Piece,
    tickets::Tickets,
};

use super::floats;
use crate::{
    failure::Failure,
    link::{CHIEF, Push, Token},
    options::{Mode, Settings},
    parameters::{Beginning, Parameters},
    report::Report,
};

/// The server that hands out the steps of an asynchronous training, and that reports.
const COORDINATOR: usize = 0;

/// How gradients become updates, on this server.
#[derive(Debug)]
enum Turns {
    /// Synchronous. Every server goes by the gradients that reach it.
    Together(Barrier<Vec<Tensor>>),
    /// Asynchronous, on the server that hands out the steps.
    Apart(Tickets),
    /// Asynchronous, on another server: it takes what comes.
    AsTheyCome,
}

#[derive(Debug)]
pub(super) struct State {
    mode: Mode,
    is_coordinator: bool,
    steps: u64,
    report_steps: u64,
    sgd: SgdConfig,
    /// 0 until the chief has given this server parameters.
    epoch: u64,
    parameters: Parameters,
    turns: Turns,
    /// The workers that are there.
    present: Vec<bool>,
    /// The step of each worker's last gradients in this epoch.
    pushed: Vec<Option<u64>>,
    /// Gradients of former epochs.
    outdated: u64,
    /// The workers that have said goodbye.
    gone: BTreeSet<usize>,
}

impl State {
    pub(super) fn new(settings: &Settings, server: usize, pieces: Vec<Piece>) -> Self {
        let (steps, sgd) = (settings.steps, settings.sgd);
        let is_coordinator = server == COORDINATOR;
        Self {
            mode: settings.mode,
            is_coordinator,
            steps,
            report_steps: settings.report_steps(),
            sgd,
            epoch: 0,
            parameters: Parameters::empty(pieces, steps, settings.flags.checkpoint_steps, sgd),
            turns: turns(settings.mode, is_coordinator, 0, steps),
            present: vec![false; settings.workers],
            pushed: vec![None; settings.workers],
            outdated: 0,
            gone: BTreeSet::new(),
        }
    }

    pub(super) fn join(&mut self, worker: usize) {
        self.present[worker] = true;
        self.pushed[worker] = None;
        if let Turns::Apart(tickets) = &mut self.turns {
            tickets.join(worker);
        }
        if self.is_coordinator {
            Report::of("joined", worker).with("step", self.parameters.step()).print();
        }
    }

    pub(super) fn leave(&mut self, worker: usize) {
        self.present[worker] = false;
        if let Turns::Apart(tickets) = &mut self.turns {
            tickets.leave(worker);
        }
    }

    pub(super) fn note_goodbye(&mut self, worker: usize) {
        self.gone.insert(worker);
    }

    /// Whether every worker has said goodbye.
    pub(super) fn is_finished(&self) -> bool {
        self.gone.len() == self.present.len()
    }

    /// What `worker` is to do next; `None` while it has to wait.
    pub(super) fn token_for(&mut self, worker: usize) -> Option<Token> {
        let epoch = self.epoch;
        if epoch == 0 {
            // The chief is to know, so that it gives this server parameters.
            return (worker == CHIEF).then_some(Token { epoch, step: 0 });
        }
        // Until the chief has the last checkpoint, steps may have to be made again.
        let may_end = worker == CHIEF || self.gone.contains(&CHIEF);
        let step = match &mut self.turns {
            Turns::Together(barrier) => {
                let step = barrier.step();
                let is_its_turn = step >= self.steps || self.pushed[worker] != Some(step);
                is_its_turn.then_some(step).filter(|step| *step < self.steps || may_end)
            }
            Turns::Apart(tickets) => tickets.take(worker).filter(|step| *step < self.steps || may_end),
            Turns::AsTheyCome => Some(self.parameters.step()),
        };
        step.map(|step| Token { epoch, step })
    }

    /// Begins anew with what the chief sent.
    pub(super) fn restore(
        &mut self,
        worker: &Worker,
        push: Push,
        values: &[Tensor],
        velocities: &[Tensor],
    ) -> Result<(), Failure> {
        if push.epoch <= self.epoch {
            return Ok(());
        }
        let beginning =
            Beginning { step: push.step, values: floats(values)?, velocities: floats(velocities)? };
        self.parameters.restore(worker, beginning, self.sgd)?;
        self.epoch = push.epoch;
        self.turns = turns(self.mode, self.is_coordinator, push.step, self.steps);
        self.pushed.fill(None);
        if let Turns::Apart(tickets) = &mut self.turns {
            let there = self.present.iter().enumerate().filter(|(_, present)| **present);
            there.for_each(|(worker, _)| tickets.join(worker));
        }
        if self.is_coordinator {
            Report::of("restored", push.step).with("epoch", push.epoch).print();
        }
        Ok(())
    }

    /// Takes the gradients that `from` pushed, and makes the update that they complete.
    pub(super) fn take_gradients(
        &mut self,
        worker: &Worker,
        from: usize,
        push: Push,
        gradients: Vec<Tensor>,
    ) -> Result<(), Failure> {
        if push.epoch != self.epoch || self.epoch == 0 {
            self.outdated += 1;
            return Ok(());
        }
        self.pushed[from] = Some(push.step);
        let complete = match &mut self.turns {
            Turns::Together(barrier) => match barrier.push(from, push.step, gradients) {
                Pushed::Complete(gradients) => gradients,
                Pushed::Late | Pushed::Waiting => return Ok(()),
            },
            Turns::Apart(tickets) => {
                if !tickets.push(from, push.step)? {
                    return Ok(());
                }
                vec![gradients]
            }
            Turns::AsTheyCome => vec![gradients],
        };
        self.parameters.apply(worker, &complete)?;
        self.report(from, push.loss);
        Ok(())
    }

    fn report(&self, from: usize, loss: f32) {
        let step = self.parameters.step();
        if !self.is_coordinator || !(step.is_multiple_of(self.report_steps) || step == self.steps) {
            return;
        }
        let (late, ahead) = match &self.turns {
            Turns::Together(barrier) => (barrier.late(), 0),
            Turns::Apart(tickets) => (0, tickets.most_ahead()),
            Turns::AsTheyCome => (0, 0),
        };
        let late = late + self.outdated;
        Report::of("step", step)
            .with("loss", loss)
            .with("worker", from)
            .with("late", late)
            .with("ahead", ahead)
            .print();
    }
}

fn turns(mode: Mode, is_coordinator: bool, step: u64, steps: u64) -> Turns {
    match mode {
        Mode::Sync { wanted } => Turns::Together(Barrier::new(wanted, step)),
        Mode::Async { staleness } if is_coordinator => Turns::Apart(Tickets::new(step, steps, staleness)),
        Mode::Async { .. } => Turns::AsTheyCome,
    }
}
