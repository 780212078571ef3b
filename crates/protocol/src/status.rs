//! Status codes and statuses, numbered as gRPC numbers them.

use std::fmt;

/// The prefix of the message of a derived status, which only follows from another status.
const DERIVED: &str = "[_Derived_]";

/// The kind of a failure. The numbers are gRPC's, on the control plane and in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The caller gave up.
    Cancelled = 1,
    /// Anything without a code of its own.
    Unknown = 2,
    /// The request is invalid.
    InvalidArgument = 3,
    /// The time ran out.
    DeadlineExceeded = 4,
    /// It does not exist.
    NotFound = 5,
    /// It exists already.
    AlreadyExists = 6,
    /// Wrong or missing credentials.
    PermissionDenied = 7,
    /// A limit was reached.
    ResourceExhausted = 8,
    /// The system is not in a state for this.
    FailedPrecondition = 9,
    /// The step was aborted, or the peer has restarted.
    Aborted = 10,
    /// Outside the valid range.
    OutOfRange = 11,
    /// Not supported.
    Unimplemented = 12,
    /// An invariant is broken.
    Internal = 13,
    /// Not reachable now.
    Unavailable = 14,
    /// Data was lost or is corrupt.
    DataLoss = 15,
    /// The caller has not proven its identity.
    Unauthenticated = 16,
}

impl Code {
    const ALL: [Self; 16] = [
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The code with gRPC's number `number`, if there is one.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&code| code as u32 == number)
    }
}

/// Why something failed, as it travels between workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The kind.
    pub code: Code,
    /// For people. At most 2,048 bytes travel. A peer's is
    /// escaped, so it is one line.
    pub message: String,
    /// For programs. At most 1,024 bytes travel.
    pub details: Vec<u8>,
}

impl Status {
    /// A status without details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Vec::new() }
    }

    /// Marks the status as derived: it only follows from another one, as that of a receive that was given up because something else
    /// failed. The mark is the prefix `[_Derived_]` of the message, so the peer gets it, too.
    #[must_use]
    pub fn derived(mut self) -> Self {
        if !self.is_derived() {
            self.message.insert_str(0, DERIVED);
        }
        self
    }

    /// Whether this status is derived.
    pub fn is_derived(&self) -> bool {
        self.message.starts_with(DERIVED)
    }

    /// The status that names the cause: the first that is not derived, else the first. `None` if there are none.
    ///
    /// ```
    /// use tensorwire_protocol::{Code, Status};
    ///
    /// let given_up = Status::new(Code::Cancelled, "RecvAsync is cancelled.").derived();
    /// let cause = Status::new(Code::InvalidArgument, "`weights` is no matrix");
    /// assert_eq!(Status::root_cause([given_up, cause.clone()]), Some(cause));
    /// ```
    pub fn root_cause(statuses: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut statuses = statuses.into_iter();
        let first = statuses.next()?;
        if first.is_derived() {
            Some(statuses.find(|status| !status.is_derived()).unwrap_or(first))
        } else {
            Some(first)
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.code, self.message)
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s2_5_a_derived_status_is_marked_once_and_gives_way_to_a_cause() {
        let derived = Status::new(Code::Cancelled, "RecvAsync is cancelled.").derived();
        assert_eq!(derived.message, "[_Derived_]RecvAsync is cancelled.");
        assert_eq!(derived.clone().derived(), derived);
        let (one, two) = (Status::new(Code::DataLoss, "one"), Status::new(Code::Internal, "two"));
        assert!(derived.is_derived() && !one.is_derived());
        assert_eq!(Status::root_cause([derived.clone(), one.clone(), two.clone()]), Some(one.clone()));
        assert_eq!(Status::root_cause([one.clone(), derived.clone(), two]), Some(one));
        let other = Status::new(Code::Aborted, "other").derived();
        assert_eq!(Status::root_cause([derived.clone(), other]), Some(derived));
        assert_eq!(Status::root_cause([]), None);
    }
}
