//! The rules that a peer can break. The simulator's tests of hostile peers include this file, too.

use tensorwire_protocol::PeerMisbehaved as Rule;

/// All of them: `every_rule_has_its_own_words` compares this list with the source.
pub(crate) const RULES: [Rule; 32] = [
    Rule::Malformed,
    Rule::ReservedImmediate,
    Rule::AcknowledgementUnasked,
    Rule::AnswerUnasked,
    Rule::ContentUnasked,
    Rule::ContentLength,
    Rule::EagerUnasked,
    Rule::ChecksumUnfit,
    Rule::ResultSlotUnfit,
    Rule::VersionUnasked,
    Rule::VersionMissing,
    Rule::LoanUnasked,
    Rule::MetaDataTwice,
    Rule::CancelAckUnasked,
    Rule::DuplicateRequest,
    Rule::ReRequestUnasked,
    Rule::DestinationMismatch,
    Rule::DuplicateCancel,
    Rule::Flood,
    Rule::UnknownName,
    Rule::UnknownRecord,
    Rule::ReturnedTooMuch,
    Rule::Overrun,
    Rule::AskedTwice,
    Rule::AnswerWithoutAsk,
    Rule::AnswerShort,
    Rule::RingOfferedTwice,
    Rule::RingOfferUnfit,
    Rule::RingMoveUnasked,
    Rule::NoteUnfit,
    Rule::SubscriptionUnasked,
    Rule::SubscriptionOverrun,
];
