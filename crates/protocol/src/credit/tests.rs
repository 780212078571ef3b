//! What two peers agree on, and how deep their queues are.

use super::*;

#[test]
fn depths_follow_the_agreed_depth_and_in_mode_original_requests_and_contents() {
    let local = Parameters { depth: 40, requests_max: 100, contents_max: 5, ..Parameters::default() };
    let peer = Parameters { depth: 30, requests_max: 60, contents_max: 99, ..Parameters::default() };
    assert_eq!(Depths::of(&local, &peer), Depths { send: 34, receive: 30 });
    let original = Parameters { mode: Mode::Original, ..peer };
    assert_eq!(Depths::of(&local, &original), Depths { send: 3 + 5, receive: 2 + 60 });
    assert_eq!(Depths::for_any_peer(&local), Depths { send: 44, receive: 2 + 100 });
}

#[test]
fn numbers_outside_the_limits_are_brought_inside() {
    let wild = Parameters {
        mode: Mode::Counted,
        depth: u32::MAX,
        ring_bytes: u32::MAX,
        requests_max: u32::MAX,
        contents_max: u32::MAX,
        names_max: u32::MAX,
        eager_bytes_max: u32::MAX,
        requests_per_message: u32::MAX,
        piece_bytes: u32::MAX,
        validation: Validation::Off,
    };
    let agreed = Agreed::of(&wild, &wild);
    assert_eq!((agreed.depth, agreed.names_max), (DEPTH_MAX, NAMES_MAX));
    assert_eq!((agreed.requests_max, agreed.eager_bytes_max), (REQUESTS_MAX, EAGER_BYTES_MAX));
    assert_eq!(agreed.requests_per_message, REQUESTS_PER_MESSAGE_MAX);
    assert_eq!(agreed.piece_bytes, Some(PIECE_BYTES_MAX));
    let none = Parameters { depth: 0, requests_max: 0, contents_max: 0, requests_per_message: 0, ..wild };
    let least = Agreed::of(&Parameters { piece_bytes: 0, ..none }, &none);
    assert_eq!(least.piece_bytes, Some(PIECE_BYTES_MIN));
    assert_eq!((least.depth, least.requests_max, least.requests_per_message), (DEPTH_MIN, 1, 1));
    let wild_original = Parameters { mode: Mode::Original, ..wild };
    let agreed = Agreed::of(&wild_original, &wild);
    assert_eq!((agreed.names_max, agreed.eager_bytes_max), (0, 0));
    let most = Depths { send: 3 + CONTENTS_MAX, receive: 2 + REQUESTS_MAX };
    assert_eq!(Depths::of(&wild_original, &wild), most);
    let original = Parameters { mode: Mode::Original, ..none };
    assert_eq!(Agreed::of(&original, &wild).requests_per_message, 1);
    assert_eq!(Depths::of(&original, &none), Depths { send: 4, receive: 3 });
}

#[test]
fn the_smaller_of_two_offers_holds() {
    let default = Parameters::default();
    let small = Parameters {
        depth: 8,
        requests_max: 2,
        names_max: 3,
        eager_bytes_max: 4,
        requests_per_message: 5,
        piece_bytes: 4096,
        ..default
    };
    for agreed in [Agreed::of(&small, &default), Agreed::of(&default, &small)] {
        assert_eq!((agreed.depth, agreed.requests_max, agreed.names_max), (8, 2, 3));
        assert_eq!((agreed.eager_bytes_max, agreed.requests_per_message), (4, 5));
        assert_eq!(agreed.piece_bytes, Some(4096));
    }
}

#[test]
fn each_number_outside_its_limits_is_named_with_them() {
    type Field = (&'static str, fn(&mut Parameters) -> &mut u32, u32, u32);
    let fields: [Field; 8] = [
        ("depth", |of| &mut of.depth, DEPTH_MIN, DEPTH_MAX),
        ("ring_bytes", |of| &mut of.ring_bytes, RING_BYTES_MIN, RING_BYTES_MAX),
        ("requests_max", |of| &mut of.requests_max, 1, REQUESTS_MAX),
        ("contents_max", |of| &mut of.contents_max, 1, CONTENTS_MAX),
        ("names_max", |of| &mut of.names_max, 0, NAMES_MAX),
        ("eager_bytes_max", |of| &mut of.eager_bytes_max, 0, EAGER_BYTES_MAX),
        ("requests_per_message", |of| &mut of.requests_per_message, 1, REQUESTS_PER_MESSAGE_MAX),
        ("piece_bytes", |of| &mut of.piece_bytes, PIECE_BYTES_MIN, PIECE_BYTES_MAX),
    ];
    for (name, field_of, minimum, maximum) in fields {
        let check = |value| {
            let mut parameters = Parameters::default();
            *field_of(&mut parameters) = value;
            parameters.check()
        };
        assert_eq!((check(minimum), check(maximum)), (Ok(()), Ok(())), "{name}");
        for value in [minimum.wrapping_sub(1), maximum + 1] {
            assert_eq!(check(value), Err(WireError::OutOfRange { field: name, value, minimum, maximum }));
        }
    }
}

#[test]
fn a_content_ends_with_all_of_it_or_with_its_last_piece() {
    let own = Parameters { piece_bytes: 4096, ..Parameters::default() };
    let in_pieces = Agreed::of(&own, &Parameters::default());
    for (content, last) in [(4097, 1), (8192, 4096), (10_000, 1808)] {
        assert!(in_pieces.fits(content, content) && in_pieces.fits(content, last), "{content}");
        let others = [0, last - 1, last + 1, content - 1, content + 1, last + RESULT_BYTES as u64];
        assert!(others.into_iter().all(|length| !in_pieces.fits(content, length)), "{content}");
        let original = Agreed::of(&Parameters { mode: Mode::Original, ..own }, &own);
        assert!(original.fits(content, content) && !original.fits(content, last), "{content}");
    }
    assert!(in_pieces.fits(0, 0) && in_pieces.fits(4096, 4096) && !in_pieces.fits(4096, 0));
    let validated = Agreed::of(&Parameters { validation: Validation::Xxh3, ..own }, &own);
    assert!([10_000, 10_024, 1808, 1832].into_iter().all(|length| validated.fits(10_000, length)));
    assert!([1784, 1856, 9976, 10_048].into_iter().all(|length| !validated.fits(10_000, length)));
    assert!(validated.fits(1, 25) && !validated.fits(0, 24), "only a content has a result behind it");
}

#[test]
fn the_last_credit_is_what_is_left_of_those_that_were_not_returned() {
    let parameters = Parameters { depth: 5, ..Parameters::default() };
    let ring = parameters.ring_bytes;
    let mut flow = Flow::new(&Agreed::of(&parameters, &parameters), ring, ring, ring);
    let mut left = Vec::new();
    for _ in 0..3 {
        left.push(flow.is_last_credit());
        flow.post_content().unwrap();
    }
    assert_eq!((left, flow.is_last_credit()), (vec![false, false, true], false));
    for (receives, is_last) in [(1, true), (2, false)] {
        flow.take_message(0, Counts { receives, ring_bytes: 0 }).unwrap();
        assert_eq!(flow.is_last_credit(), is_last, "{receives} of 3 are returned");
    }

    let original = Parameters { mode: Mode::Original, ..parameters };
    let flow = Flow::new(&Agreed::of(&original, &original), ring, ring, ring);
    assert!(flow.has_credit() && !flow.is_last_credit(), "mode original counts no contents");
}
