//! Replacement of the `metrics` crate without the feature `metrics`: nothing is counted.

/// Replaces a counter, a gauge and a histogram.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unmetered;

pub(crate) type Counter = Unmetered;
pub(crate) type Histogram = Unmetered;
pub(crate) type SharedString = std::sync::Arc<str>;

impl Unmetered {
    pub(crate) fn increment(self, _: u64) {}

    pub(crate) fn absolute(self, _: u64) {}

    pub(crate) fn set(self, _: f64) {}

    pub(crate) fn record(self, _: std::time::Duration) {}
}

/// Nothing is recorded.
pub(crate) fn is_recorded(_: &Histogram) -> bool {
    false
}

/// Replaces a label.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Label;

impl Label {
    pub(crate) fn new<V>(_: &'static str, _: V) -> Self {
        Self
    }
}

/// Replaces a unit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Count,
    Seconds,
}

/// Accepts the arguments of `metrics::counter!`, `gauge!` and `histogram!`. Labels are evaluated and dropped.
macro_rules! unmetered {
    ($($name:expr $(=> $value:expr)?),* $(,)?) => {{
        $(let _ = (&$name, $(&$value)?);)*
        $crate::unmetered::Unmetered
    }};
}

pub(crate) use unmetered as counter;
pub(crate) use unmetered as gauge;
pub(crate) use unmetered as histogram;
pub(crate) use unmetered as describe_counter;
pub(crate) use unmetered as describe_gauge;
pub(crate) use unmetered as describe_histogram;
