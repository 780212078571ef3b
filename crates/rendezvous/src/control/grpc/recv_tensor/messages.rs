//! The messages of `proto/tensors.proto`, by hand, so that no generator is needed.
//!
//! Field numbers and types are those of TensorFlow's `worker.proto`, `tensor.proto` and `tensor_shape.proto`.

use bytes::Bytes;
use prost::Message;
use protocol::{Scope, Wanted};

/// `tensorflow.RecvTensorRequest`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct RecvTensorRequest {
    #[prost(int64, tag = "1")]
    pub(super) step_id: i64,
    #[prost(string, tag = "2")]
    pub(super) rendezvous_key: String,
    #[prost(bool, tag = "3")]
    pub(super) dma_ok: bool,
    /// 0: exempt from the check for repeats.
    #[prost(int64, tag = "7")]
    pub(super) request_id: i64,
}

/// `tensorflow.RecvTensorResponse`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct RecvTensorResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor: Option<TensorProto>,
    #[prost(bool, tag = "2")]
    pub(super) is_dead: bool,
    #[prost(int64, tag = "3")]
    pub(super) send_start_micros: i64,
    #[prost(message, optional, tag = "4")]
    pub(super) transport_options: Option<Any>,
}

/// `tensorflow.TensorProto`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<TensorShapeProto>,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) tensor_content: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub(super) string_val: Vec<Bytes>,
}

/// `tensorflow.TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct TensorShapeProto {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<Dim>,
    #[prost(bool, tag = "3")]
    pub(super) unknown_rank: bool,
}

/// `tensorflow.TensorShapeProto.Dim`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::control::grpc) struct Dim {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct Any {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

/// What Tensorwire says of a tensor besides, as the transport's options.
#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::control::grpc) struct TensorOptions {
    #[prost(uint32, tag = "1")]
    pub(super) validation: u32,
    #[prost(fixed64, tag = "2")]
    pub(super) checksum: u64,
    /// Not 0: the content has this many bytes, and follows in messages of its own.
    #[prost(uint64, tag = "3")]
    pub(super) content_bytes: u64,
    /// Which publication it is; 0 for none.
    #[prost(uint64, tag = "4")]
    pub(super) version: u64,
}

/// Names [`TensorOptions`] inside an [`Any`].
const OPTIONS_URL: &str = "type.googleapis.com/tensorwire.tensors.v1.TensorOptions";

impl TensorOptions {
    /// As it travels; `None` if it says nothing.
    pub(super) fn pack(&self) -> Option<Any> {
        let value = Bytes::from(self.encode_to_vec());
        (!value.is_empty()).then(|| Any { type_url: OPTIONS_URL.to_owned(), value })
    }

    /// Out of what came; options of other kinds say nothing.
    pub(super) fn unpack(any: &Any) -> Result<Self, prost::DecodeError> {
        if any.type_url != OPTIONS_URL {
            return Ok(Self::default());
        }
        Self::decode(any.value.clone())
    }
}

/// Asks for a published tensor.
#[derive(Clone, PartialEq, Message)]
pub(in crate::control::grpc) struct FetchTensorRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    /// Waits for one that is newer than what the next two name.
    #[prost(bool, tag = "2")]
    pub(super) is_newer: bool,
    /// The life of the publisher; 0 is that of none.
    #[prost(fixed64, tag = "3")]
    pub(super) incarnation: u64,
    #[prost(uint64, tag = "4")]
    pub(super) version: u64,
}

impl FetchTensorRequest {
    pub(super) fn new(name: &str, scope: Scope) -> Self {
        let (is_newer, incarnation, version) = match scope {
            Scope::Versioned(Wanted::NewerThan { incarnation, version }) => (true, incarnation, version),
            _ => (false, 0, 0),
        };
        Self { name: name.to_owned(), is_newer, incarnation, version }
    }

    /// What it asks for.
    pub(super) fn scope(&self) -> Scope {
        let (incarnation, version) = (self.incarnation, self.version);
        let newer = Wanted::NewerThan { incarnation, version };
        Scope::Versioned(if self.is_newer { newer } else { Wanted::Now })
    }
}

/// Gives a receive up.
#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::control::grpc) struct CancelRecvRequest {
    #[prost(int64, tag = "1")]
    pub(super) request_id: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_the_bytes_of_a_request_are_tensorflows() {
        let request =
            RecvTensorRequest { step_id: 5, rendezvous_key: "k".to_owned(), dma_ok: true, request_id: 9 };
        // step_id = 1, rendezvous_key = 2, dma_ok = 3, request_id = 7.
        assert_eq!(request.encode_to_vec(), [8, 5, 18, 1, b'k', 24, 1, 56, 9]);
        // client_locality = 4, server_locality = 5 and transport_options = 6 are passed over.
        let more = [&[34, 2, 8, 1, 42, 0, 50, 0][..], &request.encode_to_vec()].concat();
        assert_eq!(RecvTensorRequest::decode(&more[..]).unwrap(), request);
    }

    #[test]
    fn options_lead_back_and_those_of_others_say_nothing() {
        let options = TensorOptions { validation: 2, checksum: 7, content_bytes: 1 << 40, version: 9 };
        assert_eq!(TensorOptions::unpack(&options.pack().unwrap()).unwrap(), options);
        assert_eq!(TensorOptions::default().pack(), None);
        let other = Any { type_url: "type.googleapis.com/x".to_owned(), value: Bytes::from_static(b"\xff") };
        assert_eq!(TensorOptions::unpack(&other).unwrap(), TensorOptions::default());
    }
}
