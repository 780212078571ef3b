//! Log events. The macro gives all of them the target `tensorwire::group`, so that filters do not depend on the modules of this
//! crate.

/// Logs an event about groups and stores, with a level from `ERROR` to `TRACE`. The other arguments are those of `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::group", tracing::Level::$level, $($event)+)
    };
}
