//! What stands for the `metrics` crate where the feature `metrics` is off: counts that are not kept.

/// Stands for a counter, a gauge and a histogram.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unkept;

pub(crate) type Counter = Unkept;
pub(crate) type Histogram = Unkept;
pub(crate) type SharedString = std::sync::Arc<str>;

impl Unkept {
    pub(crate) fn increment(self, _: u64) {}

    pub(crate) fn absolute(self, _: u64) {}

    pub(crate) fn set(self, _: f64) {}

    pub(crate) fn record(self, _: std::time::Duration) {}
}

/// Stands for a label.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Label;

impl Label {
    pub(crate) fn new<V>(_: &'static str, _: V) -> Self {
        Self
    }
}

/// Stands for a unit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Count,
    Seconds,
}

/// Takes what `metrics::counter!` and its siblings take: labels are made and dropped.
macro_rules! unkept {
    ($($name:expr $(=> $value:expr)?),* $(,)?) => {{
        $(let _ = (&$name, $(&$value)?);)*
        $crate::unmetered::Unkept
    }};
}

pub(crate) use unkept as counter;
pub(crate) use unkept as gauge;
pub(crate) use unkept as histogram;
pub(crate) use unkept as describe_counter;
pub(crate) use unkept as describe_gauge;
pub(crate) use unkept as describe_histogram;
