//! Answers of every shape, split at every place, and answers that break the rules.

use futures::FutureExt;
use hyper::body::Frame;
use memory::PoolConfig;
use tonic::codegen::http::HeaderValue;

use super::{fuzzing::Frames, *};
use crate::control::grpc::recv_tensor::messages::{Dim, RecvTensorResponse, TensorProto};

fn trailers(status: &'static str) -> Frame<Bytes> {
    Frame::trailers(HeaderMap::from_iter([(
        tonic::codegen::http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static(status),
    )]))
}

fn place() -> Place {
    // A page at a time, because each place is used once.
    let config = PoolConfig { block_bytes: 4096, ..PoolConfig::new("test") };
    Place { pool: Pool::new(config).unwrap(), target: None }
}

/// Reads `bytes` in frames of `length` each, with an ending of `status`.
fn read(bytes: &[u8], length: usize, status: &'static str) -> Result<Arrived, Fault> {
    let frames = bytes.chunks(length).map(|chunk| Frame::data(Bytes::copy_from_slice(chunk)));
    let frames = frames.chain([trailers(status)]).collect();
    Reader::new(Frames(frames)).value(&place()).now_or_never().expect("all frames are there")
}

fn message(response: &RecvTensorResponse) -> Vec<u8> {
    let encoded = response.encode_to_vec();
    [&[0][..], &(encoded.len() as u32).to_be_bytes(), &encoded].concat()
}

fn tensor(dtype: DataType, shape: &[i64], content: &[u8]) -> TensorProto {
    let dim = shape.iter().map(|&size| Dim { size }).collect();
    TensorProto {
        dtype: dtype as i32,
        tensor_shape: Some(TensorShapeProto { dim, unknown_rank: false }),
        tensor_content: Bytes::copy_from_slice(content),
        string_val: Vec::new(),
    }
}

fn answer(tensor: TensorProto) -> RecvTensorResponse {
    RecvTensorResponse { tensor: Some(tensor), ..Default::default() }
}

fn problem(read: Result<Arrived, Fault>) -> String {
    match read {
        Err(Fault::Misbehaved(problem)) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn s7_an_answer_is_the_same_however_it_is_cut() {
    let mut strings = tensor(DataType::String, &[2], b"");
    strings.string_val = vec![Bytes::from_static(b"one"), Bytes::from_static(&[7; 300])];
    let encoded = strings.encode_to_vec();
    let mut whole = answer(tensor(DataType::U16, &[2, 3], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]));
    whole.send_start_micros = 1 << 50;
    let mut dead = answer(tensor(DataType::F32, &[9], b""));
    dead.is_dead = true;
    let cases: [(Vec<u8>, &[u8], bool); 5] = [
        (message(&whole), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], false),
        (message(&answer(strings)), &encoded, false),
        (message(&answer(tensor(DataType::I64, &[], &[8; 8]))), &[8; 8], false),
        (message(&answer(tensor(DataType::F64, &[3, 0], b""))), &[], false),
        (message(&dead), &[], true),
    ];
    for (bytes, content, is_dead) in cases {
        for length in 1..=bytes.len() {
            let arrived = read(&bytes, length, "0").unwrap();
            assert_eq!(arrived.bytes(), content);
            assert_eq!(arrived.metadata.is_dead, is_dead);
            assert_eq!(arrived.metadata.byte_length, content.len() as u64);
        }
        for cut in 1..bytes.len() {
            assert!(read(&bytes[..cut], 7, "0").is_err(), "cut at {cut}");
            // The reason of an answer that is broken off is the one that is told.
            let Err(Fault::Answered(status)) = read(&bytes[..cut], 7, "1") else { panic!("cut at {cut}") };
            assert_eq!(status.code(), tonic::Code::Cancelled);
        }
        // With a whole message, too: the value is not this receiver's.
        assert!(matches!(read(&bytes, 7, "1"), Err(Fault::Answered(_))));
    }
}

#[test]
fn s7_fields_of_other_versions_are_passed_over() {
    let known = answer(tensor(DataType::U8, &[2], &[5, 6])).encode_to_vec();
    // require_ack (5), and one of each kind that nobody knows.
    let more = [&[40, 1, 0xF8, 1, 9, 0xFA, 1, 2, 1, 2][..], &known, &[0xFD, 1, 1, 2, 3, 4]].concat();
    let more = [&more[..], &[0xF9, 1, 1, 2, 3, 4, 5, 6, 7, 8]].concat();
    let bytes = [&[0][..], &(more.len() as u32).to_be_bytes(), &more].concat();
    for length in [1, 3, 1000] {
        assert_eq!(read(&bytes, length, "0").unwrap().bytes(), [5, 6]);
    }
}

#[test]
fn s7_content_in_pieces_is_joined() {
    let content: Vec<u8> = (0..200).collect();
    let options = TensorOptions { content_bytes: 200, ..Default::default() };
    let mut first = answer(tensor(DataType::U8, &[200], b""));
    first.transport_options = options.pack();
    let piece = |bytes: &[u8]| {
        let tensor_content = Bytes::copy_from_slice(bytes);
        message(&answer(TensorProto { tensor_content, ..Default::default() }))
    };
    let pieces = [message(&first), piece(&content[..90]), piece(&content[90..])].concat();
    for length in [1, 64, 1000] {
        assert_eq!(read(&pieces, length, "0").unwrap().bytes(), content);
    }
    let short = [message(&first), piece(&content[..90])].concat();
    assert!(problem(read(&short, 50, "0")).contains("less content"));
    let long = [&pieces[..], &piece(&[1])].concat();
    assert!(problem(read(&long, 50, "0")).contains("more content"));
    let idle = [message(&first), message(&RecvTensorResponse::default())].concat();
    assert!(problem(read(&idle, 50, "0")).contains("brings nothing"));
}

#[test]
fn s5_hostile_answers_are_errors_and_take_no_memory() {
    let refused = |response: &RecvTensorResponse| problem(read(&message(response), 9, "0"));
    assert!(refused(&answer(tensor(DataType::U8, &[3], &[1, 2]))).contains("another length"));
    assert!(refused(&answer(tensor(DataType::U8, &[1 << 50], &[1]))).contains("larger than any"));
    assert!(refused(&answer(tensor(DataType::U8, &[-1], &[1]))).contains("shape"));
    assert!(refused(&RecvTensorResponse::default()).contains("type and shape"));
    let mut unknown_rank = answer(tensor(DataType::U8, &[], &[1]));
    unknown_rank.tensor.as_mut().unwrap().tensor_shape.as_mut().unwrap().unknown_rank = true;
    assert!(refused(&unknown_rank).contains("shape"));
    let mut other_type = answer(tensor(DataType::U8, &[1], &[1]));
    other_type.tensor.as_mut().unwrap().dtype = 99;
    assert!(refused(&other_type).contains("99"));
    let mut dead = answer(tensor(DataType::U8, &[1], &[1]));
    dead.is_dead = true;
    // Deadness before the content, as it is written here, and after it.
    let [mut before, mut after] = [vec![16, 1], Vec::new()];
    before.extend(answer(dead.tensor.clone().unwrap()).encode_to_vec());
    after.extend(dead.encode_to_vec());
    for bytes in [before, after] {
        let bytes = [&[0][..], &(bytes.len() as u32).to_be_bytes(), &bytes].concat();
        assert!(read(&bytes, 100, "0").is_err(), "{bytes:?}");
    }
    let cases: [(&[u8], &str); 6] = [
        (&[1, 0, 0, 0, 0], "compressed"),
        (&[0, 0, 0, 0, 3, 0x0A, 0x7F, 0], "longer than"),
        (&[0, 0, 0, 0, 12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0], "ten bytes"),
        (&[0, 0, 0, 0, 1, 0x0B], "unknown kind"),
        (&[0, 0xFF, 0xFF, 0xFF, 0xFF, 50, 0xFF, 0xFF, 0x7F], "too long"),
        (&[0, 0, 0, 0, 6, 0x0A, 4, 34, 2, 1, 1], "type and shape"),
    ];
    for (bytes, expected) in cases {
        let problem = problem(read(bytes, 5, "0"));
        assert!(problem.contains(expected), "{bytes:?}: {problem}");
    }
}

#[test]
fn s7_a_checksum_that_does_not_fit_is_an_error() {
    for (sum, is_good) in [(Validation::Xxh3.checksum(&[1, 2, 3]).unwrap(), true), (7, false)] {
        let mut response = answer(tensor(DataType::U8, &[3], &[1, 2, 3]));
        let validation = Validation::Xxh3 as u32;
        response.transport_options = TensorOptions { validation, checksum: sum, ..Default::default() }.pack();
        match read(&message(&response), 4, "0") {
            Ok(arrived) => assert!(is_good && arrived.checksums.is_some()),
            Err(Fault::Corrupted { sent: 7, .. }) => assert!(!is_good),
            Err(other) => panic!("{other:?}"),
        }
    }
}
