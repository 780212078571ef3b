//! Listed metadata: a value that alternates between known shapes is written at once.

use tensorwire_protocol::{Metadata, PeerMisbehaved, Want};

use crate::support::{
    STEP, bytes_of, dead,
    lone::Lone,
    pair::{Pair, original, settled, small},
};

fn transfer(pair: &mut Pair, metadata: Metadata, fill: u8) -> bool {
    let before = pair.counters().1.sent.meta_data_response;
    let bytes = vec![fill; metadata.byte_length as usize];
    pair.b.source.send(STEP, "k", metadata.clone(), bytes.clone());
    assert_eq!(pair.pull(STEP, "k"), Ok((metadata, bytes)));
    pair.assert_clean();
    pair.counters().1.sent.meta_data_response > before
}

#[test]
fn flips_between_known_shapes_cost_nothing() {
    let mut pair = Pair::new(small());
    let shapes = [bytes_of(8), bytes_of(24), dead(), bytes_of(0)];
    for shape in &shapes {
        assert!(transfer(&mut pair, shape.clone(), 1), "{shape:?} is new");
    }
    for round in 0..12 {
        let shape = &shapes[round * 7 % 4];
        assert!(!transfer(&mut pair, shape.clone(), round as u8), "{shape:?} is known");
    }
    let request = pair.b.requests.last().unwrap();
    assert_eq!(*request.known, shapes);
    assert!(matches!(request.want, Want::Write(Some(destination)) if destination.capacity == 24));
    // A fifth one replaces the first.
    assert!(transfer(&mut pair, bytes_of(30), 1));
    assert!(!transfer(&mut pair, bytes_of(24), 2));
    assert!(transfer(&mut pair, bytes_of(8), 3));
}

#[test]
fn s3_6_mode_original_knows_one() {
    let mut pair = Pair::new(original());
    for round in 0..4 {
        assert!(transfer(&mut pair, bytes_of(8), round) && transfer(&mut pair, bytes_of(24), round));
    }
}

#[test]
fn d_content_of_metadata_that_was_not_listed() {
    for which in 1..4 {
        let mut lone = Lone::new(small());
        lone.know("k", &bytes_of(8));
        let handle = lone.receive(STEP, "k");
        let index = 1 << 14;
        assert_eq!(lone.immediate(which << 30 | index, 8), Err(PeerMisbehaved::ContentUnasked));
        lone.assert_over(PeerMisbehaved::ContentUnasked);
        assert!(settled(&handle).is_err());
    }
}

#[test]
fn d_content_length_of_another_listed_metadata() {
    let mut lone = Lone::new(small());
    lone.know("k", &bytes_of(8));
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.immediate(1 << 14, 7), Err(PeerMisbehaved::ContentLength));
    lone.assert_over(PeerMisbehaved::ContentLength);
    assert!(settled(&handle).is_err());
}
