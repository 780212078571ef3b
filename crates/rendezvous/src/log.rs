//! Events of the log. They go through this macro, so that filters can name them: not by the module that they are in, which
//! is nobody's business, but by `tensorwire::worker`.

/// An event about sessions, connections and transfers, of a level from `ERROR` to `TRACE`; the rest is as for `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::worker", tracing::Level::$level, $($event)+)
    };
}

pub(crate) mod quota;
