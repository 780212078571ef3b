//! Encoding of string tensors as TensorFlow's `TensorProto`.

use bytes::{Buf as _, Bytes};
use prost::Message;
use tensorwire_protocol::{DataType, Metadata};

use crate::error::WorkerError;

/// The fields of `tensorflow.TensorProto` that string tensors use.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorProto {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    tensor_shape: Option<TensorShapeProto>,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    string_val: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorShapeProto {
    #[prost(message, repeated, tag = "2")]
    dim: Vec<Dim>,
    #[prost(bool, tag = "3")]
    unknown_rank: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Dim {
    #[prost(int64, tag = "1")]
    size: i64,
}

impl TensorProto {
    /// Encodes byte strings in row-major order.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if a dimension is above 2⁶³−1.
    pub(crate) fn of_strings(shape: &[u64], strings: Vec<Bytes>) -> Result<Self, WorkerError> {
        let dim = shape.iter().map(|&size| i64::try_from(size).map(|size| Dim { size }));
        let dim = dim.collect::<Result<_, _>>().map_err(|_| WorkerError::InvalidTensor {
            problem: format!("shape {shape:?} has a dimension above 2^63-1, which no string tensor can have"),
        })?;
        let tensor_shape = Some(TensorShapeProto { dim, unknown_rank: false });
        Ok(Self { dtype: DataType::String as i32, tensor_shape, string_val: strings })
    }

    /// The strings of an encoded tensor, which must match `metadata`. They share `content`.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] names the contradiction.
    pub(crate) fn strings(content: Bytes, metadata: &Metadata) -> Result<Vec<Bytes>, WorkerError> {
        let invalid = |problem: String| WorkerError::InvalidTensor { problem };
        let length = content.remaining();
        let proto = Self::decode(content).map_err(|error| {
            invalid(format!("its {length} bytes are not a TensorProto: {error}; send it again"))
        })?;
        if proto.dtype != DataType::String as i32 {
            return Err(invalid(format!("its TensorProto has element type {}, not string (7)", proto.dtype)));
        }
        let shape = proto.tensor_shape.unwrap_or_default();
        let fits = |(dim, &size): (&Dim, &u64)| u64::try_from(dim.size) == Ok(size);
        let dimensions = metadata.shape.dimensions();
        let is_same = shape.dim.len() == dimensions.len() && shape.dim.iter().zip(dimensions).all(fits);
        if shape.unknown_rank || !is_same {
            return Err(invalid(format!("the shape of its TensorProto is not {}", metadata.shape)));
        }
        if proto.string_val.len() as u64 != metadata.shape.elements() {
            let (found, shape) = (proto.string_val.len(), &metadata.shape);
            return Err(invalid(format!(
                "its TensorProto has {found} strings, which does not match shape {shape}"
            )));
        }
        Ok(proto.string_val)
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_protocol::Shape;

    use super::*;

    fn metadata(shape: &[u64], length: usize) -> Metadata {
        Metadata::encoded(DataType::String, Shape::new(shape).unwrap(), length as u64).unwrap()
    }

    fn encoded(shape: &[u64], strings: &[&'static str]) -> Vec<u8> {
        let strings = strings.iter().map(|text| Bytes::from_static(text.as_bytes())).collect();
        TensorProto::of_strings(shape, strings).unwrap().encode_to_vec()
    }

    fn read(bytes: &[u8], shape: &[u64]) -> Result<Vec<Bytes>, WorkerError> {
        TensorProto::strings(Bytes::copy_from_slice(bytes), &metadata(shape, bytes.len()))
    }

    #[test]
    fn the_bytes_are_tensorflows() {
        // dtype 7; tensor_shape { dim { size 2 } }; string_val "a", "bc".
        let expected = [8, 7, 18, 4, 18, 2, 8, 2, 66, 1, b'a', 66, 2, b'b', b'c'];
        assert_eq!(encoded(&[2], &["a", "bc"]), expected);
        assert_eq!(read(&expected, &[2]).unwrap(), ["a", "bc"]);
    }

    #[test]
    fn fields_of_other_versions_are_passed_over() {
        let mut bytes = encoded(&[], &["x"]);
        bytes.extend([24, 1]); // version_number
        assert_eq!(read(&bytes, &[]).unwrap(), ["x"]);
    }

    #[test]
    fn s5_hostile_encodings_are_errors_that_name_the_contradiction() {
        let good = encoded(&[2], &["a", "bc"]);
        let problem = |bytes: &[u8], shape: &[u64]| read(bytes, shape).unwrap_err().to_string();
        assert!(problem(&good, &[3]).contains("the shape of its TensorProto is not"));
        assert!(problem(&good, &[2, 1]).contains("the shape of its TensorProto is not"));
        assert!(problem(&encoded(&[2], &["a"]), &[2]).contains("1 strings"));
        assert!(problem(&encoded(&[1 << 40], &["a"]), &[1 << 40]).contains("1 strings"));
        let mut other_type = good.clone();
        other_type[1] = 1;
        assert!(problem(&other_type, &[2]).contains("element type 1"));
        for cut in 0..good.len() {
            assert!(read(&good[..cut], &[2]).is_err(), "cut at {cut}");
        }
        // A string with an endless length.
        assert!(problem(&[66, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 1], &[1]).contains("not a TensorProto"));
        // A negative dimension, and an unknown rank.
        let negative = [8, 7, 18, 13, 18, 11, 8, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1];
        assert!(problem(&negative, &[1]).contains("the shape of its TensorProto is not"));
        assert!(problem(&[8, 7, 18, 2, 24, 1, 66, 0], &[]).contains("the shape of its TensorProto is not"));
        assert!(problem(&[], &[]).contains("element type 0"));
    }
}
