//! Calls, between this worker and a peer.
//!
//! A call is a request with arguments. Short ones are in the request. The others are requested by the peer, as any value is, so that they are
//! written into memory that the peer has granted. The handler's answer is the answer to the request.

use std::{num::NonZeroU64, pin::pin, sync::Arc, time::Duration};

use tensorwire_memory::{Buf, MemoryError, copy::CopyReason};
use tensorwire_protocol::{
    Awaiting, CallTerms, Channel as _, Code, OfferedArguments, ReceiveOptions, Scope, Status, Take,
    TensorRequest, WireError,
};
use tracing::Instrument as _;

use crate::{
    connection::{
        DataConnection,
        call_turns::CallPermits,
        peer_values::{PeerValues, Taken, Taking},
        sent_pages::AnswerPages,
    },
    error::{Transfer, WorkerError},
    peer_memory::destinations::{Expected, ExpectingAllocator},
    values::{
        calls::{Asker, Call, Handler},
        sets::bytes_of,
        tensor::Tensor,
        tensor_list::PackedTensors,
    },
};

/// What a handler answers, and what its call uses until that is sent.
type Answer = (Vec<Tensor>, CallPermits);

fn malformed(error: &WireError) -> Status {
    Status::new(Code::InvalidArgument, format!("the arguments are no list of tensors: {error}"))
}

impl PeerValues {
    /// Has a handler answer the peer's call.
    pub(super) fn call(&self, terms: CallTerms, request: &TensorRequest) -> Take<Taken, Taking> {
        let found = self.values.calls.find(&request.key);
        match found.and_then(|handler| Ok((handler, self.own_connection()?))) {
            Ok((handler, connection)) => {
                let deadline = handler.runtime().now() + Duration::from_millis(terms.limit_ms.into());
                let request = request.clone();
                let call = PeersCall { connection: connection.clone(), handler, terms, request, deadline };
                Take::Later(Box::pin(async move {
                    let (answer, permits) = call.answered().await?;
                    connection.sendable(PackedTensors::new(answer)?, Some(permits)).await
                }))
            }
            Err(status) => Take::Now(Err(status)),
        }
    }

    /// The arguments of a call of this worker.
    pub(super) fn arguments(&self, number: NonZeroU64) -> Take<Taken, Taking> {
        let gone =
            || Status::new(Code::NotFound, "the call was given up, or its arguments were requested before");
        let found = self.values.calls.arguments.take(number, &self.peer).ok_or_else(gone);
        match found.and_then(|arguments| Ok((arguments, self.own_connection()?))) {
            Ok((arguments, connection)) => {
                Take::Later(Box::pin(async move { connection.sendable(arguments, None).await }))
            }
            Err(status) => Take::Now(Err(status)),
        }
    }
}

/// A call of the peer.
struct PeersCall {
    connection: Arc<DataConnection>,
    handler: Arc<Handler>,
    terms: CallTerms,
    request: TensorRequest,
    /// When the caller stops waiting.
    deadline: Duration,
}

impl PeersCall {
    /// The handler's answer. All of this runs in a task of its own: what a handler computes holds up no transfer, and what a call uses is
    /// taken until the task has ended, whether its caller waits or not.
    async fn answered(self) -> Result<Answer, Status> {
        let runtime = self.handler.runtime().clone();
        Asker::answered(&runtime, |mut asker| async move {
            if let Some(answer) = self.run(&mut asker).await {
                asker.answer(answer);
            }
        })
        .await
    }

    /// `None` if nobody waits any more.
    async fn run(self, asker: &mut Asker<Answer>) -> Option<Result<Answer, Status>> {
        let offered = self.terms.offered;
        let begun = pin!(self.connection.values.call_turns.begin(offered.map(|offered| offered.bytes)));
        let permits = match asker.unless_gone(begun).await? {
            Ok(permits) => permits,
            Err(status) => return Some(Err(status)),
        };
        let arguments = match offered {
            Some(offered) => {
                let turn = pin!(self.connection.values.call_turns.pull());
                let _turn = asker.unless_gone(turn).await?;
                // Not given up: the peer may write the memory until it has answered, and the permits are for that memory.
                self.connection.arguments(&self.request.key, offered).await
            }
            None => self.in_request(),
        };
        let arguments = match arguments {
            Ok(arguments) => arguments,
            Err(status) => return Some(Err(status)),
        };
        let (peer, runtime) = (&self.connection.values.peer, self.handler.runtime());
        let traces = &self.connection.values.values.calls.traces;
        let span = traces.of_call(peer, &self.request.key, self.terms.trace);
        let answering =
            async { self.handler.answer(Call::new(peer, arguments, self.deadline, runtime)).await };
        let answer = asker.unless_gone(pin!(answering.instrument(span))).await?;
        Some(answer.map(|answer| (answer, permits)))
    }

    fn in_request(&self) -> Result<Vec<Tensor>, Status> {
        let content = self.request.arguments.as_deref().unwrap_or_default();
        let content = Buf::on_heap(content, CopyReason::Eager);
        PackedTensors::unpacked(&content).map_err(|error| malformed(&error))
    }
}

impl DataConnection {
    /// Calls the peer's handler `name.key`, which has `time_left` to answer.
    pub(crate) async fn call(
        &self,
        name: &Transfer<'_>,
        arguments: Vec<Tensor>,
        time_left: Duration,
    ) -> Result<Vec<Tensor>, WorkerError> {
        let local = |status| WorkerError::Local { transfer: name.name(), status };
        let arguments = PackedTensors::new(arguments).map_err(local)?;
        let bytes = arguments.metadata().byte_length;
        let in_request = self.is_short(bytes).then(|| arguments.copied().into());
        let offer = in_request.is_none().then(|| {
            let calls = &self.values.values.calls;
            calls.arguments.offer(&self.values.peer, arguments)
        });
        let offered = offer.as_ref().map(|offer| OfferedArguments { number: offer.number, bytes });
        let limit_ms = u32::try_from(time_left.as_millis()).unwrap_or(u32::MAX);
        let trace = self.values.values.calls.traces.current();
        let scope = Scope::Call(CallTerms { limit_ms, offered, trace });
        // A request beside whose arguments longer metadata were known would not fit into a message.
        let (receive, expected) = (&self.allocator, Expected::Bytes);
        let allocator = ExpectingAllocator { receive, expected, arguments: in_request };
        let options = ReceiveOptions::default();
        let answer = self.received((&scope, name), &allocator, &options, Self::tensor).await?;
        drop(offer);
        PackedTensors::unpacked(answer.buf()).map_err(|error| {
            let message = format!("the peer's answer is no list of tensors: {error}");
            WorkerError::Remote { transfer: name.name(), status: Status::new(Code::Internal, message) }
        })
    }

    /// Whether so many bytes travel in a message.
    fn is_short(&self, bytes: u64) -> bool {
        bytes <= self.protocol.agreed().eager_bytes_max.into() && !self.is_validated()
    }

    /// Requests the arguments of the peer's call.
    async fn arguments(&self, key: &str, offered: OfferedArguments) -> Result<Vec<Tensor>, Status> {
        let (scope, expected) = (Scope::Arguments(offered.number), bytes_of(offered.bytes));
        let name = Transfer { peer: &self.values.peer, key, step: None };
        // Other transfers do not wait until the arguments come.
        let options = ReceiveOptions { awaiting: Awaiting::Beside, ..ReceiveOptions::default() };
        let content = self.receive_expected((&scope, &name), expected, &options).await?;
        PackedTensors::unpacked(content.buf()).map_err(|error| malformed(&error))
    }

    /// The tensors as they answer a request: in place where the fabric can write them so, else as a copy. `permits` are for memory that they may
    /// share.
    async fn sendable(&self, tensors: PackedTensors, permits: Option<CallPermits>) -> Result<Taken, Status> {
        let metadata = tensors.metadata();
        self.meter.sends(metadata.byte_length);
        if self.is_short(metadata.byte_length) {
            return Ok(Taken::unnamed(&tensors.copied()));
        }
        if self.writes_in_place(&tensors) {
            let exhausted = |error: MemoryError| {
                Status::new(Code::ResourceExhausted, format!("no memory for a list of tensors: {error}"))
            };
            let channel = self.protocol.channel();
            let pieces = tensors.pieces(&channel.import.pool).await.map_err(exhausted)?;
            // They must leave room in the send queue for others.
            let deep = self.queue_pair.config().send_depth as usize / 4;
            if pieces.len() <= deep && channel.check_pages(&pieces).is_ok() {
                return Ok(Taken::Pages(AnswerPages::of_list(pieces, metadata, permits)));
            }
        }
        let (tensor, turn) = self.values.gathering.clone().packed(tensors).await?;
        Ok(Taken::Gathered { tensor, _turn: turn, _permits: permits })
    }

    /// Whether the fabric can write the tensors where they are. Those that would be copied one by one are copied together, because each might wait
    /// for memory that another one has.
    fn writes_in_place(&self, tensors: &PackedTensors) -> bool {
        let (channel, kind) = (self.protocol.channel(), self.queue_pair.kind());
        let is_in_place = |bytes: &Buf| !channel.import.needs(kind, bytes);
        self.queue_pair.capabilities().vectored && !self.is_validated() && tensors.are_long(is_in_place)
    }
}
