//! Reads under way.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;
use tensorwire_memory::BufMut;

use super::Operation;
use crate::{FabricError, FabricKind, ReadDestination, ReadSegment};

/// A read under way: a handle on its slot.
///
/// Dropping it ends interest in the bytes, not the operation: the destination goes back to its pool when the read
/// is over.
#[derive(Debug)]
#[pin_project]
#[must_use = "a read that still waits for a slot is posted only when polled"]
pub struct ReadOperation {
    #[pin]
    operation: Operation,
    into: ReadDestination,
    kind: FabricKind,
}

impl ReadOperation {
    pub(super) fn new(operation: Operation, into: ReadDestination, kind: FabricKind) -> Self {
        Self { operation, into, kind }
    }
}

impl Future for ReadOperation {
    type Output = Result<BufMut, FabricError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = ready!(this.operation.poll(context));
        let memory = this.into.finish(*this.kind);
        Poll::Ready(result.and(memory))
    }
}

/// A vectored read under way: a handle on its slot.
///
/// Dropping it ends interest in the bytes, not the operation: the buffers go back to their pools when the read is over.
#[derive(Debug)]
#[pin_project]
#[must_use = "a read that still waits for a slot is posted only when polled"]
pub struct VectoredReadOperation {
    #[pin]
    operation: Operation,
    segments: Arc<[ReadSegment]>,
    kind: FabricKind,
}

impl VectoredReadOperation {
    pub(super) fn new(operation: Operation, segments: Arc<[ReadSegment]>, kind: FabricKind) -> Self {
        Self { operation, segments, kind }
    }
}

impl Future for VectoredReadOperation {
    type Output = Result<Vec<BufMut>, FabricError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = ready!(this.operation.poll(context));
        // All of them, also after one that fails.
        let memory: Vec<_> = this.segments.iter().map(|segment| segment.into.finish(*this.kind)).collect();
        Poll::Ready(result.and_then(|()| memory.into_iter().collect()))
    }
}
