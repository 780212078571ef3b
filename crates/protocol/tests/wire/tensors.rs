//! Lists of tensors.

use proptest::prelude::*;
use tensorwire_protocol::{DataType, Metadata, Shape, TensorList, WireError, limits::TENSOR_BYTES_MAX};

use super::values::metadata;

fn bytes_of(length: u64) -> Metadata {
    Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
}

/// The content that a list describes, without the bytes of its tensors.
fn content(list: &TensorList) -> Vec<u8> {
    let mut content = list.head();
    content.resize(list.byte_length() as usize, 0);
    content
}

proptest! {
    #[test]
    fn lists_are_read_as_they_were_made(tensors in proptest::collection::vec(metadata(), 0..9)) {
        let list = TensorList::new(tensors.clone()).unwrap();
        prop_assert_eq!(&TensorList::read(&content(&list)).unwrap(), &list);
        let mut places = Vec::new();
        for ((of, place), tensor) in list.tensors().zip(&tensors) {
            prop_assert_eq!((of, place.end - place.start), (tensor, tensor.byte_length));
            let alignment = if tensor.byte_length < 1024 { 16 } else { 64 };
            prop_assert!(place.is_empty() || place.start.is_multiple_of(alignment));
            prop_assert!(place.is_empty() || (place.start < list.front()) == (tensor.byte_length < 1024));
            places.push(place);
        }
        // None has a byte of another, or of the head.
        places.retain(|place| !place.is_empty());
        places.sort_by_key(|place| place.start);
        let mut end = list.head().len() as u64;
        for place in places {
            prop_assert!(place.start >= end);
            end = place.end;
        }
        prop_assert_eq!(end, list.byte_length());
    }

    #[test]
    fn cut_and_damaged_lists_do_no_harm(
        tensors in proptest::collection::vec(metadata(), 0..5),
        at in any::<proptest::sample::Index>(),
        bits in 1u8..,
    ) {
        let whole = content(&TensorList::new(tensors).unwrap());
        prop_assert!(TensorList::read(&whole[..at.index(whole.len())]).is_err());
        let mut damaged = whole.clone();
        damaged[at.index(whole.len())] ^= bits;
        if let Ok(list) = TensorList::read(&damaged) {
            prop_assert!(list.tensors().all(|(_, place)| place.end <= damaged.len() as u64));
        }
        let mut longer = whole;
        longer.push(0);
        prop_assert!(TensorList::read(&longer).is_err());
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = TensorList::read(&bytes);
    }
}

#[test]
fn lists_above_the_limits_are_refused() {
    assert!(TensorList::new(vec![bytes_of(0); 1024]).is_ok());
    let many = TensorList::new(vec![bytes_of(0); 1025]);
    assert_eq!(many, Err(WireError::TooLong { field: "tensors", length: 1025, limit: 1024 }));
    let large = TensorList::new(vec![bytes_of(TENSOR_BYTES_MAX / 2), bytes_of(TENSOR_BYTES_MAX / 2)]);
    assert!(matches!(large, Err(WireError::TooLong { field: "bytes of the tensors", .. })), "{large:?}");
    // A head that claims more tensors than it has bytes for.
    let mut claims = TensorList::new(vec![bytes_of(1)]).unwrap().head();
    claims[4] = 200;
    assert_eq!(TensorList::read(&claims), Err(WireError::Truncated { field: "tensors" }));
}
