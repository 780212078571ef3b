//! Log events. They all use this macro, so that log filters select them by the target `tensorwire::fabric`, not by
//! module.

/// Logs an event about fabrics and devices at a level from `ERROR` to `TRACE`. The other arguments are those of
/// `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::fabric", tracing::Level::$level, $($event)+)
    };
}
