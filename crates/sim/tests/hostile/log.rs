//! What the workers of one world log: how many lines, and which broken rules they name.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

/// Lines of one run.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) count: u64,
    /// Broken rules by their texts.
    pub(super) rules: BTreeMap<String, u64>,
}

/// Counts lines of level info and above.
#[derive(Debug, Clone, Default)]
pub(super) struct Log(Arc<Mutex<Lines>>);

impl Log {
    pub(super) fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut rule = Rule(None);
        event.record(&mut rule);
        let mut lines = self.lines();
        lines.count += 1;
        if let Some(rule) = rule.0 {
            *lines.rules.entry(rule).or_default() += 1;
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The broken rule that a line names.
struct Rule(Option<String>);

impl Visit for Rule {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "misbehaved" {
            self.0 = Some(format!("{value:?}"));
        }
    }
}
