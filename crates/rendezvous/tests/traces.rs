//! The span of a handler continues that of its caller, over shm and tcp and within one worker.

use std::sync::{Arc, Mutex};

use tensorwire_protocol::Status;
use tensorwire_rendezvous::{
    Tensor, Trust, Worker, WorkerBuilder,
    calls::{Call, Handling, Propagator, TraceContext},
};
use tracing::{Instrument as _, Span, Subscriber, span};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

use crate::{
    fabrics::kinds,
    sets::{USUAL, on, run},
    two::Two,
};

/// Of what the caller's spans are parts.
const TRACE: u128 = 0xfeed << 70;

/// Says where spans belong by their numbers here, and remembers what came from callers.
#[derive(Debug, Clone, Default)]
struct Numbered(Arc<Mutex<Vec<Continued>>>);

/// Where a caller's span belongs, and the number of the span that continues it.
type Continued = (TraceContext, Option<u64>);

fn number(span: &Span) -> Option<u64> {
    span.id().map(|id| id.into_u64())
}

impl Propagator for Numbered {
    fn inject(&self) -> Option<TraceContext> {
        TraceContext::new(TRACE, number(&Span::current())?, 1)
    }

    fn extract(&self, caller: TraceContext, span: &Span) {
        self.0.lock().unwrap().push((caller, number(span)));
    }
}

/// Answers `where` with the number and the name of the span in which it runs.
fn answering(worker: &Worker) -> Handling {
    let pool = worker.pool().clone();
    let answer = move |_: Call| {
        let pool = pool.clone();
        async move {
            let span = Span::current();
            let name = span.metadata().map_or("", |metadata| metadata.name());
            let number = Tensor::from_values(&pool, &[], &[number(&span).unwrap_or(0)])?;
            Ok::<_, Status>([number, Tensor::from_strings(&pool, &[1], &[name])?])
        }
    };
    worker.handle("where", answer).unwrap()
}

/// The number of the caller's span, and that of the handler's, for arguments of so many bytes.
async fn called(two: &Two, bytes: usize) -> (u64, u64) {
    let span = tracing::info_span!("caller");
    let argument = Tensor::from_values(two.client.pool(), &[bytes as u64], &vec![0u8; bytes]).unwrap();
    let call = async { two.peer.call("where", argument).await.unwrap() };
    let [of_handler, name] = &call.instrument(span.clone()).await[..] else { panic!("two tensors") };
    assert_eq!(name.strings().unwrap(), ["handle"]);
    (number(&span).unwrap(), of_handler.values::<u64>().unwrap()[0])
}

#[derive(Debug, Clone, Default)]
struct Parents(Arc<Mutex<Vec<Begun>>>);

/// The names of a span and of that in which it began.
type Begun = (&'static str, Option<&'static str>);

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Parents {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent()).map(|parent| parent.name());
        self.0.lock().unwrap().push((attributes.metadata().name(), parent));
    }
}

fn traced(test: impl Future<Output = ()>) {
    let subscriber = tracing::subscriber::set_default(tracing_subscriber::registry());
    run(test);
    drop(subscriber);
}

#[test]
fn a_handler_continues_the_span_of_its_caller() {
    traced(async {
        for &kind in kinds(USUAL) {
            let seen = Numbered::default();
            let two = Two::of(|name| on(kind, name).propagator(seen.clone())).await;
            let _handling = answering(&two.server);
            for bytes in [0, 100, 300_000] {
                let (caller, handler) = called(&two, bytes).await;
                let expected = TraceContext::new(TRACE, caller, 1).unwrap();
                assert_eq!(seen.0.lock().unwrap().drain(..).collect::<Vec<_>>(), [(expected, Some(handler))]);
            }
            // Outside of any span nothing is continued.
            two.peer.call("where", ()).await.unwrap();
            assert!(seen.0.lock().unwrap().is_empty());
            two.end().await;
        }
    });
}

#[test]
fn a_worker_without_a_propagator_or_trust_continues_no_trace() {
    traced(async {
        let seen = Numbered::default();
        let to_caller = |name: &str, builder: WorkerBuilder| match name {
            "client" => builder.propagator(Numbered::default()),
            _ => builder,
        };
        let builders: [&dyn Fn(&str) -> WorkerBuilder; 3] = [
            &|name| to_caller(name, on(USUAL[1], name)),
            &|name| match name {
                "client" => on(USUAL[1], name),
                _ => on(USUAL[1], name).propagator(seen.clone()),
            },
            &|name| on(USUAL[1], name).trust(Trust::Hostile).propagator(seen.clone()),
        ];
        for builder in builders {
            let two = Two::of(builder).await;
            let _handling = answering(&two.server);
            let (caller, handler) = called(&two, 10).await;
            assert_ne!(caller, handler);
            assert!(seen.0.lock().unwrap().is_empty());
            two.end().await;
        }
    });
}

#[test]
fn a_call_of_the_worker_itself_is_a_child_of_the_callers_span() {
    let parents = Parents::default();
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(parents.clone()));
    run(async {
        let worker = on(USUAL[0], "alone").start().await.unwrap();
        let _handling = answering(&worker);
        let peer = worker.peer_at(worker.address()).await.unwrap();
        let call = async { peer.call("where", ()).await.unwrap() };
        let answer = call.instrument(tracing::info_span!("caller")).await;
        assert_eq!(answer[1].strings().unwrap(), ["handle"]);
        assert!(parents.0.lock().unwrap().contains(&("handle", Some("caller"))), "{parents:?}");
        worker.shutdown().await;
    });
}
