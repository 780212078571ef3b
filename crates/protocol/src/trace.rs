//! [`TraceContext`]: the span that a call belongs to.

use std::fmt;

/// A span of a trace, which spans of other processes continue. Its parts are those of the recommendation
/// [Trace Context](https://www.w3.org/TR/trace-context/#traceparent-header).
///
/// ```
/// use tensorwire_protocol::TraceContext;
///
/// let context = TraceContext::new(0x0af7651916cd43dd8448eb211c80319c, 0xb7ad6b7169203331, 1).unwrap();
/// assert_eq!(context.to_string(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
/// assert!(TraceContext::new(0, 1, 0).is_none());
/// ```
// Bytes instead of numbers, whose alignment would make each request longer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace: [u8; 16],
    span: [u8; 8],
    flags: u8,
}

impl TraceContext {
    /// `None` if one of the identifiers is zero, which stands for none.
    pub fn new(trace_id: u128, span_id: u64, flags: u8) -> Option<Self> {
        let context = Self { trace: trace_id.to_le_bytes(), span: span_id.to_le_bytes(), flags };
        (trace_id != 0 && span_id != 0).then_some(context)
    }

    /// The trace.
    pub fn trace_id(self) -> u128 {
        u128::from_le_bytes(self.trace)
    }

    /// The span of the trace.
    pub fn span_id(self) -> u64 {
        u64::from_le_bytes(self.span)
    }

    /// Bit 0 says that the trace is recorded. The other bits pass unchanged.
    pub fn flags(self) -> u8 {
        self.flags
    }
}

/// As the value of the HTTP header `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id(), self.span_id(), self.flags)
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceContext({self})")
    }
}
