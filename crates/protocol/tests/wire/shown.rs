//! Texts of a peer that act on the terminal or log that shows them, in every field that has text.

use proptest::prelude::*;
use tensorwire_protocol::{
    Code, ErrorStatus, Message, RequestIndex, Scope, Status, TensorRequest, Want, WireError,
    credit::{Counts, Mode},
    limits::{NAMES_MAX, STATUS_MESSAGE_BYTES_MAX, WIRE_VERSION},
    names::{NameForm, NameTable},
    report::{PeerReport, PoolReport, SetReport, WorkerReport},
    text::is_active,
    wire::{
        self,
        control::{ControlFrame, ListEntry},
        record,
    },
};

/// One of each kind: C0, DEL, C1, a separator of lines, and marks of direction.
const ACTIVE: [char; 9] =
    ['\n', '\r', '\u{1b}', '\u{7f}', '\u{9b}', '\u{85}', '\u{2028}', '\u{202e}', '\u{2066}'];

fn hello(worker: &str, listen_address: Option<&str>) -> ControlFrame {
    ControlFrame::Hello {
        wire_version: WIRE_VERSION,
        worker: worker.to_owned(),
        incarnation: 1,
        listen_address: listen_address.map(str::to_owned),
        nonce: [0; 32],
    }
}

/// Each field of the control plane that is a name, with the frame that has `name` in it.
fn named(name: &str) -> Vec<(&'static str, ControlFrame)> {
    let metadata = tensorwire_protocol::Metadata::dead(
        tensorwire_protocol::DataType::U8,
        tensorwire_protocol::Shape::default(),
    );
    let entry = ListEntry { name: name.to_owned(), metadata, version: 1, checksum: None };
    let after = Some(name.to_owned());
    let mut named = vec![
        ("worker", hello(name, None)),
        ("listen address", hello("a", Some(name))),
        ("after", ControlFrame::ListRequest { request: 1, after, with_checksums: false }),
        ("name", ControlFrame::ListResponse { request: 1, entries: vec![entry], more: false }),
    ];
    named.extend(reported(name));
    named
}

/// Each field of a report that is a name.
fn reported(name: &str) -> Vec<(&'static str, ControlFrame)> {
    let frame = |change: &dyn Fn(&mut WorkerReport, String)| {
        let mut report = Box::new(WorkerReport::default());
        report.peers = vec![PeerReport::default()];
        report.sets = vec![SetReport::default()];
        report.pools = vec![PoolReport::default()];
        change(&mut report, name.to_owned());
        ControlFrame::ReportResponse { request: 1, report }
    };
    vec![
        ("worker", frame(&|report, name| report.name = name)),
        ("address", frame(&|report, name| report.address = name)),
        ("version", frame(&|report, name| report.version = name)),
        ("peer", frame(&|report, name| report.peers[0].name = name)),
        ("address", frame(&|report, name| report.peers[0].address = Some(name))),
        ("transport", frame(&|report, name| report.peers[0].transport = Some(name))),
        ("set", frame(&|report, name| report.sets[0].name = name)),
        ("pool", frame(&|report, name| report.pools[0].name = name)),
    ]
}

fn request(key: &str) -> TensorRequest {
    let (index, scope, want) = (RequestIndex(0), Scope::Published, Want::Write(None));
    TensorRequest { index, scope, key: key.into(), known: [].into(), want, arguments: None }
}

#[test]
fn s5_names_that_act_on_what_shows_them_are_refused_by_field_in_each_frame() {
    for active in ACTIVE {
        let name = format!("a{active}b");
        let refused = |field: &str, error: WireError| {
            let shown = error.to_string();
            assert!(!shown.contains(is_active), "{shown:?}");
            let escape = format!("a{}b", active.escape_default());
            assert!(
                matches!(&error, WireError::ActiveCharacter { field: found, shown }
                if *found == field && *shown == escape),
                "{field}: {error:?}"
            );
        };
        for (field, frame) in named(&name) {
            refused(field, ControlFrame::decode(&frame.encode()).unwrap_err());
        }
        let several = vec![request("plain"), request(&name)];
        for message in [Message::TensorRequest(request(&name)), Message::TensorRequests(several)] {
            refused("key", wire::decode(&wire::encode(&message)).unwrap_err());
            for form in [NameForm::Plain, NameForm::Define(0)] {
                let mut bytes = Vec::new();
                record::encode_message(Some((Counts::default(), &[form, form])), &message, &mut bytes);
                let mut names = NameTable::new(NAMES_MAX);
                refused("key", record::decode_record(Mode::Counted, &bytes, &mut names, 2).unwrap_err());
            }
        }
    }
    for (field, frame) in named("größe.权重.🚀 `\\`") {
        assert_eq!(ControlFrame::decode(&frame.encode()), Ok(frame), "{field}");
    }
}

proptest! {
    #[test]
    fn s5_messages_of_statuses_are_escaped_in_each_frame(
        text: String, at: prop::sample::Index, active in prop::sample::select(&ACTIVE[..]), times in 1usize..500,
    ) {
        let at = text.floor_char_boundary(at.index(text.len() + 1));
        let (before, after) = text.split_at(at);
        let sent = Status::new(Code::Internal, format!("{before}{}{after}", String::from(active).repeat(times)));
        let connection = 1;
        let mut statuses = Vec::new();
        for frame in [
            ControlFrame::Refused { connection, status: sent.clone() },
            ControlFrame::Disconnected { connection, status: sent.clone() },
            ControlFrame::Goodbye { status: sent.clone() },
        ] {
            let frame = ControlFrame::decode(&frame.encode()).unwrap();
            let shown = format!("{frame:?}");
            prop_assert!(!shown.contains(is_active));
            let (ControlFrame::Refused { status, .. }
            | ControlFrame::Disconnected { status, .. }
            | ControlFrame::Goodbye { status }) = frame
            else {
                panic!("another kind: {frame:?}")
            };
            statuses.push(status);
        }
        let error = Message::ErrorStatus(ErrorStatus { index: RequestIndex(1), status: sent });
        match wire::decode(&wire::encode(&error)) {
            Ok(Message::ErrorStatus(error)) => statuses.push(error.status),
            other => panic!("{other:?}"),
        }
        for Status { message, .. } in statuses {
            prop_assert!(!message.contains(is_active));
            prop_assert!(message.len() <= STATUS_MESSAGE_BYTES_MAX);
        }
    }
}
