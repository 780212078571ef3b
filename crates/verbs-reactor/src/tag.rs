//! The work request of a completion, encoded as `wr_id`.

/// Set in the `wr_id` of receives. Every sequence number is smaller.
const RECEIVE: u64 = 1 << 63;

/// The value of a work request's `wr_id`. It is never a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tag {
    /// The request of that number, counted from the queue pair's first one. The send queue stores its slot.
    Send(u64),
    /// A posted receive. Receives need no number, because they are all alike.
    Receive,
}

impl Tag {
    pub(crate) fn to_bits(self) -> u64 {
        match self {
            Self::Send(sequence) => sequence & !RECEIVE,
            Self::Receive => RECEIVE,
        }
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        if bits & RECEIVE == 0 { Self::Send(bits) } else { Self::Receive }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_survives_the_device() {
        for tag in [Tag::Send(0), Tag::Send(7), Tag::Send(RECEIVE - 1), Tag::Receive] {
            assert_eq!(Tag::from_bits(tag.to_bits()), tag);
        }
    }
}
