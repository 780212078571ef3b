//! Versions of published values: sent before the answer, of exactly the value that comes.

use tensorwire_protocol::{
    EagerContent, ErrorStatus, Message, MetaDataResponse, Metadata, Parameters, PeerMisbehaved, RequestIndex,
    Scope, Status, VersionNotice, Wanted, limits::EAGER_BYTES_MAX,
};

use crate::support::{
    Side::{A, B},
    bytes_of, dead,
    lone::Lone,
    pair::{Pair, ReceiveResult, original, settled, small},
    tasks::Handle,
};

const NOW: Scope = Scope::Versioned(Wanted::Now);
const NEWER: Scope = Scope::Versioned(Wanted::NewerThan { incarnation: 1, version: 1 });

fn eager() -> Parameters {
    Parameters { eager_bytes_max: EAGER_BYTES_MAX, ..small() }
}

/// The version that came, and the value.
fn versioned(handle: &Handle<ReceiveResult>) -> (Option<u64>, Metadata, Vec<u8>) {
    let received = handle.take().expect("it has ended").unwrap();
    let length = received.metadata.byte_length as usize;
    let bytes = received.lent.map(|lent| lent.finish(length)).unwrap_or_default();
    (received.version, received.metadata, bytes)
}

/// Messages that `end` has sent, without VERSION, and VERSION alone.
fn sent(pair: &Pair) -> (u64, u64) {
    let sent = pair.b.connection.counters().sent;
    (sent.total() - sent.version, sent.version)
}

#[test]
fn every_way_of_answering_tells_the_version_of_what_it_delivers_for_one_message_more() {
    for parameters in [small(), eager(), original()] {
        for is_view in [false, true] {
            let (mut plain, mut pair) = (Pair::new(parameters), Pair::new(parameters));
            [&plain, &pair].into_iter().for_each(|pair| pair.wire.allow_loans(B, 100));
            // Unknown and known forms, contents inside messages, values of no bytes, and changes between these.
            let values = [24, 24, 0, 0, 24, 9000, 24, 9000].map(bytes_of);
            for (version, metadata) in (1..).zip(values.into_iter().chain([dead(), dead()])) {
                let bytes = vec![version as u8; metadata.byte_length as usize];
                let mut costs = [(0, 0); 2];
                for ((pair, scope), cost) in
                    [(&mut plain, Scope::Published), (&mut pair, NOW)].into_iter().zip(&mut costs)
                {
                    let before = sent(pair);
                    pair.b.source.send(scope, "k", metadata.clone(), bytes.clone());
                    let handle = if is_view { pair.view(scope, "k") } else { pair.receive(A, scope, "k") };
                    pair.run();
                    let expected = (scope == NOW).then_some(version);
                    assert_eq!(versioned(&handle), (expected, metadata.clone(), bytes.clone()));
                    *cost = (sent(pair).0 - before.0, sent(pair).1 - before.1);
                    pair.assert_clean();
                }
                assert_eq!((costs[0].1, costs[1].1), (0, 1));
                assert_eq!(costs[0].0, costs[1].0, "{parameters:?} {metadata:?}");
            }
        }
    }
}

#[test]
fn what_is_known_of_a_published_value_is_known_however_it_is_asked_for() {
    let mut pair = Pair::new(small());
    for scope in [Scope::Published, NOW, NEWER] {
        pair.b.source.send_bytes(scope, "k", 24, 1);
        assert!(pair.pull(scope, "k").is_ok());
    }
    assert_eq!(pair.b.connection.counters().sent.meta_data_response, 1);
    pair.assert_clean();
}

#[test]
fn a_wait_for_a_newer_version_lends_memory_only_if_there_is_some_and_can_be_given_up() {
    for blocks in [1, 0] {
        let mut pair = Pair::with(small(), small(), 1);
        pair.b.source.send_bytes(NOW, "k", 24, 1);
        assert!(pair.pull(NOW, "k").is_ok());
        let taken = (blocks == 0).then(|| {
            pair.b.source.send_bytes(NOW, "k", 24, 1);
            let handle = pair.receive(A, NOW, "k");
            pair.run();
            handle.take().expect("it has ended").unwrap()
        });
        let waiting = pair.receive(A, NEWER, "k");
        pair.run();
        assert!(!waiting.is_done() && pair.b.source.waiting(NEWER, "k") == 1);
        assert_eq!(pair.b.requests.last().unwrap().known.len(), blocks);
        pair.tasks.cancel(waiting.task);
        pair.run();
        assert_eq!(pair.b.source.waiting(NEWER, "k"), 0);
        taken.into_iter().filter_map(|received| received.lent).for_each(|lent| drop(lent.finish(24)));
        pair.assert_clean();
    }
}

fn notice(version: u64) -> Message {
    Message::Version(VersionNotice { index: RequestIndex(0), version })
}

fn response(content: Option<&[u8; 8]>, loan_follows: bool) -> Message {
    let (index, metadata) = (RequestIndex(0), bytes_of(8));
    let content = content.map(|bytes| EagerContent::from_slice(bytes));
    Message::MetaDataResponse(MetaDataResponse { index, metadata, content, loan_follows, checksum: None })
}

#[test]
fn s10_version_that_is_not_due_is_misbehaviour() {
    let mut lone = Lone::new(small());
    let _plain = lone.receive(Scope::Published, "k");
    assert_eq!(lone.message(&notice(1)), Err(PeerMisbehaved::VersionUnasked));
    lone.assert_over(PeerMisbehaved::VersionUnasked);

    let mut lone = Lone::new(small());
    let _twice = lone.receive(NOW, "k");
    assert_eq!(lone.message(&notice(1)), Ok(None));
    assert_eq!(lone.message(&notice(1)), Err(PeerMisbehaved::VersionUnasked));

    let mut lone = Lone::new(small());
    let _late = lone.receive(NOW, "k");
    assert_eq!(lone.message(&notice(1)), Ok(None));
    assert_eq!(lone.message(&response(None, false)), Ok(None));
    assert_eq!(lone.message(&notice(2)), Err(PeerMisbehaved::VersionUnasked));

    // A VERSION of a request that never was, or is over, is ignored.
    let mut lone = Lone::new(small());
    assert_eq!(lone.message(&notice(1)), Ok(None));
}

#[test]
fn s10_a_value_without_the_version_that_was_asked_for_is_misbehaviour() {
    for message in [response(None, false), response(Some(&[0; 8]), false)] {
        let mut lone = Lone::new(eager());
        let _unversioned = lone.receive(NOW, "k");
        assert_eq!(lone.message(&message), Err(PeerMisbehaved::VersionMissing));
        lone.assert_over(PeerMisbehaved::VersionMissing);
    }
    let mut lone = Lone::new(small());
    let _promised = lone.view(NOW, "k");
    assert_eq!(lone.message(&response(None, true)), Err(PeerMisbehaved::VersionMissing));
    let mut lone = Lone::new(small());
    let _lent = lone.view(NOW, "k");
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::VersionMissing));
    let mut lone = Lone::new(small());
    let _written = lone.receive(NOW, "k");
    assert_eq!(lone.immediate(0, 0), Err(PeerMisbehaved::VersionMissing));
}

#[test]
fn an_error_needs_no_version() {
    let mut lone = Lone::new(small());
    let refused = lone.receive(NOW, "k");
    let status = Status::new(tensorwire_protocol::Code::NotFound, "nothing");
    let error = ErrorStatus { index: RequestIndex(0), status };
    assert_eq!(lone.message(&Message::ErrorStatus(error)), Ok(None));
    assert!(settled(&refused).is_err());
}
