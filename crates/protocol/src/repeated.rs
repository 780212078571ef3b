//! Fields that are usually equal in consecutive messages.

/// The value of such fields when they were last read. Equal bytes have an equal value, so the bytes are compared instead of being
/// read and checked again.
#[derive(Debug)]
pub(crate) struct Repeated<T> {
    encoded: Vec<u8>,
    /// `None` until something was read.
    value: Option<T>,
}

impl<T> Default for Repeated<T> {
    fn default() -> Self {
        Self { encoded: Vec::new(), value: None }
    }
}

impl<T> Repeated<T> {
    /// What was read last, and its bytes.
    pub(crate) fn last(&self) -> Option<(&[u8], &T)> {
        self.value.as_ref().map(|value| (self.encoded.as_slice(), value))
    }

    /// Remembers that `value` was read from `encoded`.
    pub(crate) fn remember(&mut self, encoded: &[u8], value: T) {
        self.encoded.clear();
        self.encoded.extend_from_slice(encoded);
        self.value = Some(value);
    }
}
