//! Element types and bytes of one and of the other.

use burn::tensor::{AllocationProperty, BoolStore, Bytes, DType};
use tensorwire::DataType;

/// Types that both have: `burn` variant, `tensorwire` variant.
macro_rules! with_types {
    ($macro:ident) => {
        $macro! {
            (F64, F64), (F32, F32), (F16, F16), (BF16, Bf16), (I64, I64), (I32, I32), (I16, I16), (I8, I8), (U64, U64), (U32, U32),
            (U16, U16), (U8, U8)
        }
    };
}

/// Tensorwire's type for elements of burn's.
pub(crate) fn to_tensorwire(dtype: DType) -> Option<DataType> {
    macro_rules! found {
        ($(($burn:ident, $tensorwire:ident)),*) => {
            match dtype {
                $(DType::$burn => Some(DataType::$tensorwire),)*
                DType::Bool(BoolStore::Native | BoolStore::U8) => Some(DataType::Bool),
                DType::Bool(BoolStore::U32) | DType::Flex32 | DType::QFloat(_) => None,
            }
        };
    }
    with_types!(found)
}

/// burn's type for elements of Tensorwire's.
pub(crate) fn to_burn(dtype: DataType) -> Option<DType> {
    macro_rules! found {
        ($(($burn:ident, $tensorwire:ident)),*) => {
            match dtype {
                $(DataType::$tensorwire => Some(DType::$burn),)*
                DataType::Bool => Some(DType::Bool(BoolStore::Native)),
                _ => None,
            }
        };
    }
    with_types!(found)
}

/// The same memory for burn, which never writes into it: what changes such a tensor copies it before. Back ends read elements in
/// place, so bytes that are not aligned for them are copied.
pub(crate) fn shared(bytes: bytes::Bytes, dtype: DType) -> Bytes {
    let is_aligned = bytes.as_ptr().addr().is_multiple_of(dtype.size().max(1));
    if is_aligned && !bytes.is_empty() {
        return Bytes::from_shared(bytes, AllocationProperty::Other);
    }
    Bytes::from_bytes_vec(bytes.to_vec()).shared()
}
