//! What a rogue does on its own initiative, over its data connections.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::{RegionGeneration, RegionId, RemoteRange};
use tensorwire_protocol::{
    Code, Destination, ErrorStatus, Message, Note, RequestIndex, ResultSlot, Scope, Status, StepId,
    TensorReRequest, TensorRequest, VersionNotice, Want, Wanted,
    credit::{Answer, Ask, Counts},
    limits::NOTES_UNTAKEN_MAX,
    names::NameForm,
    wire::record::{self, Control},
};
use tensorwire_sim::Rng;

use super::{
    answers, calling, frames,
    line::{ACKNOWLEDGEMENT, Line, MESSAGE},
    memory_of::{range_of, region_of},
    paging,
    rogue::Talk,
    stage::{NOTES, device, rogue_device},
    subscribing,
};

/// Does the deeds of one session.
pub(super) async fn go(talk: &Arc<Talk>, rng: &mut Rng) {
    for _ in 0..rng.below(talk.stage().setup.deeds + 1) {
        let longest = rng.pick([0, 100, 5000, 100_000]);
        talk.rogue.rest(rng, Duration::from_micros(longest)).await;
        let lines: Vec<_> =
            talk.lines().into_iter().filter(|line| line.queue_pair.failure().is_none()).collect();
        let line = (!lines.is_empty()).then(|| lines[rng.below(lines.len())].clone());
        let goes_on = match line {
            None if rng.chance(2, 3) => {
                talk.open(rng).await;
                talk.rogue.rest(rng, Duration::from_millis(30)).await;
                true
            }
            Some(line) if rng.chance(5, 6) => {
                on_line(&line, rng).await;
                true
            }
            _ => frames::deed(talk, rng).await,
        };
        if !goes_on {
            return;
        }
    }
}

async fn on_line(line: &Arc<Line>, rng: &mut Rng) {
    match rng.below(18) {
        16 => subscribing::subscribe(line, rng),
        17 => subscribing::unasked(line, index(line, rng), rng),
        0..3 => message(line, rng),
        3 => bytes(line, rng),
        4 => flow_control(line, rng),
        5 => immediates(line, rng),
        6..9 => touch(line, rng),
        9 => flood(line, rng).await,
        10 if rng.chance(1, 3) => {
            line.did("closes a connection");
            line.queue_pair.close().await;
        }
        _ => for_a_value(line, rng),
    }
}

fn index(line: &Line, rng: &mut Rng) -> RequestIndex {
    let requests = line.requests();
    if !requests.is_empty() && rng.chance(1, 2) {
        return requests[rng.below(requests.len())].index;
    }
    // An index that the honest worker uses next, or has just taken and not sent.
    let latest = requests.last().map_or(0, |request| request.index.0);
    let (next, again) = (latest.wrapping_add(1), latest.wrapping_add(1 << 14));
    RequestIndex(rng.pick([0, 1, 2, 5, next, next, again, 1 << 14, (1 << 30) - 1, 0xFFFF_FFF5]))
}

/// An arbitrary destination.
fn destination(line: &Line, rng: &mut Rng) -> Option<Destination> {
    let capacity = rng.pick([0, 1, 64, 20_000, u64::MAX]);
    let lent = line.rogue.lent.lend(64).map(|(_, _, destination)| destination);
    let slot =
        lent.map(|lent| ResultSlot { region: lent.region, generation: lent.generation, offset: lent.offset });
    let wants_slot = line.agreed.has_result_slots() != rng.chance(1, 10);
    let result = slot.filter(|_| wants_slot);
    match rng.below(4) {
        0 => None,
        1 => Some(Destination {
            region: rng.pick([0, 1, 77, u32::MAX]),
            generation: rng.next_u64() as u32,
            offset: rng.pick([0, 64, u64::MAX, u64::MAX - 63]),
            capacity,
            result,
        }),
        _ => {
            let (_, _, lent) = line.rogue.lent.lend(20_000)?;
            Some(Destination { capacity: rng.pick([lent.capacity, capacity]), result, ..lent })
        }
    }
}

fn request(line: &Line, rng: &mut Rng) -> TensorRequest {
    let key = match rng.below(4) {
        0 | 1 => "p0".to_owned(),
        2 => format!("none{}", rng.below(3)),
        _ => {
            let (from, to) = (device(line.target), rogue_device(line.rogue.place));
            format!("{from};0;{to};edge;0:0")
        }
    };
    let scope = match rng.below(5) {
        0 => Scope::Step(StepId(rng.pick([0, 500, 1500, -1, i64::MAX]))),
        1 => Scope::Versioned(Wanted::Now),
        2 => Scope::Versioned(Wanted::NewerThan { incarnation: 0, version: rng.next_u64() }),
        _ => Scope::Published,
    };
    let want = match rng.below(4) {
        0 => Want::Eager,
        1 => Want::View,
        _ => Want::Write(destination(line, rng)),
    };
    let known = (0..rng.below(5)).map(|_| Line::value(rng).0).collect::<Vec<_>>();
    let request = TensorRequest {
        index: RequestIndex(line.next_index()),
        scope,
        key: key.into(),
        known: known.into(),
        want,
        arguments: None,
    };
    match rng.below(6) {
        0 => paging::request(line, request, rng),
        1 => calling::request(line, request, rng),
        _ => request,
    }
}

/// Requests a value of the honest worker, and continues the exchange in any way.
fn for_a_value(line: &Line, rng: &mut Rng) {
    line.did("asks for a value");
    let request = request(line, rng);
    let index = request.index;
    line.message(&Message::TensorRequest(request));
    match rng.below(6) {
        0 => {
            line.did("cancels a request twice");
            line.message(&Message::Cancel(index));
            line.message(&Message::Cancel(index));
        }
        1 => drop(line.message(&Message::Cancel(index))),
        2 => {
            line.did("sends RE_REQUEST, due or not");
            let destination = destination(line, rng);
            line.message(&Message::TensorReRequest(TensorReRequest { index, destination }));
        }
        _ => {}
    }
}

/// Requests far more than it may, all values that are never sent.
async fn flood(line: &Line, rng: &mut Rng) {
    line.did("floods with requests");
    let mut one = |_| TensorRequest {
        scope: Scope::Step(StepId(77_777)),
        known: [].into(),
        want: Want::Write(None),
        ..request(line, rng)
    };
    let requests: Vec<_> = (0..line.agreed.requests_max.min(64) + 70).map(&mut one).collect();
    let most = (line.agreed.requests_per_message as usize).min(30);
    for several in requests.chunks(most.max(1)) {
        let message = match several {
            [one] => Message::TensorRequest(one.clone()),
            several => Message::TensorRequests(several.to_vec()),
        };
        // The ring empties while it waits.
        for _ in 0..20 {
            if line.message(&message) || line.queue_pair.failure().is_some() {
                break;
            }
            line.rogue.rest(&mut Rng::new(1), Duration::from_millis(20)).await;
        }
    }
}

/// A well-formed message, legal now or not.
fn message(line: &Line, rng: &mut Rng) {
    let index = index(line, rng);
    let (metadata, value) = Line::value(rng);
    let message = match rng.below(10) {
        0 => {
            line.did("uses an index again");
            let request = TensorRequest { index: RequestIndex(0), ..request(line, rng) };
            line.message(&Message::TensorRequest(request.clone()));
            Message::TensorRequest(request)
        }
        1 => {
            line.did("asks for many values");
            let most = (line.agreed.requests_per_message as usize).max(2);
            let count = rng.pick([2, 3, most, most + 1]).min(100);
            Message::TensorRequests((0..count).map(|_| request(line, rng)).collect())
        }
        2 | 3 => {
            line.did("sends RE_REQUEST unasked");
            Message::TensorReRequest(TensorReRequest { index, destination: destination(line, rng) })
        }
        4 => {
            line.did("answers a request that may not be");
            let content = rng.chance(1, 2).then_some(value.as_slice()).filter(|value| value.len() < 4096);
            let response = answers::response(line, index, &value, content);
            Message::MetaDataResponse(tensorwire_protocol::MetaDataResponse { metadata, ..response })
        }
        5 => {
            line.did("sends an error for a request that may not be");
            let status = Status::new(Code::Internal, "rogue");
            Message::ErrorStatus(ErrorStatus { index, status })
        }
        6 => {
            line.did("acknowledges a cancel unasked");
            Message::CancelAck(index)
        }
        7 => {
            line.did("cancels what may not be");
            Message::Cancel(index)
        }
        8 => {
            line.did("sends notes");
            let lane = rng.below(4) as u16;
            let note = Message::Note(Note { channel: NOTES, lane, bytes: vec![1; rng.below(100)].into() });
            for _ in 0..rng.below(2 * NOTES_UNTAKEN_MAX) {
                line.message(&note);
            }
            note
        }
        _ => {
            line.did("tells a version of what may not be");
            Message::Version(VersionNotice { index, version: 3 })
        }
    };
    line.message(&message);
}

/// Records that no honest end writes.
fn bytes(line: &Line, rng: &mut Rng) {
    let whole = line.encoded(line.counts(), NameForm::Plain, &Message::TensorRequest(request(line, rng)));
    let sent = line.sent();
    let record = match rng.below(7) {
        0 => {
            line.did("writes junk for a message");
            frames::junk(rng)
        }
        1 => {
            line.did("writes a message with a bit flipped");
            frames::flipped(whole, rng)
        }
        2 => {
            line.did("writes half a message");
            whole[..whole.len() / 2].to_vec()
        }
        3 => {
            line.did("writes an endless message");
            u32::MAX.to_le_bytes().to_vec()
        }
        4 => {
            let Some(again) = sent.get(rng.below(sent.len())) else { return };
            line.did("writes a message again");
            again.clone()
        }
        5 => {
            line.did("names a key by a number of its own");
            let message = Message::TensorRequest(request(line, rng));
            line.encoded(line.counts(), NameForm::Number(rng.pick([0, 9, u16::MAX])), &message)
        }
        _ => {
            line.did("writes several messages in the wrong order");
            let ring = line.peer.ring.destination;
            line.notify(MESSAGE.0);
            line.write(range_of(&ring, 0, 0), &whole, None);
            return;
        }
    };
    line.record(&record);
}

fn flow_control(line: &Line, rng: &mut Rng) {
    let counts = Counts {
        receives: rng.pick([0, 1, 1000, u32::MAX]),
        ring_bytes: rng.pick([0, 1, 1 << 20, u32::MAX]),
    };
    let control = |control| {
        let mut bytes = Vec::new();
        record::encode_control(line.counts(), control, &mut bytes);
        bytes
    };
    let ring = line.peer.ring.destination;
    match rng.below(8) {
        0 => {
            line.did("returns too much");
            let message = Message::TensorRequest(request(line, rng));
            line.record(&line.encoded(counts, NameForm::Plain, &message));
        }
        1 => {
            line.did("offers a ring of any size");
            let capacity = rng.pick([0, 1, 16 << 10, 32 << 10, 1 << 20]);
            for _ in 0..rng.within(1..3) {
                line.record(&control(Control::RingOffer(Destination { capacity, ..ring })));
            }
        }
        2 => {
            line.did("moves to a ring that was not offered");
            line.record(&control(Control::RingMoved));
        }
        3 => {
            line.did("asks out of turn");
            let ask = Ask {
                counts: line.counts(),
                answers: rng.pick([0, 1, 7]),
                wanted: rng.pick([0, 1, u32::MAX]),
            };
            line.slot(0, &record::encode_ask(ask));
        }
        4 => {
            line.did("answers without an ASK");
            let counts = rng.pick([counts, line.counts()]);
            line.slot(1, &record::encode_answer(Answer { counts, asks: rng.pick([0, 1, 7]) }));
        }
        5 => {
            line.did("sends a flow record of no length that is");
            line.slot(rng.below(2) as u64, &[0; 13]);
        }
        6 => {
            line.did("sends count-only messages");
            for _ in 0..rng.within(1..6) {
                line.record(&control(Control::CountOnly));
            }
        }
        _ => {
            line.did("acknowledges what nobody sent");
            line.notify(ACKNOWLEDGEMENT.0);
        }
    }
}

fn immediates(line: &Line, rng: &mut Rng) {
    let index = index(line, rng);
    match rng.below(5) {
        0 => {
            line.did("uses a reserved immediate");
            line.notify(0xFFFF_FFF5);
        }
        1 => {
            line.did("uses any immediate");
            line.notify(rng.next_u64() as u32);
        }
        2 => {
            line.did("says that content is there");
            line.notify(index.immediate(rng.below(4)));
        }
        3 => {
            line.did("says that a message is there");
            line.notify(MESSAGE.0);
        }
        _ => {
            line.did("floods with immediates");
            let immediate = rng.pick([MESSAGE.0, ACKNOWLEDGEMENT.0, index.immediate(0)]);
            (0..40).for_each(|_| line.notify(immediate));
        }
    }
}

/// Accesses memory of the honest worker that was granted to it, and memory that was not.
fn touch(line: &Line, rng: &mut Rng) {
    let mut lent = line.destinations();
    lent.extend([line.peer.ring.destination, line.peer.ring.slots]);
    let at = lent[rng.below(lent.len())];
    let some = rng.below(200.min(at.capacity as usize)) + 1;
    let offset = rng.below((at.capacity as usize).saturating_sub(some) + 1) as u64;
    let junk: Vec<u8> = (0..some).map(|_| rng.next_u64() as u8).collect();
    let inside = range_of(&at, offset, 0);
    match rng.below(7) {
        0..3 => {
            line.did("writes what it is lent, or was");
            line.write(inside, &junk, None);
        }
        3 => {
            line.did("writes beyond what it is lent");
            let beyond = rng.pick([at.capacity, 1 << 20, 1 << 40, u64::MAX - at.offset - 200]);
            let known = line.peer.regions.iter().find(|record| record.region == at.region);
            if let Some(mut region) = known.map(region_of) {
                // Otherwise the local fabric would refuse it.
                region.length = u64::MAX;
                line.queue_pair.add_remote_region(region);
            }
            line.write(range_of(&at, beyond, 0), &junk, None);
        }
        4 => with_a_wrong_key(line, inside, &junk, rng),
        5 => with_anothers_key(line, &junk, rng),
        _ => {
            line.did("reads");
            if let Some(into) = line.rogue.source.buffer(some) {
                drop(line.queue_pair.read(RemoteRange { length: some as u64, ..inside }, into));
            }
        }
    }
}

fn with_a_wrong_key(line: &Line, range: RemoteRange, junk: &[u8], rng: &mut Rng) {
    let known = line.peer.regions.iter().find(|record| record.region == range.region.0);
    let Some(right) = known.map(region_of) else { return };
    let mut wrong = right;
    match rng.below(3) {
        0 => {
            line.did("writes with a wrong key");
            wrong.key = wrong.key.wrapping_add(1);
        }
        1 => {
            line.did("writes with an old generation");
            wrong.generation = RegionGeneration(wrong.generation.0.wrapping_sub(1));
        }
        _ => {
            line.did("writes to a region that is none");
            wrong.region = RegionId(rng.pick([wrong.region.0 + 50, 1 << 31, u32::MAX]));
        }
    }
    line.queue_pair.add_remote_region(wrong);
    line.write(RemoteRange { region: wrong.region, generation: wrong.generation, ..range }, junk, None);
    line.queue_pair.add_remote_region(right);
}

/// Uses a region that another honest worker, or another connection, has announced.
fn with_anothers_key(line: &Line, junk: &[u8], rng: &mut Rng) {
    let known = line.rogue.regions.lock().unwrap().clone();
    let Some((_, record)) = known.get(rng.below(known.len())) else { return };
    if line.peer.regions.contains(record) {
        return;
    }
    line.did("writes with a key of another connection");
    let region = region_of(record);
    line.queue_pair.add_remote_region(region);
    let offset = rng.below(4096) as u64;
    let range = RemoteRange { region: region.region, generation: region.generation, offset, length: 0 };
    line.write(range, junk, None);
    line.peer.regions.iter().for_each(|record| line.add_region(record));
}
