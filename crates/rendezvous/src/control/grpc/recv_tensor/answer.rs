//! An answer as it leaves: the content goes out of the memory it lies in, without a copy.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{BufMut as _, Bytes};
use memory::copy::{CopyReason, copy_bytes};
use prost::Message;
use protocol::{Source, Validation};
use tonic::{
    Status,
    codegen::{Body, http::HeaderMap},
};

use super::{
    messages::{Dim, RecvTensorResponse, TensorOptions, TensorProto, TensorShapeProto},
    served::{Counts, InService},
    status::PIECES,
};
use crate::{
    Tensor,
    values::{PeerValues, Taken},
};

/// Given to the connection at a time, so that a receive that is given up is noticed in between.
const PIECE_BYTES: usize = 256 << 10;

/// Content up to this length is copied behind its header, so that both leave in one frame.
const TOGETHER_BYTES_MAX: usize = 1024;

/// Tags of what comes before lengths.
const TENSOR_TAG: u8 = 1 << 3 | 2;
const CONTENT_TAG: u8 = 4 << 3 | 2;

/// A value that was taken for one answer, and goes back to its place unless it is delivered.
#[derive(Debug)]
pub(super) struct Offered {
    service: InService,
    taken: Option<Taken>,
}

impl Offered {
    pub(super) fn new(service: InService, taken: Taken) -> Self {
        service.sending(true);
        Self { service, taken: Some(taken) }
    }

    fn delivered(&mut self) {
        self.taken = None;
    }

    fn put_back(&mut self) {
        if let Some(taken) = self.taken.take() {
            self.service.values().put_back(taken);
        }
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        // On a broken connection nobody knows whether it arrived: its step is over with this peer.
        if self.service.is_lost() {
            self.delivered();
        } else {
            self.put_back();
        }
        self.service.sending(false);
    }
}

/// How answers are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// Longest content of one message, in bytes.
    pub(super) message_bytes_max: usize,
    /// Whether content may come in several messages.
    pub(super) in_pieces: bool,
    /// By which checksum contents are validated.
    pub(super) validation: Validation,
}

/// The body of an answer.
#[derive(Debug)]
pub(super) struct Answer {
    offered: Offered,
    /// A header that is to leave next.
    head: Option<Bytes>,
    content: Bytes,
    /// How much of the content has left.
    at: usize,
    /// Where the present message ends in the content.
    message_end: usize,
    message_bytes_max: usize,
    is_done: bool,
}

impl Answer {
    /// The answer with a value.
    ///
    /// # Errors
    /// OUT_OF_RANGE for content that is above the limit of one message; the value goes back to its place.
    pub(super) fn new(offered: Offered, form: Form) -> Result<Self, Status> {
        let Some(tensor) = offered.taken.as_ref().map(Taken::tensor) else {
            return Err(Status::internal("a value that was handed out before"));
        };
        let length = tensor.bytes().len();
        let is_one = length <= form.message_bytes_max;
        if !is_one && !form.in_pieces {
            return Err(too_large(length, form.message_bytes_max));
        }
        let content = Bytes::from(tensor.buf().clone());
        let version = offered.taken.as_ref().map_or(0, PeerValues::version);
        let head = first_head(tensor, form.validation, version, is_one);
        let message_end = if is_one { length } else { 0 };
        let mut answer = Self {
            offered,
            head: None,
            content,
            at: 0,
            message_end,
            message_bytes_max: form.message_bytes_max,
            is_done: false,
        };
        answer.head = Some(answer.joined(head));
        Ok(answer)
    }

    /// A header, with the content behind it if that is short.
    fn joined(&mut self, head: Vec<u8>) -> Bytes {
        let rest = self.message_end - self.at;
        if rest == 0 || rest > TOGETHER_BYTES_MAX {
            return head.into();
        }
        let begin = head.len();
        let mut both = head;
        both.resize(begin + rest, 0);
        let from = self.content.get(self.at..self.message_end).unwrap_or_default();
        copy_bytes(both.get_mut(begin..).unwrap_or_default(), from, CopyReason::Eager);
        self.at = self.message_end;
        both.into()
    }

    /// The next bytes; `None` after the last.
    fn next(&mut self) -> Option<Bytes> {
        if let Some(head) = self.head.take() {
            return Some(head);
        }
        if self.at == self.message_end && self.at < self.content.len() {
            self.message_end = self.content.len().min(self.at + self.message_bytes_max);
            let head = later_head(self.message_end - self.at);
            return Some(self.joined(head));
        }
        if self.at == self.message_end {
            return None;
        }
        let end = self.message_end.min(self.at + PIECE_BYTES);
        let piece = self.content.slice(self.at..end);
        self.at = end;
        Some(piece)
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.is_done {
            return Poll::Ready(None);
        }
        let cancelled = this.offered.service.is_cancelled();
        if !cancelled && let Some(bytes) = this.next() {
            Counts::add(&this.offered.service.counts().bytes, bytes.len());
            return Poll::Ready(Some(Ok(hyper::body::Frame::data(bytes))));
        }
        this.is_done = true;
        let status = if cancelled {
            this.offered.put_back();
            super::served::given_up()
        } else {
            this.offered.delivered();
            Counts::add(&this.offered.service.counts().contents, 1);
            Status::new(tonic::Code::Ok, "")
        };
        let mut trailers = HeaderMap::new();
        status.add_header(&mut trailers)?;
        Poll::Ready(Some(Ok(hyper::body::Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}

fn too_large(length: usize, most: usize) -> Status {
    let mut status = Status::out_of_range(format!(
        "the tensor has {length} bytes, and one message carries {most}: ask for it with \
         tensorwire.tensors.v1.Tensors/RecvTensorStream"
    ));
    status.metadata_mut().insert(PIECES, tonic::metadata::MetadataValue::from_static("1"));
    status
}

/// All of a first message but the content, which follows at once if it `is_one`.
fn first_head(tensor: &Tensor, validation: Validation, version: u64, is_one: bool) -> Vec<u8> {
    let metadata = tensor.metadata();
    let length = tensor.bytes().len();
    let checksum = validation.checksum(tensor.bytes()).filter(|_| length > 0);
    let options = TensorOptions {
        validation: if checksum.is_some() { validation as u32 } else { 0 },
        checksum: checksum.unwrap_or(0),
        content_bytes: if is_one { 0 } else { length as u64 },
        version,
    };
    let outer = RecvTensorResponse {
        tensor: None,
        is_dead: metadata.is_dead,
        send_start_micros: now_micros(),
        transport_options: options.pack(),
    };
    let dim = metadata.shape.dimensions().iter();
    let dim = dim.map(|&size| Dim { size: i64::try_from(size).unwrap_or(i64::MAX) }).collect();
    let inner = TensorProto {
        dtype: metadata.dtype as i32,
        tensor_shape: Some(TensorShapeProto { dim, unknown_rank: false }),
        ..TensorProto::default()
    };
    // An encoded tensor is its content, header and all.
    let is_plain = metadata.dtype.is_plain();
    let mut inner = if is_plain || !is_one || length == 0 { inner.encode_to_vec() } else { Vec::new() };
    if is_plain && is_one && length > 0 {
        put_length(&mut inner, CONTENT_TAG, length);
    }
    let content = if is_one { length } else { 0 };
    message(&outer.encode_to_vec(), &inner, content)
}

/// All of a later message but its `content` bytes.
fn later_head(content: usize) -> Vec<u8> {
    let mut inner = Vec::new();
    put_length(&mut inner, CONTENT_TAG, content);
    message(&[], &inner, content)
}

/// A gRPC message of a response with `outer` fields and a tensor of `inner` fields, which `content` bytes follow.
fn message(outer: &[u8], inner: &[u8], content: usize) -> Vec<u8> {
    let mut begin = Vec::with_capacity(16);
    put_length(&mut begin, TENSOR_TAG, inner.len() + content);
    let length = outer.len() + begin.len() + inner.len() + content;
    let mut head = Vec::with_capacity(5 + outer.len() + begin.len() + inner.len() + TOGETHER_BYTES_MAX);
    head.push(0); // not compressed
    head.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    head.extend_from_slice(outer);
    head.extend_from_slice(&begin);
    head.extend_from_slice(inner);
    head
}

fn put_length(into: &mut Vec<u8>, tag: u8, length: usize) {
    into.push(tag);
    prost::encoding::encode_varint(length as u64, into);
}

/// For whoever reads traces at the other end.
#[allow(clippy::disallowed_methods)] // the wall clock of two hosts; nothing here depends on it
fn now_micros() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.ok().and_then(|since| i64::try_from(since.as_micros()).ok()).unwrap_or(0)
}
