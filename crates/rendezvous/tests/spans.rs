//! A subscriber that records the spans of the target `tensorwire`.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex},
};

use tracing::{
    Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

/// The fields of a span.
pub(crate) type SpanFields = BTreeMap<String, String>;

/// The spans that are open, by number, and those that are closed; each with its name.
#[derive(Debug, Default, Clone)]
pub(crate) struct Spans(Arc<Mutex<Recorded>>);

#[derive(Debug, Default)]
struct Recorded {
    open: BTreeMap<u64, (String, SpanFields)>,
    closed: Vec<(String, SpanFields)>,
}

impl Spans {
    /// A subscriber with the filter of `RUST_LOG=tensorwire=debug`.
    pub(crate) fn subscriber(&self) -> impl Subscriber + Send + Sync + use<> {
        let filter = Targets::new().with_target("tensorwire", tracing::Level::DEBUG);
        tracing_subscriber::registry().with(filter).with(SpanRecorder(self.clone()))
    }

    /// The fields of all spans with this name.
    pub(crate) fn named(&self, name: &str) -> Vec<SpanFields> {
        let recorded = self.0.lock().unwrap();
        let all = recorded.closed.iter().chain(recorded.open.values());
        all.filter(|(span, _)| span == name).map(|(_, fields)| fields.clone()).collect()
    }
}

struct SpanRecorder(Spans);

struct FieldsOf<'span>(&'span mut SpanFields);

impl Visit for FieldsOf<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for SpanRecorder {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, _: Context<'_, S>) {
        if attributes.metadata().target() == "tensorwire" {
            let mut fields = SpanFields::new();
            attributes.record(&mut FieldsOf(&mut fields));
            let span = (attributes.metadata().name().to_owned(), fields);
            self.0.0.lock().unwrap().open.insert(id.into_u64(), span);
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
        if let Some((_, fields)) = self.0.0.lock().unwrap().open.get_mut(&id.into_u64()) {
            values.record(&mut FieldsOf(fields));
        }
    }

    fn on_close(&self, id: span::Id, _: Context<'_, S>) {
        // Numbers of closed spans are used again.
        let mut recorded = self.0.0.lock().unwrap();
        let closed = recorded.open.remove(&id.into_u64());
        recorded.closed.extend(closed);
    }
}
