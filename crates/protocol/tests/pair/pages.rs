//! Contents that consist of pages: one write, into the room that the request names.

use tensorwire_protocol::{
    Destination, Metadata, Parameters, RequestIndex, Scope, TensorRequest, Validation, Want,
};

use crate::support::{
    Side::A,
    bytes_of,
    lone::Lone,
    pair::{original, small},
};

const PAGES: Scope = Scope::Pages(None);
const KEY: &str = "kv{0>0+3}";
/// Three pages of 8 bytes, of which the last one ends here.
const ROOM: u64 = 40;

fn into(capacity: u64) -> Want {
    Want::Write(Some(Destination { region: 0, generation: 0, offset: 0, capacity, result: None }))
}

fn request(known: &[Metadata], want: Want) -> TensorRequest {
    TensorRequest { index: RequestIndex(0), scope: PAGES, key: KEY.into(), known: known.into(), want }
}

/// A sender with pages, which are asked for.
fn asked(parameters: Parameters, pages: u64, request: TensorRequest) -> Lone {
    let mut lone = Lone::new(parameters);
    lone.source.send_bytes(PAGES, KEY, 8 * pages, 7);
    lone.request(request);
    lone.absorb();
    lone
}

/// Whether the pages went out. What was refused was answered with one ERROR_STATUS, and nothing was written.
fn are_sent(lone: &Lone) -> bool {
    let counters = lone.connection.counters();
    let written = lone.wire.trace().contains(&(A, "pages"));
    assert_eq!(counters.sent.error_status, u64::from(!written));
    assert_eq!(counters.sent.meta_data_response, 0);
    written
}

#[test]
fn pages_are_one_write_and_no_message() {
    let lone = asked(small(), 3, request(&[bytes_of(24)], into(ROOM)));
    assert!(are_sent(&lone));
    assert_eq!(lone.connection.counters().sent.total(), 0);
}

#[test]
fn pages_without_room_are_refused_and_none_is_written() {
    let eager = Parameters { eager_bytes_max: 4096, ..small() };
    for parameters in [small(), eager] {
        for request in [
            // A page would end one byte behind the room.
            request(&[bytes_of(24)], into(ROOM - 1)),
            // Room for other pages than the key names, for one of two contents, or none.
            request(&[bytes_of(32)], into(ROOM)),
            request(&[bytes_of(24), bytes_of(8)], into(ROOM)),
            request(&[], Want::Write(None)),
            request(&[bytes_of(24)], Want::Eager),
            request(&[bytes_of(24)], Want::View),
        ] {
            let what = format!("{request:?}");
            assert!(!are_sent(&asked(parameters, 3, request)), "{what}");
        }
    }
}

#[test]
fn what_the_fabric_cannot_write_at_once_and_what_must_be_validated_is_refused() {
    assert!(!are_sent(&asked(small(), 5, request(&[bytes_of(40)], into(100)))));
    let validated = Parameters { validation: Validation::Xxh3, ..original() };
    assert!(!are_sent(&asked(validated, 3, request(&[bytes_of(24)], into(ROOM)))));
}
