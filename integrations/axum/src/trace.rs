//! Traces of OpenTelemetry over processes.

use axum::{Router, extract::Request, http::HeaderMap, middleware, middleware::Next, response::Response};
use opentelemetry::{
    Context, SpanId, TraceFlags, TraceId, global,
    propagation::Extractor,
    trace::{SpanContext, TraceContextExt as _, TraceState},
};
use tensorwire::calls::{Propagator, TraceContext};
use tracing::{Instrument as _, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Passes OpenTelemetry's traces on with calls: set it by
/// [`WorkerBuilder::propagator`](tensorwire::WorkerBuilder::propagator) at both ends, and add
/// [`tracing_opentelemetry`]'s layer to the subscriber. The span in which a handler runs is then a child of the span in which the
/// peer was called, in the other process. Trace states and baggage are not passed on.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenTelemetry;

impl Propagator for OpenTelemetry {
    fn inject(&self) -> Option<TraceContext> {
        let context = Span::current().context();
        let span = context.span();
        let span = span.span_context();
        let trace_id = u128::from_be_bytes(span.trace_id().to_bytes());
        let span_id = u64::from_be_bytes(span.span_id().to_bytes());
        TraceContext::new(trace_id, span_id, span.trace_flags().to_u8())
    }

    fn extract(&self, caller: TraceContext, span: &Span) {
        let (trace_id, span_id) = (TraceId::from(caller.trace_id()), SpanId::from(caller.span_id()));
        let flags = TraceFlags::new(caller.flags());
        let caller = SpanContext::new(trace_id, span_id, flags, true, TraceState::NONE);
        continued(span, Context::new().with_remote_span_context(caller));
    }
}

/// Has each request of the router's routes run in a span `request` at level INFO, which continues the trace that the request's headers
/// name. The process's [text map propagator](global::set_text_map_propagator) reads them.
pub fn traced(router: Router) -> Router {
    router.layer(middleware::from_fn(in_span))
}

async fn in_span(request: Request, next: Next) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let span = tracing::info_span!(target: "tensorwire_axum", parent: None, "request", %method, path);
    let headers = Headers(request.headers());
    continued(&span, global::get_text_map_propagator(|propagator| propagator.extract(&headers)));
    next.run(request).instrument(span).await
}

/// Without OpenTelemetry's layer, or where nobody wants the span, there is nothing to continue.
fn continued(span: &Span, parent: Context) {
    drop(span.set_parent(parent));
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}
