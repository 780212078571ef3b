//! The spans of calls, and how they continue those of callers in other processes.

#[cfg(feature = "trace")]
use std::{fmt, sync::Arc};

use tensorwire_protocol::TraceContext;
use tracing::Span;

use crate::peer_memory::trust::Trust;

/// Passes the caller's span on to the peer whose handler answers, where the handler's span becomes its child. Set it by
/// [`WorkerBuilder::propagator`](crate::WorkerBuilder::propagator) at both ends. It needs the feature `trace`.
///
/// `tensorwire-axum` has one for OpenTelemetry. The methods are called once for each call, and should not block.
#[cfg(feature = "trace")]
pub trait Propagator: fmt::Debug + Send + Sync + 'static {
    /// Where the current span belongs; the task that awaits the call is inside it. `None` if the peer shall continue no trace.
    fn inject(&self) -> Option<TraceContext>;

    /// Makes `span` a child of the caller's. `span` is new, was not entered, and is that in which the handler runs: `handle` of the target
    /// `tensorwire`, at level INFO, with the fields `name` of the handler and `peer`. It is disabled if no subscriber wants it.
    fn extract(&self, caller: TraceContext, span: &Span);
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub(crate) struct Traces {
    #[cfg(feature = "trace")]
    pub(crate) propagator: Option<Arc<dyn Propagator>>,
    /// Whether peers may say what their calls belong to.
    #[cfg(feature = "trace")]
    pub(crate) are_continued: bool,
}

impl Traces {
    /// Of a worker that trusts its peers so far.
    pub(crate) fn trusting(self, trust: Trust) -> Self {
        #[cfg(feature = "trace")]
        return Self { are_continued: trust != Trust::Hostile, ..self };
        #[cfg(not(feature = "trace"))]
        {
            let _ = trust;
            self
        }
    }

    /// What goes with a call that the current task makes.
    pub(crate) fn current(&self) -> Option<TraceContext> {
        #[cfg(feature = "trace")]
        return self.propagator.as_ref().and_then(|propagator| propagator.inject());
        #[cfg(not(feature = "trace"))]
        None
    }

    /// The span in which `handler` answers a call of `peer`.
    pub(crate) fn of_call(&self, peer: &str, handler: &str, caller: Option<TraceContext>) -> Span {
        // The task may be inside an unrelated span.
        let span = tracing::info_span!(target: "tensorwire", parent: None, "handle", name = handler, peer);
        #[cfg(feature = "trace")]
        if let (Some(propagator), Some(caller), true) = (&self.propagator, caller, self.are_continued) {
            propagator.extract(caller, &span);
        }
        #[cfg(not(feature = "trace"))]
        let _ = caller;
        span
    }
}

/// The span in which `handler` answers a call of the worker itself, a child of the current one.
pub(crate) fn of_own_call(worker: &str, handler: &str) -> Span {
    tracing::info_span!(target: "tensorwire", "handle", name = handler, peer = worker)
}
