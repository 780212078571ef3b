//! Log events. They use this macro so that their target is `tensorwire::fabric`, which filters can name, instead of
//! their module.

/// Logs an event about fabrics and devices. The first argument is a level from `ERROR` to `TRACE`; the others are those
/// of `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::fabric", tracing::Level::$level, $($event)+)
    };
}
