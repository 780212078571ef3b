//! Events of the log. This macro gives them the target `tensorwire::fabric` instead of their module, so that filters
//! can name them.

/// An event about fabrics and devices, of a level from `ERROR` to `TRACE`; the rest is as for `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::fabric", tracing::Level::$level, $($event)+)
    };
}
