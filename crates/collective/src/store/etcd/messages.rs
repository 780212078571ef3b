//! The part of etcd's protocol that the store uses. Names and numbers of fields are those of its `rpc.proto` and `kv.proto`,
//! unchanged since version 3.0. Unused fields are left out.

/// The revision of the whole map. Each write increments it.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Header {
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// The revision of the last write; 0 without a key.
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
}

/// One key, because it has no end of a range.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Range {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Ranged {
    /// At most one, because a `Range` has one key.
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Put {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
}

/// An answer without fields that are read.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Done {}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Delete {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Deleted {
    #[prost(int64, tag = "2")]
    pub(super) deleted: i64,
}

/// The condition that the key's last write has this revision.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Compare {
    /// 2: compare `mod_revision`. The omitted field `result` then means equal.
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    /// Sent even if it is 0, which means that the key must not exist.
    #[prost(int64, optional, tag = "6")]
    pub(super) mod_revision: Option<i64>,
}

/// Exactly one field is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Operation {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<Range>,
    #[prost(message, optional, tag = "2")]
    pub(super) put: Option<Put>,
}

/// Executes `success` atomically if all comparisons hold, otherwise `failure`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Transaction {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<Operation>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<Operation>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Response {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<Ranged>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TransactionDone {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<Response>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) create: Option<WatchCreate>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// The exclusive end of the watched keys.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
    /// 1: no deletions.
    #[prost(int32, repeated, tag = "5")]
    pub(super) filters: Vec<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Watched {
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    /// Why it was cancelled, unless by a compaction.
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    /// More than 0 if the history since the watch's first revision was compacted.
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Authenticate {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Authenticated {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}
