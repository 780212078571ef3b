//! Events of the log. They go through this macro, so that filters can name them: not by the module that they are in, but
//! by `tensorwire::fabric`.

/// An event about fabrics and devices, of a level from `ERROR` to `TRACE`; the rest is as for `tracing::event`.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        tracing::event!(target: "tensorwire::fabric", tracing::Level::$level, $($event)+)
    };
}
