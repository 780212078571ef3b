//! Where received values lie until they are handed out.

use tensorwire_memory::{Buf, BufMut, GrantEnd, GrantId, Granted, MemoryError, copy::CopyReason};
use tensorwire_protocol::{
    LentEnd,
    limits::{RESULT_BYTES, RESULT_SLOT_BYTES},
};

use crate::link::import::{PIECE_BYTES, others_turn};

/// Size of a result slot, which lies behind its content.
pub(crate) const RESULT_SLOT: usize = RESULT_SLOT_BYTES as usize;

/// The memory of a loan that ended for `end`.
pub(crate) fn ended(lent: Granted, end: LentEnd) -> Option<BufMut> {
    let why = match end {
        LentEnd::MetaDataResponse => GrantEnd::MetaDataResponse,
        LentEnd::ErrorStatus => GrantEnd::ErrorStatus,
        LentEnd::CancelAck => GrantEnd::CancelAck,
        LentEnd::Content => GrantEnd::Content,
        LentEnd::NeverSent => GrantEnd::NeverSent,
        // A reason this version does not know is no evidence: the memory is leaked and counted.
        _ => return None,
    };
    let taken = lent.end(why);
    taken.inspect_err(|error| log!(WARN, %error, "lent memory could not be taken back")).ok()
}

/// Where a received value lies.
#[derive(Debug)]
pub(crate) enum Lent {
    /// In memory of this end, which the peer may write.
    Granted {
        granted: Granted,
        /// Its last bytes are a result slot.
        has_slot: bool,
    },
    /// In memory of this end that nothing else uses, and that the peer may write whenever it likes.
    Bouncing {
        exposed: Granted,
        /// As long, or longer: where it goes before anyone looks at it. No peer can write it.
        private: BufMut,
        /// The last bytes of both are a result slot.
        has_slot: bool,
    },
    /// In memory that is not lent to the peer: a view of the peer's, or a content that was settled to be validated.
    Here {
        bytes: Buf,
        /// What lay in its result slot, if it had one.
        result: Option<[u8; RESULT_BYTES]>,
    },
}

impl Lent {
    /// A view of the peer's memory.
    pub(crate) fn view(bytes: Buf) -> Self {
        Self::Here { bytes, result: None }
    }

    /// The number under which the peer may write it.
    pub(crate) fn grant(&self) -> Option<GrantId> {
        match self {
            Self::Granted { granted, .. } | Self::Bouncing { exposed: granted, .. } => Some(granted.id()),
            Self::Here { .. } => None,
        }
    }

    /// The bytes of a value that is complete.
    pub(crate) fn received(self) -> Result<Buf, MemoryError> {
        match self {
            Self::Granted { granted, .. } => granted.end(GrantEnd::Content).map(BufMut::freeze),
            // Never handed out like that: it is set apart before.
            Self::Bouncing { private, .. } => Ok(private.freeze()),
            Self::Here { bytes, .. } => Ok(bytes),
        }
    }

    /// Copies `content` bytes and the result out of memory that the peer can write.
    pub(crate) async fn copy_apart(&mut self, content: u64) -> Result<(), MemoryError> {
        let Self::Bouncing { exposed, private, has_slot } = self else { return Ok(()) };
        let whole = exposed.length().min(private.len());
        let slot = whole.saturating_sub(RESULT_SLOT);
        let content =
            usize::try_from(content).unwrap_or(usize::MAX).min(if *has_slot { slot } else { whole });
        for offset in (0..content).step_by(PIECE_BYTES) {
            if offset > 0 {
                others_turn().await;
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

    /// From now on it is the private memory, whose copy is complete.
    pub(crate) fn leave_exposed(&mut self) {
        let here = Self::Here { bytes: Buf::empty(), result: None };
        *self = match std::mem::replace(self, here) {
            Self::Bouncing { exposed, private, has_slot } => {
                drop(ended(exposed, LentEnd::Content));
                Self::Granted { granted: private.grant(), has_slot }
            }
            other => other,
        };
    }

    /// The connection is over and the peer can't write any more.
    pub(crate) fn end_drained(self) {
        let (Self::Granted { granted, .. } | Self::Bouncing { exposed: granted, .. }) = self else { return };
        if tensorwire_testpoints::planted!("memory of a broken connection stays lent") {
            return;
        }
        if let Err(error) = granted.end(GrantEnd::QueuePairDrained) {
            log!(WARN, %error, "lent memory could not be taken back");
        }
    }
}
