//! What has arrived of another rank.

use tensorwire_protocol::EagerContent;
use tensorwire_rendezvous::Tensor;

use super::Calling;

/// The content of a received message.
pub(crate) struct Arrived {
    pub(super) message: Received,
    /// The offset of the content.
    pub(super) at: usize,
}

/// A received message.
pub(super) enum Received {
    Nothing,
    Value(Tensor),
    Note(EagerContent),
}

impl Received {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::Value(tensor) => tensor.bytes(),
            Self::Note(note) => note,
        }
    }
}

impl Arrived {
    pub(crate) const EMPTY: Self = Self { message: Received::Nothing, at: 0 };

    pub(crate) fn bytes(&self) -> &[u8] {
        self.message.bytes().get(self.at..).unwrap_or_default()
    }

    /// The message, if it has nothing but the content, and lies in memory of this process.
    pub(crate) fn into_own_tensor(self) -> Option<Tensor> {
        match self.message {
            Received::Value(tensor) if self.at == 0 && !tensor.buf().is_foreign() => Some(tensor),
            _ => None,
        }
    }
}

impl AsRef<[u8]> for Arrived {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Counts an awaited message until it is dropped.
pub(super) struct Awaited<'calling> {
    calling: &'calling Calling,
    from: usize,
}

impl<'calling> Awaited<'calling> {
    pub(super) fn begin(calling: &'calling Calling, from: usize) -> Self {
        if let Some(contact) = calling.contacts().get_mut(from) {
            contact.awaited += 1;
        }
        Self { calling, from }
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        if let Some(contact) = self.calling.contacts().get_mut(self.from) {
            contact.awaited -= 1;
        }
    }
}
