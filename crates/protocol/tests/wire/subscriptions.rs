//! The limits of the messages of subscriptions.

use tensorwire_protocol::{
    BufferRequest, Buffers, DataType, Destination, Message, MetaDataResponse, Metadata, RequestIndex,
    ResultSlot, Shape, SubscriptionTerms, TensorWrite, Want, WireError,
    limits::{EAGER_BYTES_MAX, MESSAGE_BYTES_MAX, RANK_MAX, SUBSCRIPTION_VALUES_MAX},
    wire,
};

use super::{plain, request_with, round_trip};

const MOST: u8 = SUBSCRIPTION_VALUES_MAX;

fn each(values: u8) -> Want {
    Want::Each(SubscriptionTerms { values, every: true, view: true })
}

#[test]
fn terms_of_1_to_64_values_travel_and_others_are_refused() {
    for values in [1, 2, MOST] {
        let message = request_with("k", &[], each(values));
        assert_eq!(round_trip(&message), Ok(message));
    }
    for values in [0, MOST + 1, 255] {
        let (value, maximum) = (values.into(), MOST.into());
        let refused = WireError::OutOfRange { field: "values", value, minimum: 1, maximum };
        assert_eq!(round_trip(&request_with("k", &[], each(values))), Err(refused));
    }
    let mut bytes = wire::encode(&request_with("k", &[], each(1)));
    *bytes.last_mut().unwrap() = 4;
    assert_eq!(wire::decode(&bytes), Err(WireError::Unknown { field: "flags", value: 4 }));
}

#[test]
fn a_subscription_names_no_metadata() {
    let known = [Metadata::dead(DataType::U8, Shape::default())];
    let refused = WireError::Inconsistent { field: "want" };
    assert_eq!(round_trip(&request_with("k", &known, each(1))), Err(refused));
}

#[test]
fn buffers_are_requested_for_values_with_bytes_only() {
    let of = |length| Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap();
    let request =
        |length| Message::BufferRequest(BufferRequest { index: RequestIndex(0), metadata: of(length) });
    assert_eq!(round_trip(&request(1)), Ok(request(1)));
    assert_eq!(round_trip(&request(0)), Err(WireError::Inconsistent { field: "byte length" }));
}

#[test]
fn up_to_64_buffers_and_values_travel_in_one_message_and_more_are_refused() {
    let result = Some(ResultSlot { region: 1, generation: 1, offset: 0 });
    let buffers = |values, count: u8| {
        let destinations = (0..count).map(|_| Destination { result, ..plain(0, 8) }).collect();
        Message::BufferIdle(Buffers { index: RequestIndex(0), values, destinations })
    };
    let largest = buffers(MOST, MOST);
    assert!(wire::encode(&largest).len() <= MESSAGE_BYTES_MAX);
    assert_eq!(round_trip(&largest), Ok(largest));
    for message in [buffers(MOST + 1, 0), buffers(0, MOST + 1)] {
        let (length, limit) = (usize::from(MOST) + 1, MOST.into());
        assert_eq!(round_trip(&message), Err(WireError::TooLong { field: "buffers", length, limit }));
    }
}

#[test]
fn the_longest_small_content_with_the_highest_rank_fits_into_a_message() {
    let mut dimensions = vec![1; RANK_MAX];
    dimensions[0] = EAGER_BYTES_MAX.into();
    let value = MetaDataResponse {
        index: RequestIndex(0),
        metadata: Metadata::new(DataType::U8, Shape::new(dimensions).unwrap()).unwrap(),
        content: Some(vec![1; EAGER_BYTES_MAX as usize].into()),
        loan_follows: false,
        checksum: Some(7),
    };
    let message =
        Message::TensorWrite(TensorWrite { version: u64::MAX, sequence: u64::MAX, began: u64::MAX, value });
    assert!(wire::encode(&message).len() <= MESSAGE_BYTES_MAX);
    assert_eq!(round_trip(&message), Ok(message));
}
