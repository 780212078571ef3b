//! Memory that a peer may write for a receive, from its grant to its return to the user; and views of the peer's memory.

use tensorwire_memory::{Buf, BufMut, GrantEnd, GrantId, Granted, MemoryError, copy::CopyReason};
use tensorwire_protocol::{
    LentEnd,
    limits::{RESULT_BYTES, RESULT_SLOT_BYTES},
};

use crate::peer_memory::{
    arena::GrantedPages,
    import::{PIECE_BYTES, yield_once},
};

/// Size of a result slot, which follows the content.
pub(crate) const RESULT_SLOT: usize = RESULT_SLOT_BYTES as usize;

/// The evidence that `end` is. An unknown reason does not prove that the peer can no longer write, so the memory is leaked and counted.
pub(crate) fn evidence(end: LentEnd) -> Option<GrantEnd> {
    match end {
        LentEnd::MetaDataResponse => Some(GrantEnd::MetaDataResponse),
        LentEnd::ErrorStatus => Some(GrantEnd::ErrorStatus),
        LentEnd::CancelAck => Some(GrantEnd::CancelAck),
        LentEnd::Content => Some(GrantEnd::Content),
        LentEnd::NeverSent => Some(GrantEnd::NeverSent),
        LentEnd::RingMoved => Some(GrantEnd::RingMoved),
        _ => None,
    }
}

/// Ends the grant for the reason `end`, and returns the memory.
pub(crate) fn ended(lent: Granted, end: LentEnd) -> Option<BufMut> {
    let taken = lent.end(evidence(end)?);
    taken.inspect_err(|error| log!(WARN, %error, "granted memory could not be reclaimed")).ok()
}

/// The memory of a received value. Every receive moves this enum several times, even if the value arrives inside a message, so
/// large variants are boxed.
#[derive(Debug)]
pub(crate) enum Lent {
    /// Local memory that the peer may write.
    Granted {
        granted: Box<Granted>,
        /// The last bytes are a result slot.
        has_slot: bool,
    },
    /// Local memory of a bounce pool, which the peer can write at any time.
    Bouncing {
        exposed: Box<Granted>,
        /// At least as long; no peer can write it. The content is copied here before it is used.
        private: Box<BufMut>,
        /// The last bytes of both are a result slot.
        has_slot: bool,
    },
    /// Memory that is not granted: a view of the peer's memory, or a content whose grant was ended so that it can be
    /// validated.
    Here {
        bytes: Buf,
        /// The content of the result slot, if there was one.
        result: Option<[u8; RESULT_BYTES]>,
    },
    /// Pages of an arena, which return to it.
    Pages(Box<GrantedPages>),
}

impl Lent {
    /// A message ring or the record slots.
    pub(crate) fn ring(granted: Granted) -> Self {
        Self::Granted { granted: Box::new(granted), has_slot: false }
    }

    /// A view of the peer's memory, or other bytes that no peer can write.
    pub(crate) fn view(bytes: Buf) -> Self {
        Self::Here { bytes, result: None }
    }

    /// The number of the grant.
    pub(crate) fn grant(&self) -> Option<GrantId> {
        match self {
            Self::Granted { granted, .. } | Self::Bouncing { exposed: granted, .. } => Some(granted.id()),
            Self::Here { .. } | Self::Pages(_) => None,
        }
    }

    /// The bytes of a complete value.
    pub(crate) fn received(self) -> Result<Buf, MemoryError> {
        match self {
            Self::Granted { granted, .. } => granted.end(GrantEnd::Content).map(BufMut::freeze),
            // Not reached: bouncing content is copied to private memory before.
            Self::Bouncing { private, .. } => Ok(private.freeze()),
            Self::Here { bytes, .. } => Ok(bytes),
            // Not reached: only requests for pages grant pages, and they hand out no bytes.
            Self::Pages(granted) => {
                drop(granted.end(GrantEnd::Content));
                Ok(Buf::empty())
            }
        }
    }

    /// Copies `content` bytes and the result slot to private memory.
    pub(crate) async fn copy_apart(&mut self, content: u64) -> Result<(), MemoryError> {
        let Self::Bouncing { exposed, private, has_slot } = self else { return Ok(()) };
        let whole = exposed.length().min(private.len());
        let slot = whole.saturating_sub(RESULT_SLOT);
        let content =
            usize::try_from(content).unwrap_or(usize::MAX).min(if *has_slot { slot } else { whole });
        for offset in (0..content).step_by(PIECE_BYTES) {
            if offset > 0 {
                yield_once().await;
            }
            let piece = offset..content.min(offset + PIECE_BYTES);
            let into = private.get_mut(piece).unwrap_or_default();
            exposed.read_at(offset, into, CopyReason::Bounce)?;
        }
        if *has_slot && let Some(into) = private.get_mut(slot..whole) {
            exposed.read_at(slot, into, CopyReason::Bounce)?;
        }
        Ok(())
    }

    /// Ends the grant of the exposed memory, and continues with the private memory, whose copy is complete.
    pub(crate) fn leave_exposed(&mut self) {
        let here = Self::Here { bytes: Buf::empty(), result: None };
        *self = match std::mem::replace(self, here) {
            Self::Bouncing { exposed, private, has_slot } => {
                drop(ended(*exposed, LentEnd::Content));
                Self::Granted { granted: Box::new(private.grant()), has_slot }
            }
            other => other,
        };
    }

    /// Ends the grant after the connection has ended and the peer can no longer write.
    pub(crate) fn end_drained(self) {
        let granted = match self {
            Self::Granted { granted, .. } | Self::Bouncing { exposed: granted, .. } => granted,
            Self::Pages(granted) => return drop(granted.end(GrantEnd::QueuePairDrained)),
            Self::Here { .. } => return,
        };
        if tensorwire_testpoints::planted!("memory of a broken connection stays granted") {
            return;
        }
        if let Err(error) = granted.end(GrantEnd::QueuePairDrained) {
            log!(WARN, %error, "granted memory could not be reclaimed");
        }
    }
}
