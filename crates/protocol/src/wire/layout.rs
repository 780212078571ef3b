//! The page of byte layouts in the book, generated from what the decoder reads of samples, so that it always matches the
//! code.

use std::{cell::RefCell, fmt::Write, fs, num::NonZeroU64, path::Path, sync::Arc, time::Duration};

use smallvec::smallvec;

use super::{
    control::{Connect, ControlFrame, FabricOffer, ListEntry, Parameters, RegionRecord, RingOffer},
    record::{
        Control, RECORD_BYTES_MAX, decode_record, encode_answer, encode_ask, encode_control, encode_message,
    },
};
use crate::{
    BufferRequest, Buffers, CallTerms, Code, DataType, Destination, EagerContent, ErrorStatus, Message,
    MetaDataResponse, Metadata, Note, Offered, OfferedArguments, PageWrite, RequestIndex, ResultSlot, Scope,
    SetContent, Shape, Status, StepId, SubscriptionTerms, TensorList, TensorReRequest, TensorRequest,
    TensorWrite, TraceContext, VersionNotice, Waiting, Want, Wanted,
    credit::{Answer, Ask, Counts, Mode},
    limits::{CONTROL_FRAME_BYTES_MAX, SLOT_BYTES, WIRE_VERSION},
    names::{NameForm, NameTable},
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
};

thread_local! {
    /// Fields that were read, with their lengths in bytes, while a sample is decoded.
    static FIELDS: RefCell<Vec<(&'static str, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Notes that the decoder has read a field of this many bytes.
pub(super) fn note(field: &'static str, bytes: usize) {
    FIELDS.with_borrow_mut(|fields| fields.push((field, bytes)));
}

/// Set to write the page instead of comparing it.
const WRITE: &str = "TENSORWIRE_WRITE_LAYOUTS";

const COUNTS: Counts = Counts { receives: 9, ring_bytes: 640 };
const INDEX: RequestIndex = RequestIndex(0x0001_0005);
const KEY: &str =
    "/job:ps/replica:0/task:0/device:CPU:0;00000000000004d2;/job:worker/replica:0/task:1/device:CPU:0;w;0:0";

fn matrix() -> Metadata {
    Metadata::new(DataType::F32, Shape::new([2, 3]).unwrap_or_default()).unwrap_or_else(|| {
        let (dtype, shape) = (DataType::F32, Shape::default());
        Metadata::dead(dtype, shape)
    })
}

fn destination(result: Option<ResultSlot>) -> Destination {
    Destination { region: 3, generation: 1, offset: 4096, capacity: 24, result }
}

fn request(known: &[Metadata], want: Want) -> TensorRequest {
    TensorRequest {
        index: INDEX,
        scope: Scope::Step(StepId(7)),
        key: KEY.into(),
        known: Arc::from(known),
        want,
        arguments: None,
    }
}

/// A page under construction.
struct Page(String);

impl Page {
    /// One table: `fields` with their lengths, and their bytes.
    fn table(&mut self, name: &str, about: &str, fields: &[(&str, usize)], bytes: &[u8]) {
        let _ = writeln!(self.0, "\n## {name}\n\n{about}\n");
        let _ = writeln!(self.0, "| offset | bytes | field | in this example |\n| --- | --- | --- | --- |");
        let mut offset = 0;
        for (field, length) in fields {
            let shown: Vec<_> =
                bytes.iter().skip(offset).take(*length).map(|byte| format!("{byte:02x}")).collect();
            let more = if shown.len() > 16 { " …" } else { "" };
            let shown = shown.iter().take(16).map(String::as_str).collect::<Vec<_>>().join(" ");
            let _ = writeln!(self.0, "| {offset} | {length} | {field} | `{shown}{more}` |");
            offset += length;
        }
        assert_eq!(offset, bytes.len(), "{name}: every byte belongs to a field");
    }

    /// The table of a frame, from what `decode` reads of it.
    fn frame(&mut self, name: &str, about: &str, bytes: &[u8], decode: impl FnOnce(&[u8])) {
        FIELDS.take();
        decode(bytes);
        let mut fields = vec![("length", 4)];
        fields.extend(FIELDS.take().into_iter().filter(|(_, length)| *length > 0));
        self.table(name, about, &fields, bytes);
    }

    fn record(&mut self, name: &str, about: &str, forms: &[NameForm], message: &Message) {
        let mut bytes = Vec::new();
        encode_message(Some((COUNTS, forms)), message, &mut bytes);
        self.frame(name, about, &bytes, decode_in_ring);
    }

    fn flow(&mut self, name: &str, about: &str, control: Control) {
        let mut bytes = Vec::new();
        encode_control(COUNTS, control, &mut bytes);
        self.frame(name, about, &bytes, decode_in_ring);
    }

    fn control(&mut self, name: &str, about: &str, frame: &ControlFrame) {
        self.frame(name, about, &frame.encode(), |bytes| {
            assert_eq!(ControlFrame::decode(bytes).as_ref(), Ok(frame), "{name}");
        });
    }
}

fn decode_in_ring(bytes: &[u8]) {
    let mut names = NameTable::new(16);
    names.define(2, KEY.into());
    let decoded = decode_record(Mode::Counted, bytes, &mut names, 16);
    assert!(decoded.is_ok(), "{decoded:?}");
}

fn head() -> Page {
    Page(format!(
        "# Byte layouts\n\n\
        Wire version {WIRE_VERSION}. All numbers are little-endian. This page is generated: each table lists what the \
        decoder reads of the example, field by field (`scripts/gen-layouts`; a test compares). A text or a string of bytes \
        has its length before it, in 2 bytes of the same name; a field that may be absent has 1 byte before it, 0 or 1.\n\n\
        A record in a message ring is at most {RECORD_BYTES_MAX} bytes long, a frame of the control plane at most \
        {CONTROL_FRAME_BYTES_MAX}. In mode `original` ring records have neither the two counts (`receives`, `ring bytes`) nor \
        the form of a key. [The protocol](protocol.md) explains the messages.\n\n\
        # In the message ring\n"
    ))
}

fn requests(page: &mut Page) {
    let first = Message::TensorRequest(request(&[], Want::Write(None)));
    let about = "The first request for a key contains the key and defines a number for it (form 1). The receiver does not know the \
        tensor's metadata yet, so the request has no destination.";
    page.record("TENSOR_REQUEST, first", about, &[NameForm::Define(2)], &first);
    let later = request(&[matrix()], Want::Write(Some(destination(None))));
    let about = "A later request names the key by its number (form 2), lists the metadata that the receiver knows, and has the \
        destination where the content may be written.";
    page.record("TENSOR_REQUEST, later", about, &[NameForm::Number(2)], &Message::TensorRequest(later));
    let slot = ResultSlot { region: 3, generation: 1, offset: 8192 };
    let checked = request(&[matrix()], Want::Write(Some(destination(Some(slot)))));
    let about =
        "With validation: the destination (2) begins with a result slot, where the checksum is written.";
    page.record(
        "TENSOR_REQUEST with a result slot",
        about,
        &[NameForm::Number(2)],
        &Message::TensorRequest(checked),
    );
    let several = vec![request(&[], Want::Write(None)), request(&[matrix()], Want::View)];
    let about = "Several requests in one message; the second wants a view (want 2).";
    page.record(
        "TENSOR_REQUEST, several",
        about,
        &[NameForm::Number(2); 2],
        &Message::TensorRequests(several),
    );
    let wanted = Wanted::NewerThan { incarnation: 0x4d2, version: 3 };
    let newer = TensorRequest { scope: Scope::Versioned(wanted), ..request(&[], Want::Write(None)) };
    let about = "For a published tensor that is newer than a version (scope 3). Scope 2 requests the present tensor and its version, \
        and scope 1 the present tensor without its version.";
    page.record("TENSOR_REQUEST, newer", about, &[NameForm::Number(2)], &Message::TensorRequest(newer));
    let offered = Offered { incarnation: 0x4d2, edition: 3, cell: 1 };
    let offered = TensorRequest { scope: Scope::Offered(offered), ..request(&[], Want::View) };
    let about = "For an offered tensor (scope 5), whose ticket the receiver has. The key is not used.";
    page.record("TENSOR_REQUEST, offered", about, &[NameForm::Number(2)], &Message::TensorRequest(offered));
    set_requests(page, wanted);
    let now = TensorRequest { scope: Scope::StepNow(StepId(7)), ..request(&[], Want::Write(None)) };
    let about = "For a receiver that does not wait (scope 4): without a value the answer is ERROR_STATUS with CANCELLED.";
    page.record("TENSOR_REQUEST, now", about, &[NameForm::Number(2)], &Message::TensorRequest(now));
    let again = TensorReRequest { index: INDEX, destination: Some(destination(None)) };
    let about = "The destination for the content that META_DATA_RESPONSE described.";
    page.record("TENSOR_RE_REQUEST", about, &[], &Message::TensorReRequest(again));
    let about = "The receive was given up.";
    page.record("CANCEL", about, &[], &Message::Cancel(INDEX));
}

/// Requests for sets and slices.
fn set_requests(page: &mut Page, wanted: Wanted) {
    let newer = TensorRequest { scope: Scope::Set(wanted), ..request(&[], Want::Write(None)) };
    let about = "For the head of a version of a set that is newer than a version (scope 6). With the highest numbers, for the present \
        version.";
    page.record("TENSOR_REQUEST, set", about, &[NameForm::Number(2)], &Message::TensorRequest(newer));
    let content = Scope::SetContent(SetContent { edition: 0x4d3, number: 2, is_last: true });
    let content = TensorRequest { scope: content, ..request(&[], Want::View) };
    let about = "For a content of a version of a set (scope 7): the manifest, a tensor or a delta. The highest bit of the \
        number says that the receiver needs no further content of the version.";
    page.record(
        "TENSOR_REQUEST, content of a set",
        about,
        &[NameForm::Number(2)],
        &Message::TensorRequest(content),
    );
    let slice = TensorRequest {
        scope: Scope::Slice,
        key: "w[0:128,64:128]".into(),
        ..request(&[], Want::Write(None))
    };
    let about = "For a slice of a published tensor (scope 8). Its key is the name of the tensor and, from the last bracket on, a range of \
        elements in each dimension.";
    page.record("TENSOR_REQUEST, slice", about, &[NameForm::Define(2)], &Message::TensorRequest(slice));
    let content = Scope::SetSlice(SetContent { edition: 0x4d3, number: 2, is_last: true });
    let slice = TensorRequest { scope: content, ..request(&[], Want::Write(None)) };
    let about = "For a slice of a content of a version of a set (scope 9). Its key is the name of the set and the slice.";
    page.record(
        "TENSOR_REQUEST, slice of a set",
        about,
        &[NameForm::Number(2)],
        &Message::TensorRequest(slice),
    );
    pages(page);
}

fn pages(page: &mut Page) {
    let mut record = |name, about, scope, request| {
        let request = TensorRequest { scope, key: "kv{5>20+8,91>3}".into(), ..request };
        page.record(name, about, &[NameForm::Define(2)], &Message::TensorRequest(request));
    };
    let about = "For pages of an arena (scope 10). Its key is the name of the arena and, from the last brace on, the pages: those from \
        number 5 on, of which there are 8, go to those of the receiver from number 20 on. A number other than 0 names a write of the \
        sender's, whose pages are meant instead.";
    let into = request(&[matrix()], Want::Write(Some(destination(None))));
    record("TENSOR_REQUEST, pages", about, Scope::Pages(None), into);
    let number = NonZeroU64::MIN;
    let about = "Asks for a request of the pages of a write (scope 12), and has a note for the program. Without the note it is scope 11. The \
        answer has no bytes, and comes when the pages are there.";
    let write = Scope::PageWrite(PageWrite { number, note: Some(7) });
    record("TENSOR_REQUEST, write of pages", about, write, request(&[], Want::Write(None)));
    calls(page);
}

fn calls(page: &mut Page) {
    let mut record = |name, about, scope, request| {
        let request = TensorRequest { scope, key: "embed".into(), ..request };
        page.record(name, about, &[NameForm::Define(2)], &Message::TensorRequest(request));
    };
    let list = TensorList::new(vec![matrix()]).unwrap();
    let mut content = list.head();
    content.resize(list.byte_length() as usize, 0);
    let about = "Calls the handler that the key names (scope 13). The arguments are a list of tensors: its head has its length, the number of \
        tensors, and the metadata of each. Then come the contents of fewer than 1,024 bytes, each at a multiple of 16 bytes from the \
        beginning of the list, and then the others, each at a multiple of 64. The answer is such a list, too.";
    let call = CallTerms { limit_ms: 60_000, offered: None, trace: None };
    let unknown = request(&[], Want::Write(None));
    let arguments = Some(content.into());
    record("TENSOR_REQUEST, call", about, Scope::Call(call), TensorRequest { arguments, ..unknown.clone() });
    let number = NonZeroU64::MIN;
    let offered = Some(OfferedArguments { number, bytes: 1 << 20 });
    let about = "Calls the handler with arguments that it requests (scope 14).";
    record(
        "TENSOR_REQUEST, offering call",
        about,
        Scope::Call(CallTerms { offered, ..call }),
        unknown.clone(),
    );
    let trace = TraceContext::new(7, 8, 1);
    let about = "As either of them, with the caller's span (scope 16), which that of the handler continues.";
    record(
        "TENSOR_REQUEST, traced call",
        about,
        Scope::Call(CallTerms { offered, trace, ..call }),
        unknown.clone(),
    );
    let about = "For the arguments of a call (scope 15).";
    record("TENSOR_REQUEST, arguments", about, Scope::Arguments(number), unknown);
}

fn answers(page: &mut Page) {
    let response = |content: Option<EagerContent>, checksum| {
        Message::MetaDataResponse(MetaDataResponse {
            index: INDEX,
            metadata: matrix(),
            content,
            loan_follows: false,
            checksum,
        })
    };
    let about =
        "The metadata of the tensor. The content (0) waits for TENSOR_RE_REQUEST; with 2, a loan follows.";
    page.record("META_DATA_RESPONSE", about, &[], &response(None, None));
    let about = "The content (1) is in the message. With 0x80 added, a checksum precedes it.";
    page.record(
        "META_DATA_RESPONSE with content and checksum",
        about,
        &[],
        &response(Some(EagerContent::from_slice(&[7; 24])), Some(0xfeed)),
    );
    let about = "Comes before the answer to a request of scope 2 or 3, and has the version of its value.";
    page.record("VERSION", about, &[], &Message::Version(VersionNotice { index: INDEX, version: 4 }));
    let about =
        "A short message that no request asked for, in lane 3 of a channel that both sides have opened.";
    let note = Note { channel: 7, lane: 3, bytes: EagerContent::from_slice(&[7; 8]) };
    page.record("NOTE", about, &[], &Message::Note(note));
    let status = Status::new(Code::NotFound, "no such tensor");
    let about = "There is no value.";
    page.record("ERROR_STATUS", about, &[], &Message::ErrorStatus(ErrorStatus { index: INDEX, status }));
    let about = "No write of this request is posted or in flight any more.";
    page.record("CANCEL_ACK", about, &[], &Message::CancelAck(INDEX));
}

fn subscriptions(page: &mut Page) {
    let terms = SubscriptionTerms { values: 2, every: true, view: false };
    let each = Message::TensorRequest(request(&[], Want::Each(terms)));
    let about = "A subscription (want 3): how many values may be sent before one is returned, and flags: every value (1), views (2).";
    page.record("TENSOR_REQUEST, subscription", about, &[NameForm::Number(2)], &each);
    let about = "The next value of a subscription fits none of its buffers, which are not written any more.";
    let wanted = BufferRequest { index: INDEX, metadata: matrix() };
    page.record("BUFFER_REQUEST", about, &[], &Message::BufferRequest(wanted));
    let destinations = smallvec![destination(None), Destination { offset: 8192, ..destination(None) }];
    let about = "The buffers for that value and later ones, each of which is for one value.";
    let buffers = Buffers { index: INDEX, values: 0, destinations };
    page.record("BUFFER_RESPONSE", about, &[], &Message::BufferResponse(buffers));
    let about = "How many more values may be sent, and further buffers.";
    let buffers = Buffers { index: INDEX, values: 1, destinations: smallvec![destination(None)] };
    page.record("BUFFER_IDLE", about, &[], &Message::BufferIdle(buffers));
    let about = "A value of a subscription, with the fields of META_DATA_RESPONSE. With content 0 the value was written into the oldest \
        buffer, or has no bytes; with 2 it was lent.";
    let (metadata, index) = (matrix(), INDEX);
    let value = MetaDataResponse { index, metadata, content: None, loan_follows: false, checksum: None };
    let write = TensorWrite { version: 0, sequence: 4, began: 0, value };
    page.record("TENSOR_WRITE", about, &[], &Message::TensorWrite(write));
}

fn flow_control(page: &mut Page) {
    page.flow(
        "Counts only",
        "The counts of reposted receives and of consumed ring bytes, and nothing else.",
        Control::CountOnly,
    );
    let ring = Destination { region: 4, generation: 1, offset: 0, capacity: 65_536, result: None };
    page.flow("Ring offer", "A larger ring that the peer may move to.", Control::RingOffer(ring));
    page.flow("Ring moved", "The last record of this ring.", Control::RingMoved);
    page.0.push_str("\n# Beside the ring\n");
    let ask = encode_ask(Ask { counts: COUNTS, answers: 1, wanted: 512 });
    let about = format!(
        "In a slot of {SLOT_BYTES} bytes of its own. Sent by a side that is blocked. It has no length field: the length of the write \
         distinguishes ASK from ANSWER."
    );
    let fields = [("receives", 4), ("ring bytes", 4), ("ANSWERs received", 4), ("ring bytes wanted", 4)];
    page.table("ASK", &about, &fields, &ask);
    let answer = encode_answer(Answer { counts: COUNTS, asks: 1 });
    let fields = [("receives", 4), ("ring bytes", 4), ("ASKs received", 4)];
    page.table("ANSWER", "One for each ASK, at once, in a slot of its own.", &fields, &answer);
}

fn greeting(page: &mut Page) {
    page.0.push_str("\n# On the control plane\n");
    let hello = ControlFrame::Hello {
        wire_version: WIRE_VERSION,
        worker: "/job:ps/replica:0/task:0".to_owned(),
        incarnation: 1234,
        listen_address: Some("10.0.0.1:2222".to_owned()),
        nonce: [0xaa; 32],
    };
    page.control("HELLO", "First frame of both sides.", &hello);
    let about = "Proves that the dialling side knows the secret and has seen both HELLO frames.";
    page.control("PROOF", about, &ControlFrame::Proof { proof: [0xbb; 32] });
    let welcome = ControlFrame::Welcome {
        fabrics: vec![
            FabricOffer { kind: 2, reach: vec![0xcc; 16] },
            FabricOffer { kind: 3, reach: Vec::new() },
        ],
        proof: [0xbb; 32],
    };
    let about = "The fabrics of the worker, best first, and the proof that it knows the secret and has sent these fields.";
    page.control("WELCOME", about, &welcome);
    let about = "A data connection is over on the sender's side; the peer may not notice that otherwise.";
    let over = Status::new(Code::Unavailable, "device gone");
    page.control("DISCONNECTED", about, &ControlFrame::Disconnected { connection: 7, status: over });
    let about = "Orderly end.";
    page.control(
        "GOODBYE",
        about,
        &ControlFrame::Goodbye { status: Status::new(Code::Unavailable, "shut down") },
    );
    page.control("PING", "PONG has the same fields, with the same nonce.", &ControlFrame::Ping { nonce: 5 });
}

fn region() -> RegionRecord {
    RegionRecord { region: 3, generation: 1, base: 0, length: 16 << 20, key: 77 }
}

fn connections(page: &mut Page) {
    let parameters = Parameters::default();
    let capacity = parameters.first_ring_bytes().into();
    let ring = Destination { region: 1, generation: 1, offset: 0, capacity, result: None };
    let slots = Destination { offset: 65_536, capacity: 2 * u64::from(SLOT_BYTES), ..ring };
    let connect = Connect {
        connection: 1,
        kind: 3,
        data: vec![0xdd; 8],
        parameters,
        ring: RingOffer { destination: ring, slots },
        regions: vec![region()],
    };
    let about = "Offers a data connection in place of the one named first, with the fields of CONNECT.";
    page.control(
        "STANDBY",
        about,
        &ControlFrame::Standby { replaces: 1, offer: Connect { connection: 2, ..connect.clone() } },
    );
    page.control(
        "CONNECT",
        "One side of a data connection. CONNECTED, the answer, has the fields of the answering side.",
        &ControlFrame::Connect(connect),
    );
    let about = "The sender uses the standby of this data connection from now on.";
    page.control("RETIRED", about, &ControlFrame::Retired { connection: 1 });
    let refused =
        ControlFrame::Refused { connection: 1, status: Status::new(Code::ResourceExhausted, "full") };
    page.control("REFUSED", "Refuses a data connection, with the reason.", &refused);
    let about = "A block that destinations may name once the peer has confirmed it.";
    page.control("REGION_ADD", about, &ControlFrame::RegionAdd { connection: 1, region: region() });
    let about = "Confirms a REGION_ADD. REGION_REMOVE has the same fields.";
    page.control("REGION_ACK", about, &ControlFrame::RegionAck { connection: 1, region: 3 });
    let list = ControlFrame::ListRequest { request: 1, after: Some("w".to_owned()), with_checksums: true };
    page.control("LIST_REQUEST", "Requests published tensors after this name.", &list);
    let entry =
        ListEntry { name: "weights".to_owned(), metadata: matrix(), version: 3, checksum: Some(0xfeed) };
    let page_of = ControlFrame::ListResponse { request: 1, entries: vec![entry], more: false };
    page.control("LIST_RESPONSE", "One page.", &page_of);
    reports(page);
    let about = "A request to the store that the peer serves. STORE_CANCEL has the same number and no body.";
    page.control("STORE_REQUEST", about, &ControlFrame::StoreRequest { request: 1, body: vec![0xee; 12] });
    let about = "The answer. Without a body: the sender serves no store.";
    page.control(
        "STORE_RESPONSE",
        about,
        &ControlFrame::StoreResponse { request: 1, body: Some(vec![0xee; 5]) },
    );
}

fn reports(page: &mut Page) {
    let about = "Requests a report of the peer.";
    page.control("REPORT_REQUEST", about, &ControlFrame::ReportRequest { request: 1 });
    let traffic = Traffic::of_numbers([1, 4096, 2, 8192, 0, 1, 0, 0]);
    let peer = PeerReport {
        name: "a".to_owned(),
        address: None,
        transport: Some("tcp".to_owned()),
        traffic,
        waiting_at_peer: Waiting::default(),
        waiting_here: Waiting { requests: 1, oldest: Some(3) },
        stalled: None,
    };
    let set = SetReport { name: "policy".to_owned(), version: 7, tensors: 2, bytes: 64 };
    let pool = PoolReport {
        name: "source".to_owned(),
        block_bytes: 4 << 20,
        used_bytes: 4096,
        leaked_bytes: 0,
        retired_bytes: 0,
        waiting: 0,
    };
    let report = WorkerReport {
        name: "ps".to_owned(),
        address: "10.0.0.1:2222".to_owned(),
        incarnation: 1234,
        version: "0.1.0".to_owned(),
        clock: Duration::from_secs(1),
        total: Some(traffic),
        sessions: Some(1),
        peers: vec![peer],
        peers_left_out: 0,
        sets: vec![set],
        sets_left_out: 0,
        pools: vec![pool],
    };
    let about =
        "The worker, what its connections have moved, its peers, sets and pools. Times are in nanoseconds.";
    page.control(
        "REPORT_RESPONSE",
        about,
        &ControlFrame::ReportResponse { request: 1, report: Box::new(report) },
    );
}

#[test]
fn the_book_shows_the_layouts_that_the_decoder_reads() {
    let mut page = head();
    requests(&mut page);
    answers(&mut page);
    subscriptions(&mut page);
    flow_control(&mut page);
    greeting(&mut page);
    connections(&mut page);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/layouts.md");
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, &page.0).expect("the page can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page.0, "docs/src/layouts.md is out of date: run scripts/gen-layouts and commit it");
}
