//! Frames of the control plane: refusals, lengths, and what is not shown.

use std::time::Duration;

use tensorwire_protocol::{
    DataType, Destination, Metadata, Parameters, Shape, WireError,
    limits::{
        ADDRESS_BYTES_MAX, CONTENTS_MAX, DEPTH_MAX, DEPTH_MIN, EAGER_BYTES_MAX, NAME_BYTES_MAX, NAMES_MAX,
        PIECE_BYTES_MAX, PIECE_BYTES_MIN, REPORT_PEERS_MAX, REPORT_POOLS_MAX, REPORT_SETS_MAX,
        REPORT_TEXT_BYTES_MAX, REQUESTS_MAX, REQUESTS_PER_MESSAGE_MAX, RING_BYTES_MAX, RING_BYTES_MIN,
        SLOT_BYTES, WIRE_VERSION, WORKER_NAME_BYTES_MAX,
    },
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord, RingOffer},
};

use super::values::ring_offer;

#[test]
fn d_another_wire_version_is_refused_with_both_named() {
    let hello = ControlFrame::Hello {
        wire_version: WIRE_VERSION + 1,
        worker: "/job:a/replica:0/task:0".to_owned(),
        incarnation: 1,
        listen_address: None,
        nonce: [0; 32],
    };
    let error = ControlFrame::decode(&hello.encode()).unwrap_err();
    assert_eq!(error, WireError::Version { peer: WIRE_VERSION + 1, own: WIRE_VERSION });
    for version in [WIRE_VERSION + 1, WIRE_VERSION] {
        assert!(error.to_string().contains(&version.to_string()), "{error}");
    }
}

#[test]
fn d_parameters_outside_their_limits_are_refused() {
    let good = Parameters::default();
    let bad = [
        Parameters { depth: DEPTH_MIN - 1, ..good },
        Parameters { depth: DEPTH_MAX + 1, ..good },
        Parameters { ring_bytes: RING_BYTES_MIN - 1, ..good },
        Parameters { ring_bytes: RING_BYTES_MAX + 1, ..good },
        Parameters { requests_max: 0, ..good },
        Parameters { requests_max: REQUESTS_MAX + 1, ..good },
        Parameters { contents_max: 0, ..good },
        Parameters { contents_max: CONTENTS_MAX + 1, ..good },
        Parameters { names_max: NAMES_MAX + 1, ..good },
        Parameters { eager_bytes_max: EAGER_BYTES_MAX + 1, ..good },
        Parameters { requests_per_message: 0, ..good },
        Parameters { requests_per_message: REQUESTS_PER_MESSAGE_MAX + 1, ..good },
        Parameters { piece_bytes: PIECE_BYTES_MIN - 1, ..good },
        Parameters { piece_bytes: PIECE_BYTES_MAX + 1, ..good },
    ];
    assert_eq!(good.check(), Ok(()));
    for parameters in bad {
        let (data, regions, ring) = (Vec::new(), Vec::new(), ring_offer(parameters));
        let frame =
            ControlFrame::Connect(Connect { connection: 1, kind: 1, data, parameters, ring, regions });
        let error = ControlFrame::decode(&frame.encode()).unwrap_err();
        assert!(matches!(error, WireError::OutOfRange { .. }), "{error}");
    }
}

#[test]
fn d_rings_and_slots_of_other_sizes_are_refused() {
    let parameters = Parameters::default();
    let good = ring_offer(parameters);
    let sized = |destination: Destination, capacity| Destination { capacity, ..destination };
    let first = u64::from(parameters.first_ring_bytes());
    let bad = [
        RingOffer { destination: sized(good.destination, first - 1), ..good },
        RingOffer { destination: sized(good.destination, first + 1), ..good },
        RingOffer { slots: sized(good.slots, 2 * u64::from(SLOT_BYTES) - 1), ..good },
    ];
    for ring in bad {
        let (data, regions) = (Vec::new(), Vec::new());
        let frame =
            ControlFrame::Connect(Connect { connection: 1, kind: 1, data, parameters, ring, regions });
        let error = ControlFrame::decode(&frame.encode()).unwrap_err();
        assert_eq!(error, WireError::Inconsistent { field: "ring" });
    }
}

#[test]
fn list_entries_say_how_long_they_are() {
    let entry = |name: &str, checksum| ListEntry {
        name: name.to_owned(),
        metadata: Metadata::new(DataType::F32, Shape::new([2]).unwrap()).unwrap(),
        version: 1,
        checksum,
    };
    let entries = vec![entry("a", None), entry("bcd", Some(1))];
    let sum: usize = entries.iter().map(ListEntry::encoded_length).sum();
    let frame = |entries| ControlFrame::ListResponse { request: 1, entries, more: false }.encode().len();
    assert_eq!(frame(entries) - frame(Vec::new()), sum);
}

/// The longest report that is sent: the most of everything, with the longest texts.
fn longest_report() -> Box<WorkerReport> {
    let (mut peer, mut set, mut pool) = (PeerReport::default(), SetReport::default(), PoolReport::default());
    peer.name = "n".repeat(WORKER_NAME_BYTES_MAX);
    peer.address = Some("a".repeat(ADDRESS_BYTES_MAX));
    peer.transport = Some("t".repeat(REPORT_TEXT_BYTES_MAX));
    (peer.waiting_at_peer.oldest, peer.waiting_here.oldest) = (Some(1), Some(2));
    peer.stalled = Some(Duration::MAX);
    set.name = "s".repeat(NAME_BYTES_MAX);
    pool.name = "p".repeat(REPORT_TEXT_BYTES_MAX);
    let mut report = Box::new(WorkerReport::default());
    report.name = peer.name.clone();
    report.address = "a".repeat(ADDRESS_BYTES_MAX);
    report.version = pool.name.clone();
    (report.total, report.sessions) = (Some(Traffic::default()), Some(1));
    report.peers = vec![peer; REPORT_PEERS_MAX];
    report.sets = vec![set; REPORT_SETS_MAX];
    report.pools = vec![pool; REPORT_POOLS_MAX];
    report
}

#[test]
fn s4_the_longest_report_fits_into_a_frame_and_a_longer_one_is_refused() {
    let refused = |change: &dyn Fn(&mut WorkerReport)| {
        let mut report = longest_report();
        change(&mut report);
        let frame = ControlFrame::ReportResponse { request: 1, report };
        ControlFrame::decode(&frame.encode()).map(drop)
    };
    assert_eq!(refused(&|_| {}), Ok(()));
    let too_long =
        |field: &'static str, limit: usize| Err(WireError::TooLong { field, length: limit + 1, limit });
    // One peer more, without a text that makes the frame too long.
    let more_peers = refused(&|report| report.peers = vec![PeerReport::default(); REPORT_PEERS_MAX + 1]);
    assert_eq!(more_peers, too_long("peers", REPORT_PEERS_MAX));
    let more_sets = refused(&|report| report.sets = vec![SetReport::default(); REPORT_SETS_MAX + 1]);
    assert_eq!(more_sets, too_long("sets", REPORT_SETS_MAX));
    let more_pools = refused(&|report| report.pools = vec![PoolReport::default(); REPORT_POOLS_MAX + 1]);
    assert_eq!(more_pools, too_long("pools", REPORT_POOLS_MAX));
    assert_eq!(refused(&|report| report.version.push('x')), too_long("version", REPORT_TEXT_BYTES_MAX));
}

#[test]
fn s4_a_report_that_announces_more_than_it_has_is_refused_before_memory_is_taken() {
    let mut report = Box::new(WorkerReport::default());
    report.sets = vec![SetReport::default(); 2];
    let bytes = ControlFrame::ReportResponse { request: 1, report }.encode();
    // Each cut frame says its own length.
    for cut in 5..bytes.len() {
        let mut bytes = bytes[..cut].to_vec();
        bytes[..4].copy_from_slice(&(cut as u32).to_le_bytes());
        assert!(ControlFrame::decode(&bytes).is_err(), "{cut}");
    }
}

#[test]
fn keys_proofs_and_connection_data_are_not_in_debug() {
    let region = RegionRecord { region: 1, generation: 2, base: 0, length: 4096, key: 0xDEAD_BEEF };
    let parameters = Parameters::default();
    let ring = ring_offer(parameters);
    let data = vec![0xAB; 4];
    let regions = vec![region];
    let frames = [
        ControlFrame::Proof { proof: [0xAB; 32] },
        ControlFrame::Welcome { fabrics: Vec::new(), proof: [0xAB; 32] },
        ControlFrame::Connect(Connect {
            connection: 1,
            kind: 1,
            data: data.clone(),
            parameters,
            ring,
            regions: regions.clone(),
        }),
        ControlFrame::Connected(Connect { connection: 1, kind: 1, data, parameters, ring, regions }),
        ControlFrame::RegionAdd { connection: 1, region },
    ];
    for frame in frames {
        let debug = format!("{frame:?} {frame:#?}");
        for secret in ["171", "3735928559", "deadbeef", "DEADBEEF", "0xab"] {
            assert!(!debug.contains(secret), "{debug}");
        }
    }
}
