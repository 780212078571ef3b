//! Fields that are usually equal in consecutive messages.

/// What such fields were when they were read last. The same bytes mean the same, so they are compared instead of read and
/// checked again.
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

    /// `value` was read out of `encoded`.
    pub(crate) fn remember(&mut self, encoded: &[u8], value: T) {
        self.encoded.clear();
        self.encoded.extend_from_slice(encoded);
        self.value = Some(value);
    }
}
