//! The span of a call. `docs/src/metrics.md` lists its fields.

use tracing::{Span, debug_span, field};

use super::Calling;
use crate::schedule::Algorithm;

impl Calling {
    /// The span of the call, from the first use of this until the call is dropped. It costs a check of its level if no subscriber
    /// wants it.
    pub(crate) fn span(&self) -> &Span {
        self.span.get_or_init(|| {
            let (group, call) = (&self.group, &self.call);
            debug_span!(
                target: "tensorwire",
                "call",
                group = group.identity.name,
                rank = group.rank,
                ranks = group.size(),
                kind = %call.kind,
                number = call.number,
                bytes = call.bytes(),
                algorithm = Algorithm::of_number(call.algorithm).map(field::display),
                root = call.root,
                error = field::Empty,
            )
        })
    }
}
