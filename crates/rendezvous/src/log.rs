//! Log events. The macro gives all of them the target `tensorwire::worker`, so that filters do not depend on the
//! modules of this crate.

/// Logs an event about sessions, connections and transfers, with a level from `ERROR` to `TRACE`. The other arguments
/// are those of `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::worker", tracing::Level::$level, $($event)+)
    };
}

pub(crate) mod quota;
