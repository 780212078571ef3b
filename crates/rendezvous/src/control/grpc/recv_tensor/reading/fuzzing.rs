//! An answer to RecvTensor of whatever bytes, cut anywhere.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

use std::{
    collections::VecDeque,
    convert::Infallible,
    task::{Context, Poll},
};

use futures::FutureExt;
use hyper::body::Frame;
use memory::PoolConfig;
use protocol::wire::check_metadata;
use tonic::codegen::http::{HeaderName, HeaderValue};

use super::*;
use crate::fuzzing::input::Input;

/// Bytes that all values of one input may take together.
const CAP_BYTES: u64 = 1 << 20;
const MESSAGES_MAX: usize = 8;

/// An answer in frames.
#[derive(Debug)]
pub(super) struct Frames(pub(super) VecDeque<Frame<Bytes>>);

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

/// Reads such an answer: a whole value comes of it, or an error.
pub fn recv_tensor(data: &[u8]) {
    let mut input = Input::new(data);
    let (cut, status) = (1 + input.below(64), input.pick(&["0", "0", "5", "x"]));
    let has_trailers = input.below(8) > 0;
    let is_whole = input.flag();
    let bytes = if is_whole { messages(&mut input) } else { input.rest().to_vec() };
    let mut frames: VecDeque<_> =
        bytes.chunks(cut).map(|chunk| Frame::data(Bytes::copy_from_slice(chunk))).collect();
    if has_trailers {
        let name = HeaderName::from_static("grpc-status");
        frames.push_back(Frame::trailers(HeaderMap::from_iter([(name, HeaderValue::from_static(status))])));
    }
    let config = PoolConfig { block_bytes: 4096, cap_bytes: CAP_BYTES, ..PoolConfig::new("fuzz") };
    let place = Place { pool: Pool::new(config).unwrap(), target: None };
    // A value that is larger than what the pool may ever have is refused, and one is all that is read.
    match Reader::new(Frames(frames)).value(&place).now_or_never().expect("nothing to wait for") {
        Ok(arrived) => whole(arrived),
        Err(fault) => assert!(!format!("{fault:?}").is_empty()),
    }
    assert_eq!(place.pool.stats().used_bytes, 0, "memory is lost");
}

/// Messages of gRPC, with the lengths they have.
fn messages(input: &mut Input<'_>) -> Vec<u8> {
    let mut all = Vec::new();
    for _ in 0..1 + input.below(MESSAGES_MAX) {
        let message = input.bytes(4096);
        all.push(0);
        all.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        all.extend(message);
    }
    all
}

fn whole(arrived: Arrived) {
    assert_eq!(arrived.bytes().len() as u64, arrived.metadata.byte_length);
    assert_eq!(check_metadata(&arrived.metadata), Ok(()));
    let tensor = arrived.into_tensor();
    if tensor.dtype() == DataType::String
        && let Ok(strings) = tensor.strings()
    {
        let bytes: usize = strings.iter().map(Bytes::len).sum();
        assert!(bytes <= tensor.bytes().len());
    }
}
