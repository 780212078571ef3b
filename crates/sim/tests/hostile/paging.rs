//! What a rogue does with pages: those that honest workers ask for or write, and those of their arenas.

use std::num::NonZeroU64;

use tensorwire_protocol::{
    Code, Destination, ErrorStatus, Message, MetaDataResponse, PageWrite, RequestIndex, Scope, Status,
    TensorRequest, Want, pages::PageMoves,
};
use tensorwire_sim::Rng;

use super::{
    answers,
    line::Line,
    memory_of::range_of,
    stage::{PAGE_BYTES, PAGES},
};

/// Keys of requests for pages of the honest workers' arena: valid ones, and others.
const KEYS: [&str; 14] = [
    "kv{0>0}",
    "kv{1>2,3>4}",
    "kv{0>0+8}",
    "kv{5>1+3}",
    "kv{}",
    "kv{0>0+9}",
    "kv{7>7+2}",
    "kv{0>0,1>0}",
    "kv{0>4294967295}",
    "kv{0>0+4294967295}",
    "kv{00>1}",
    "kv{",
    "kv",
    "none{0>0}",
];

/// The places of the pages that a request asks for, relative to its destination.
pub(super) fn places(request: &TensorRequest) -> Vec<u64> {
    let moves = match request.scope {
        Scope::Pages(_) => PageMoves::split(&request.key).map(|(_, moves)| moves).unwrap_or_default(),
        _ => return Vec::new(),
    };
    moves.as_slice().iter().map(|page| u64::from(page.to) * PAGE_BYTES as u64).collect()
}

/// Makes a request of the rogue one for pages, or for the size of an arena, or a write of pages.
pub(super) fn request(line: &Line, request: TensorRequest, rng: &mut Rng) -> TensorRequest {
    let key = KEYS[rng.below(KEYS.len())];
    let number = NonZeroU64::new(rng.below(3) as u64);
    let scope = match number {
        Some(number) if rng.chance(2, 3) => {
            line.did("asks a worker to take pages");
            Scope::PageWrite(PageWrite { number, note: rng.chance(1, 2).then_some(rng.below(3) as u64) })
        }
        number => {
            line.did("asks for pages");
            Scope::Pages(number.filter(|_| rng.chance(1, 2)))
        }
    };
    let count = PageMoves::split(key).map_or(1, |(_, moves)| moves.as_slice().len());
    let request = TensorRequest { scope, key: key.into(), ..request };
    if rng.chance(1, 3) { request } else { with_room(line, request, count) }
}

/// With the room that pages need.
fn with_room(line: &Line, request: TensorRequest, count: usize) -> TensorRequest {
    let room = line.rogue.lent.lend((PAGES as usize * PAGE_BYTES) as u32).map(|(_, _, lent)| lent);
    let known = answers::value_of(count * PAGE_BYTES, &mut Rng::new(1)).0;
    TensorRequest { known: [known].into(), want: Want::Write(room), ..request }
}

fn destination(request: &TensorRequest) -> Option<Destination> {
    match request.want {
        Want::Write(destination) => destination,
        Want::Eager | Want::View | Want::Each(_) => None,
    }
}

/// Answers an honest worker's request that is about pages. Returns whether it has.
pub(super) fn answer(line: &Line, request: &TensorRequest, rng: &mut Rng) -> bool {
    match request.scope {
        Scope::PageWrite(write) => take(line, request, write, rng),
        Scope::Pages(_) if places(request).is_empty() => tell_size(line, request.index, rng),
        Scope::Pages(_) => give(line, request, rng),
        _ => return false,
    }
    true
}

fn inside(line: &Line, index: RequestIndex, bytes: &[u8]) {
    let fits = bytes.len() <= line.agreed.eager_bytes_max as usize;
    let response = answers::response(line, index, bytes, fits.then_some(bytes));
    line.message(&Message::MetaDataResponse(response));
}

/// The size of an arena.
fn tell_size(line: &Line, index: RequestIndex, rng: &mut Rng) {
    let mut size = [PAGE_BYTES as u64, PAGES.into()];
    if rng.chance(1, 4) {
        line.did("lies about the size of an arena");
        size[rng.below(2)] = rng.pick([0, 1, 1 << 33, u64::MAX]);
    }
    let mut bytes = size.map(u64::to_le_bytes).as_flattened().to_vec();
    if rng.chance(1, 8) {
        line.did("tells half a size of an arena");
        bytes.truncate(rng.below(16));
    }
    inside(line, index, &bytes);
}

/// Pages that an honest worker asks for.
fn give(line: &Line, request: &TensorRequest, rng: &mut Rng) {
    let (index, places) = (request.index, places(request));
    let length = places.len() * PAGE_BYTES;
    let immediate = index.immediate(0);
    match rng.below(11) {
        0 => {
            line.did("describes pages instead of writing them");
            let length = rng.pick([length, 0, 1, 2 * length]);
            let response = answers::response(line, index, &vec![1; length], None);
            line.message(&Message::MetaDataResponse(response));
        }
        1 => {
            line.did("sends pages inside a message");
            inside(line, index, &vec![2; rng.pick([length, 1])]);
        }
        2 => {
            line.did("answers with an error for pages");
            let status = Status::new(Code::Unavailable, "rogue");
            line.message(&Message::ErrorStatus(ErrorStatus { index, status }));
        }
        3 => {
            line.did("says that pages are there, and writes none");
            line.content(None, &[], rng.pick([immediate, index.immediate(3)]));
        }
        4 => {
            line.did("writes fewer pages than it should");
            write(line, request, &places[1..], rng);
            line.content(None, &[], immediate);
        }
        5 => {
            line.did("writes other pages than it should");
            let all: Vec<u64> = (0..u64::from(PAGES)).map(|page| page * PAGE_BYTES as u64).collect();
            write(line, request, &all, rng);
            line.content(None, &[], immediate);
        }
        6 => {
            line.did("promises a loan of pages");
            let bytes = vec![3; length];
            let response = answers::response(line, index, &bytes, None);
            let checksum = line.agreed.validation.checksum(&bytes);
            let response = MetaDataResponse { loan_follows: true, checksum, ..response };
            line.message(&Message::MetaDataResponse(response));
        }
        7 => {
            line.did("writes pages on after the answer");
            write(line, request, &places, rng);
            line.content(None, &[], immediate);
            write(line, request, &places, rng);
        }
        _ => {
            line.did("gives pages");
            write(line, request, &places, rng);
            line.content(None, &[], immediate);
        }
    }
}

fn write(line: &Line, request: &TensorRequest, places: &[u64], rng: &mut Rng) {
    let Some(destination) = destination(request) else { return };
    for place in places {
        line.write(range_of(&destination, *place, 0), &[rng.next_u64() as u8; PAGE_BYTES], None);
    }
}

/// Pages that an honest worker writes.
fn take(line: &Line, asked: &TensorRequest, write: PageWrite, rng: &mut Rng) {
    let index = asked.index;
    if rng.chance(5, 6) {
        line.did("takes pages");
        let number = if rng.chance(1, 6) { NonZeroU64::new(rng.next_u64()) } else { Some(write.number) };
        let key = if rng.chance(1, 4) { KEYS[rng.below(KEYS.len())].into() } else { asked.key.clone() };
        let count = PageMoves::split(&key).map_or(1, |(_, moves)| moves.as_slice().len());
        let index = RequestIndex(line.next_index());
        let request = TensorRequest { index, scope: Scope::Pages(number), key, ..asked.clone() };
        line.message(&Message::TensorRequest(with_room(line, request, count)));
    }
    match rng.below(5) {
        0 => {
            line.did("refuses pages");
            let status = Status::new(Code::Unavailable, "rogue");
            line.message(&Message::ErrorStatus(ErrorStatus { index, status }));
        }
        1 => {
            line.did("answers pages with bytes");
            inside(line, index, &[4; 64]);
        }
        2 => line.did("takes pages and says nothing"),
        _ => {
            let response = answers::response(line, index, &[], None);
            line.message(&Message::MetaDataResponse(response));
        }
    }
}
