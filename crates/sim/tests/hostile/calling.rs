//! Calls of rogues, which honest workers answer, and calls of honest workers, which rogues answer as they like.

use std::{num::NonZeroU64, time::Duration};

use tensorwire_protocol::{
    CallTerms, Metadata, OfferedArguments, Scope, Status, TensorList, TensorRequest, TraceContext,
    limits::TENSOR_BYTES_MAX,
};
use tensorwire_rendezvous::{
    Worker,
    calls::{Call, Handling},
};
use tensorwire_sim::Rng;

use super::{
    answers::value_of,
    honest::{Honest, LENGTHS},
    line::Line,
    stage::rogue_name,
};

/// Answers calls with their arguments.
pub(super) fn echo(worker: &Worker) -> Handling {
    let echo = |call: Call| async move { Ok::<_, Status>(call.into_arguments()) };
    worker.handle("echo", echo).unwrap()
}

/// A list of tensors, which may be spoilt.
fn list(line: &Line, rng: &mut Rng) -> Vec<u8> {
    let metadata: Vec<Metadata> =
        (0..rng.below(4)).map(|_| value_of(rng.pick([0, 8, 100, 2000]), rng).0).collect();
    let list = TensorList::new(metadata).unwrap();
    let mut content = list.head();
    content.resize(list.byte_length() as usize, 0xAB);
    content.truncate(4096);
    if rng.chance(1, 2) {
        line.did("calls with spoilt arguments");
        let at = rng.below(content.len());
        content[at] ^= rng.next_u64() as u8;
        content.truncate(content.len() - rng.below(2));
    }
    content
}

/// Makes a request of the rogue a call, or one for arguments of a call.
pub(super) fn request(line: &Line, request: TensorRequest, rng: &mut Rng) -> TensorRequest {
    let key = rng.pick(["echo", "echo", "none"]).into();
    let (number, limit_ms) =
        (NonZeroU64::MIN.saturating_add(rng.below(4) as u64), rng.pick([0, 50, u32::MAX]));
    let trace = TraceContext::new(limit_ms.into(), 7, 0);
    match rng.below(4) {
        0 => {
            line.did("asks for arguments of a call");
            TensorRequest { scope: Scope::Arguments(number), key, ..request }
        }
        1 => {
            line.did("offers arguments of a call");
            let bytes = rng.pick([0, 64, 9000, 20_000, 1 << 40, TENSOR_BYTES_MAX]);
            let offered = Some(OfferedArguments { number, bytes });
            TensorRequest { scope: Scope::Call(CallTerms { limit_ms, offered, trace }), key, ..request }
        }
        _ => {
            line.did("calls a handler");
            let scope = Scope::Call(CallTerms { limit_ms, offered: None, trace });
            TensorRequest { scope, key, arguments: Some(list(line, rng).into()), ..request }
        }
    }
}

impl Honest {
    /// Calls what a rogue may have as a handler.
    pub(super) async fn calls(self, rogue: usize, mut rng: Rng) {
        let peer = self.worker.peer(&rogue_name(rogue)).unwrap();
        for _ in 0..rng.within(1..4) {
            let length = rng.pick(LENGTHS);
            let transfer = self.stage.new_transfer(length);
            let argument = self.tensor(transfer, length).await;
            let call = peer.call("echo", argument);
            let called = async { call.await };
            self.with_rogue(rogue, format!("a call of rogue {rogue}"), called).await;
            self.pause(&mut rng, Duration::from_millis(20)).await;
        }
    }
}
