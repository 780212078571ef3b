//! A trace that begins at a client of HTTP goes on in the service and in the handler of a peer.

#![cfg(feature = "opentelemetry")]

mod http;

use std::{error::Error, time::Duration};

use axum::{Router, extract::State, routing::get};
use opentelemetry::{SpanId, TraceId, global, trace::TracerProvider as _};
use opentelemetry_sdk::{
    propagation::TraceContextPropagator,
    trace::{InMemorySpanExporter, SdkTracerProvider, SpanData},
};
use tensorwire::{FabricKind, Peer, Status, Worker, calls::Call};
use tensorwire_axum::{OpenTelemetry, traced};
use tokio::time::timeout;
use tracing_subscriber::{layer::SubscriberExt as _, util::SubscriberInitExt as _};

use http::{ask, served};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// Longest duration of a test.
const LIMIT: Duration = Duration::from_secs(30);

const CLIENTS_TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENTS_SPAN: &str = "b7ad6b7169203331";

async fn answer(State(peer): State<Peer>) -> String {
    match peer.call("embed", ()).await {
        Ok(_) => "called".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn named<'a>(spans: &'a [SpanData], name: &str) -> Result<&'a SpanData, String> {
    spans.iter().find(|span| span.name == name).ok_or_else(|| format!("no span {name} in {spans:?}"))
}

#[tokio::test]
async fn a_trace_goes_from_a_request_through_a_call_into_the_handler() -> Outcome {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    global::set_text_map_propagator(TraceContextPropagator::new());
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    tracing_subscriber::registry().with(layer).init();

    let start = |name| Worker::builder(name).require(FabricKind::TCP).propagator(OpenTelemetry).start();
    let (server, client) = (start("server").await?, start("client").await?);
    let _handling = server.handle("embed", |_: Call| async { Ok::<_, Status>(()) })?;
    let peer = client.peer_at(server.address()).await?;
    let router = traced(Router::new().route("/", get(answer)).with_state(peer));
    let address = served(router).await?;
    let trace = format!("traceparent: 00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01");
    let answer = timeout(LIMIT, ask(&address, "/", &[&trace])).await??;
    assert_eq!(answer, (200, "called".to_owned()));
    client.shutdown().await;
    server.shutdown().await;

    let spans = exporter.get_finished_spans()?;
    let (request, handled) = (named(&spans, "request")?, named(&spans, "handle")?);
    assert_eq!(request.parent_span_id, SpanId::from_hex(CLIENTS_SPAN)?);
    assert_eq!(handled.parent_span_id, request.span_context.span_id());
    for span in [request, handled] {
        assert_eq!(span.span_context.trace_id(), TraceId::from_hex(CLIENTS_TRACE)?);
        assert!(span.parent_span_is_remote);
    }
    Ok(())
}
