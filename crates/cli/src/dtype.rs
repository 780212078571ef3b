//! Element types of the file format and of the wire.

use safetensors::Dtype;
use tensorwire::DataType;

/// The types that both know.
const PAIRS: [(Dtype, DataType); 16] = [
    (Dtype::BOOL, DataType::Bool),
    (Dtype::U8, DataType::U8),
    (Dtype::I8, DataType::I8),
    (Dtype::U16, DataType::U16),
    (Dtype::I16, DataType::I16),
    (Dtype::U32, DataType::U32),
    (Dtype::I32, DataType::I32),
    (Dtype::U64, DataType::U64),
    (Dtype::I64, DataType::I64),
    (Dtype::F16, DataType::F16),
    (Dtype::BF16, DataType::Bf16),
    (Dtype::F32, DataType::F32),
    (Dtype::F64, DataType::F64),
    (Dtype::C64, DataType::C64),
    (Dtype::F8_E5M2, DataType::F8E5M2),
    (Dtype::F8_E4M3, DataType::F8E4M3),
];

/// The wire's name for an element type of a file.
pub(crate) fn of_file(dtype: Dtype) -> Option<DataType> {
    PAIRS.iter().find(|pair| pair.0 == dtype).map(|pair| pair.1)
}

/// The file's name for an element type of the wire.
pub(crate) fn for_file(dtype: DataType) -> Option<Dtype> {
    PAIRS.iter().find(|pair| pair.1 == dtype).map(|pair| pair.0)
}

#[cfg(test)]
mod tests {
    use super::{PAIRS, for_file, of_file};

    #[test]
    fn pairs_have_equal_sizes_and_go_both_ways() {
        for (file, wire) in PAIRS {
            assert_eq!(file.bitsize() as u64, wire.bits(), "{wire}");
            assert_eq!((of_file(file), for_file(wire)), (Some(wire), Some(file)));
        }
    }
}
