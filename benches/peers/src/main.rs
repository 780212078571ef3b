//! Rivals of Tensorwire that are Rust crates. `scripts/bench-peers` starts this program twice: `serve`, which prints the line
//! `ready ADDRESS` and ends when its standard input does, and `measure`, which prints the line `OPERATIONS SECONDS`.
//!
//! Every rival does the same work: 8 bytes go out, and as many bytes as the plan says come back into private memory. A
//! value that the rival hands out as a view of shared memory is copied once.
//!
//! `frames PART` is one side of a stream of frames, which `benches/src/bin/frames` measures.
//!
//! `bound RANKS BYTES MILLISECONDS` measures the limit that memory sets for an all-reduce, in this process alone;
//! `distance MILLISECONDS` measures the distance of two CPUs.

#![forbid(unsafe_code)]
// Tensorwire's rules about clocks and tasks are for simulated code. Nothing here is simulated.
#![allow(clippy::disallowed_methods)]
// `bound` alone has no server.
#![cfg_attr(
    not(any(
        feature = "iceoryx2",
        feature = "quinn",
        feature = "tarpc",
        feature = "tonic",
        feature = "zenoh"
    )),
    allow(dead_code, unused_imports, unused_variables)
)]

#[cfg(feature = "bound")]
mod bound;
#[cfg(feature = "bound")]
mod distance;
// This module and `grpc` are Tensorwire's benches', included by path: with a dependency on their crate this Cargo.lock would
// change with Tensorwire's.
#[allow(dead_code, unreachable_pub)]
#[path = "../../src/frames.rs"]
mod frames;
#[cfg(feature = "tonic")]
#[allow(dead_code, unreachable_pub)]
#[path = "../../src/grpc.rs"]
mod grpc;
#[cfg(feature = "iceoryx2")]
mod iceoryx;
#[cfg(feature = "iceoryx2")]
mod iceoryx_frames;
mod plan;
#[cfg(feature = "quinn")]
mod quic;
#[cfg(feature = "tarpc")]
mod tarpc_service;
#[cfg(feature = "tonic")]
mod tonic_service;
#[cfg(feature = "zenoh")]
mod zenoh_frames;
#[cfg(feature = "zenoh")]
mod zenoh_session;

use std::process::ExitCode;

use plan::{Fault, Figure, Plan};

fn main() -> ExitCode {
    #[cfg(feature = "bound")]
    {
        if let Some(words) = plan::words_of("bound") {
            return end(bound::measure(&words).map(|figure| figure.print()));
        }
        if let Some(words) = plan::words_of("distance") {
            return end(distance::measure(&words).map(|figure| figure.print()));
        }
    }
    if let Some(words) = plan::words_of("frames") {
        return end(words.join(" ").parse().and_then(stream));
    }
    end(Plan::from_arguments().and_then(|plan| run(&plan)))
}

fn end(done: Result<(), Fault>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("tensorwire-peers: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// One side of a stream of frames.
fn stream(part: frames::Part) -> Result<(), Fault> {
    match part.system.as_str() {
        #[cfg(feature = "iceoryx2")]
        "iceoryx2" => iceoryx_frames::run(&part),
        #[cfg(feature = "zenoh")]
        "zenoh" => runtime("zenoh")?.block_on(zenoh_frames::run(part)),
        other => Err(unknown(other)),
    }
}

fn runtime(rival: &str) -> std::io::Result<tokio::runtime::Runtime> {
    // zenoh starts threads of its own, and wants a runtime that has more than one.
    let mut builder = match rival {
        "zenoh" => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    builder.enable_all().build()
}

fn run(plan: &Plan) -> Result<(), Fault> {
    runtime(&plan.rival)?.block_on(async {
        match &plan.address {
            None => serve(plan).await,
            Some(address) => {
                measure(plan, address).await?.print();
                Ok(())
            }
        }
    })
}

async fn serve(plan: &Plan) -> Result<(), Fault> {
    match plan.rival.as_str() {
        #[cfg(feature = "iceoryx2")]
        "iceoryx2" => iceoryx::serve(plan),
        #[cfg(feature = "quinn")]
        "quinn" => quic::serve(plan).await,
        #[cfg(feature = "tarpc")]
        "tarpc" => tarpc_service::serve(plan).await,
        #[cfg(feature = "tonic")]
        "tonic" => tonic_service::serve(plan).await,
        #[cfg(feature = "zenoh")]
        "zenoh" => zenoh_session::serve(plan).await,
        other => Err(unknown(other)),
    }
}

async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    match plan.rival.as_str() {
        #[cfg(feature = "iceoryx2")]
        "iceoryx2" => iceoryx::measure(plan, address).await,
        #[cfg(feature = "quinn")]
        "quinn" => quic::measure(plan, address).await,
        #[cfg(feature = "tarpc")]
        "tarpc" => tarpc_service::measure(plan, address).await,
        #[cfg(feature = "tonic")]
        "tonic" => tonic_service::measure(plan, address).await,
        #[cfg(feature = "zenoh")]
        "zenoh" => zenoh_session::measure(plan, address).await,
        other => Err(unknown(other)),
    }
}

fn unknown(rival: &str) -> Fault {
    format!("{rival}: not a rival of this build; enable the feature of that name").into()
}
