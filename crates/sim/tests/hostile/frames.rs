//! What a rogue does on the control plane.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::timeout;
use tensorwire_protocol::{
    Code, Parameters, Status,
    limits::WIRE_VERSION,
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord},
};
use tensorwire_rendezvous::control::{ControlSession, handshake};
use tensorwire_sim::Rng;

use super::{
    answers::value_of,
    rogue::{PATIENCE, Rogue, Talk},
    stage::{name, rogue_name},
};

fn hello(worker: String, rng: &mut Rng) -> ControlFrame {
    ControlFrame::Hello {
        wire_version: WIRE_VERSION + u16::from(rng.chance(1, 3)),
        worker,
        incarnation: rng.next_u64(),
        listen_address: None,
        nonce: [rng.next_u64() as u8; 32],
    }
}

pub(super) fn junk(rng: &mut Rng) -> Vec<u8> {
    let length = rng.pick([0, 1, 3, 4, 5, 12, 64, 1000, 7000]);
    let mut bytes: Vec<u8> = (0..length).map(|_| rng.next_u64() as u8).collect();
    // Often with a correct length, so that more than the prefix is checked.
    if rng.chance(2, 3)
        && let Some(prefix) = bytes.first_chunk_mut::<4>()
    {
        *prefix = (length as u32).to_le_bytes();
    }
    bytes
}

/// `bytes` with one bit flipped.
pub(super) fn flipped(mut bytes: Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    let at = rng.below(bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << rng.below(8);
    }
    bytes
}

/// Sends anything but the expected handshake.
pub(super) async fn bad_handshake(
    rogue: &Arc<Rogue>,
    mut session: ControlSession,
    target: usize,
    rng: &mut Rng,
) {
    let runtime = rogue.node.runtime();
    let sender = session.sender.clone();
    let send = async |frame: Vec<u8>| {
        let _may_be_over = timeout(&*runtime, PATIENCE, sender.send(frame)).await;
    };
    match rng.below(6) {
        0 => {
            rogue.stage.did("dials and says nothing");
            rogue.rest(rng, Duration::from_secs(7)).await;
        }
        1 => {
            rogue.stage.did("begins a handshake with junk");
            let junk = junk(rng);
            send(junk).await;
            rogue.rest(rng, PATIENCE).await;
        }
        2 => {
            rogue.stage.did("leaves in the midst of a handshake");
            let hello = hello(rogue_name(rogue.place), rng).encode();
            send(hello).await;
            rogue.rest(rng, PATIENCE).await;
        }
        3 => {
            rogue.stage.did("proves another secret");
            let hello = hello(rogue_name(rogue.place), rng).encode();
            send(hello).await;
            send(ControlFrame::Proof { proof: [7; 32] }.encode()).await;
            rogue.rest(rng, PATIENCE).await;
        }
        4 => {
            rogue.stage.did("comes under the worker's own name");
            let me = rogue.introduction(name(target));
            let secret = rogue.secret(target).await;
            let met = handshake::dial(&mut session, &me, secret.as_ref(), &*runtime, PATIENCE, "honest");
            drop(met.await);
        }
        _ => {
            rogue.stage.did("sends a frame where a handshake is due");
            send(ControlFrame::Ping { nonce: 1 }.encode()).await;
            rogue.rest(rng, PATIENCE).await;
        }
    }
}

/// Answers an honest worker that has dialled.
pub(super) async fn bad_welcome(rogue: &Arc<Rogue>, session: ControlSession, rng: &mut Rng) {
    rogue.stage.did("answers a handshake badly");
    let bytes = match rng.below(3) {
        0 => junk(rng),
        1 => hello(rogue_name(rogue.place), rng).encode(),
        _ => return rogue.rest(rng, Duration::from_secs(7)).await,
    };
    let _may_be_over = timeout(&*rogue.node.runtime(), PATIENCE, session.sender.send(bytes)).await;
    rogue.rest(rng, Duration::from_secs(3)).await;
}

/// Answers an honest worker that has requested a data connection.
pub(super) async fn bad_answer(talk: &Talk, offer: &Connect, rng: &mut Rng) {
    let connection = offer.connection;
    match rng.below(5) {
        0 => talk.stage().did("does not answer Connect"),
        1 => {
            talk.stage().did("refuses Connect");
            let status = Status::new(Code::Unavailable, "rogue");
            talk.say(ControlFrame::Refused { connection, status }).await;
        }
        2 => {
            talk.stage().did("says that another connection is coming");
            let status = Status::new(Code::AlreadyExists, "rogue");
            talk.say(ControlFrame::Refused { connection, status }).await;
        }
        3 => {
            talk.stage().did("answers Connect with the worker's own data");
            talk.say(ControlFrame::Connected(offer.clone())).await;
        }
        _ => {
            talk.stage().did("answers Connect with junk for data");
            let data = junk(rng).into_iter().take(100).collect();
            talk.say(ControlFrame::Connected(Connect { data, ..offer.clone() })).await;
        }
    }
}

fn region(rng: &mut Rng) -> RegionRecord {
    RegionRecord {
        region: rng.pick([0, 1, 7, 1 << 31, u32::MAX]),
        generation: rng.next_u64() as u32,
        base: rng.pick([0, u64::MAX]),
        length: rng.pick([0, 1, 1 << 40, u64::MAX]),
        key: rng.next_u64() as u32,
    }
}

/// One deed on the control session; false if it ends the session.
pub(super) async fn deed(talk: &Arc<Talk>, rng: &mut Rng) -> bool {
    let connection = talk.lines().first().map_or(rng.next_u64() as u32, |line| line.number);
    let own = Connect {
        connection: rng.pick([connection, 1, 2, 1 << 31, u32::MAX]),
        kind: rng.pick([0, 4, 5, 99]),
        data: junk(rng).into_iter().take(64).collect(),
        parameters: Parameters::default(),
        ring: talk.lines().first().map_or_else(|| offer_of(rng), |line| line.peer.ring),
        regions: (0..rng.pick([0, 1, 300])).map(|_| region(rng)).collect(),
    };
    let (deed, frame) = match rng.below(18) {
        0 => ("asks for a connection with junk", ControlFrame::Connect(own)),
        1 => ("answers a Connect that nobody sent", ControlFrame::Connected(own)),
        2 => {
            let status = Status::new(Code::Internal, "rogue");
            ("refuses what nobody asked for", ControlFrame::Refused { connection, status })
        }
        3 => {
            let status = Status::new(Code::Internal, "rogue".repeat(400));
            ("says that a connection is over", ControlFrame::Disconnected { connection, status })
        }
        4 => ("tells of strange regions", ControlFrame::RegionAdd { connection, region: region(rng) }),
        5 => {
            let region = rng.pick([0, 1, u32::MAX]);
            ("confirms regions unasked", ControlFrame::RegionAck { connection, region })
        }
        6 => {
            let region = rng.pick([0, 1, u32::MAX]);
            ("withdraws regions", ControlFrame::RegionRemove { connection, region })
        }
        7 => {
            let (entries, more) = (entries(rng), rng.chance(1, 2));
            ("lists unasked", ControlFrame::ListResponse { request: rng.below(3) as u32, entries, more })
        }
        8 => ("answers a ping that nobody sent", ControlFrame::Pong { nonce: rng.next_u64() }),
        9 => ("greets again", hello(rogue_name(talk.rogue.place), rng)),
        10 => return flood(talk, rng).await,
        11 => {
            let replaces = rng.pick([connection, 1, u32::MAX]);
            ("offers a standby with junk", ControlFrame::Standby { replaces, offer: own })
        }
        12 => ("retires a connection that it goes on to use", ControlFrame::Retired { connection }),
        _ => return odd(talk, rng).await,
    };
    talk.stage().did(deed);
    talk.say(frame).await;
    true
}

/// Sends bytes that are no frame, earlier frames, and deeds of several frames. False if it ends the session.
async fn odd(talk: &Arc<Talk>, rng: &mut Rng) -> bool {
    let known = talk.frames();
    let replayed = (!known.is_empty()).then(|| known[rng.below(known.len())].clone());
    match rng.below(5) {
        0 => {
            talk.stage().did("sends junk for a frame");
            talk.frame(junk(rng)).await;
            rng.chance(1, 2)
        }
        1 | 2 => {
            let Some(bytes) = replayed else { return true };
            if rng.chance(1, 2) {
                talk.stage().did("sends a frame again");
                talk.frame(bytes).await;
            } else {
                talk.stage().did("sends a frame with a bit flipped");
                talk.frame(flipped(bytes, rng)).await;
            }
            true
        }
        3 => {
            talk.open(rng).await;
            talk.stage().did("asks for one more connection");
            true
        }
        _ => {
            talk.stage().did("says goodbye");
            let status = Status::new(Code::Unavailable, "");
            talk.say(ControlFrame::Goodbye { status }).await;
            rng.chance(1, 2)
        }
    }
}

fn offer_of(rng: &mut Rng) -> tensorwire_protocol::wire::control::RingOffer {
    let destination = |capacity| tensorwire_protocol::Destination {
        region: rng.next_u64() as u32,
        generation: 0,
        offset: 0,
        capacity,
        result: None,
    };
    let mut destination = destination;
    tensorwire_protocol::wire::control::RingOffer {
        destination: destination(16 << 10),
        slots: destination(128),
    }
}

fn entries(rng: &mut Rng) -> Vec<ListEntry> {
    let entry = |number: u64| ListEntry {
        name: format!("p{number}"),
        metadata: value_of(8, &mut Rng::new(number)).0,
        version: number,
        checksum: None,
    };
    (0..rng.pick([0_u64, 1, 500])).map(entry).collect()
}

/// Sends far more frames of one kind than a worker needs.
async fn flood(talk: &Arc<Talk>, rng: &mut Rng) -> bool {
    match rng.below(3) {
        0 => {
            talk.stage().did("floods with pings");
            for nonce in 0..40 {
                talk.frame(ControlFrame::Ping { nonce }.encode()).await;
            }
        }
        1 => {
            talk.stage().did("floods with requests for lists and reports");
            for request in 0..80 {
                let frame = match request % 2 {
                    0 => ControlFrame::ListRequest { request, after: None, with_checksums: true },
                    _ => ControlFrame::ReportRequest { request },
                };
                talk.frame(frame.encode()).await;
            }
        }
        _ => {
            talk.stage().did("floods with connections");
            for _ in 0..20 {
                talk.open(rng).await;
            }
        }
    }
    true
}
