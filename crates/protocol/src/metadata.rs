//! Everything about a tensor except its bytes.

use std::fmt;

use smallvec::SmallVec;

use crate::limits::RANK_MAX;

/// Dimensions that are stored without an allocation.
const INLINE_RANK: usize = 4;

/// Numbers of element types are below this.
const NUMBERS: usize = 26;

macro_rules! data_types {
    ($($variant:ident = $number:literal, $name:literal, $bits:literal, $doc:literal;)*) => {
        /// Element types. All but [strings](Self::String) can be copied byte by byte. The numbers are TensorFlow's where it
        /// has the type.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DataType { $(#[doc = $doc] $variant = $number,)* }

        impl DataType {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The type with each number.
            const BY_NUMBER: [Option<Self>; NUMBERS] = {
                let mut types = [None; NUMBERS];
                $(types[$number] = Some(Self::$variant);)*
                types
            };

            /// The lower-case name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bits of one element; 0 where elements have no fixed size.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }

            /// Whether the content is the bytes of the elements. Otherwise it is an encoded `TensorProto`.
            pub fn is_plain(self) -> bool {
                self.bits() > 0
            }
        }
    };
}

data_types! {
    F32 = 1, "f32", 32, "32-bit float.";
    F64 = 2, "f64", 64, "64-bit float.";
    I32 = 3, "i32", 32, "32-bit signed integer.";
    U8 = 4, "u8", 8, "8-bit unsigned integer.";
    I16 = 5, "i16", 16, "16-bit signed integer.";
    I8 = 6, "i8", 8, "8-bit signed integer.";
    String = 7, "string", 0, "Byte strings of any length.";
    C64 = 8, "c64", 64, "Two 32-bit floats.";
    I64 = 9, "i64", 64, "64-bit signed integer.";
    Bool = 10, "bool", 8, "One byte, 0 or 1.";
    Bf16 = 14, "bf16", 16, "Brain float.";
    U16 = 17, "u16", 16, "16-bit unsigned integer.";
    C128 = 18, "c128", 128, "Two 64-bit floats.";
    F16 = 19, "f16", 16, "Half-precision float.";
    U32 = 22, "u32", 32, "32-bit unsigned integer.";
    U64 = 23, "u64", 64, "64-bit unsigned integer.";
    F8E5M2 = 24, "f8_e5m2", 8, "8-bit float, 5 exponent bits.";
    F8E4M3 = 25, "f8_e4m3", 8, "8-bit float, 4 exponent bits.";
}

impl DataType {
    /// The type with number `number`.
    ///
    /// # Errors
    /// [`UnknownDataType`] when there is none.
    pub fn from_number(number: u32) -> Result<Self, UnknownDataType> {
        let found = usize::try_from(number).ok().and_then(|at| Self::BY_NUMBER.get(at).copied().flatten());
        found.ok_or(UnknownDataType(number))
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number that belongs to no element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("element type number {0} is unknown; is the peer of a newer version?")]
pub struct UnknownDataType(pub u32);

/// Lengths of the dimensions; none for a scalar.
///
/// ```
/// use tensorwire_protocol::Shape;
///
/// let shape = Shape::new([2, 3]).expect("few enough elements");
/// assert_eq!((shape.dimensions(), shape.elements()), (&[2, 3][..], 6));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(SmallVec<[u64; INLINE_RANK]>);

impl std::ops::Deref for Shape {
    type Target = [u64];

    /// The dimensions.
    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl Shape {
    /// A shape, or `None` when it has more than 254 dimensions or more than 2⁶⁴−1 elements.
    pub fn new(dimensions: impl AsRef<[u64]>) -> Option<Self> {
        Self::checked(SmallVec::from_slice(dimensions.as_ref()))
    }

    /// As [`new`](Self::new), of the first `rank` dimensions that `dimension` returns.
    ///
    /// # Errors
    /// The first error of `dimension`.
    pub(crate) fn read<E>(
        rank: usize,
        mut dimension: impl FnMut() -> Result<u64, E>,
    ) -> Result<Option<Self>, E> {
        if rank > INLINE_RANK {
            let dimensions = (0..rank).map(|_| dimension()).collect::<Result<SmallVec<_>, E>>()?;
            return Ok(Self::checked(dimensions));
        }
        let mut inline = [0; INLINE_RANK];
        for length in inline.iter_mut().take(rank) {
            *length = dimension()?;
        }
        Ok(Self::checked(SmallVec::from_buf_and_len(inline, rank)))
    }

    fn checked(dimensions: SmallVec<[u64; INLINE_RANK]>) -> Option<Self> {
        let shape = Self(dimensions);
        (shape.0.len() <= RANK_MAX && shape.checked_elements().is_some()).then_some(shape)
    }

    /// The dimensions.
    pub fn dimensions(&self) -> &[u64] {
        &self.0
    }

    /// Number of elements: 1 for a scalar, 0 if any dimension is 0.
    pub fn elements(&self) -> u64 {
        self.checked_elements().unwrap_or(0)
    }

    fn checked_elements(&self) -> Option<u64> {
        if self.0.contains(&0) {
            return Some(0);
        }
        self.0.iter().try_fold(1u64, |product, &dimension| product.checked_mul(dimension))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Everything about a value except its bytes. A receiver caches it, and a sender compares it with what the receiver
/// knows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Metadata {
    /// Element type.
    pub dtype: DataType,
    /// Shape.
    pub shape: Shape,
    /// Whether the value comes from a branch that was not taken; it has no content then.
    pub is_dead: bool,
    /// Bytes of content: 0 when dead.
    pub byte_length: u64,
}

impl Metadata {
    /// The metadata of a live tensor; `None` when its size in bytes is no whole number below 2⁶⁴, or depends on its
    /// elements.
    pub fn new(dtype: DataType, shape: Shape) -> Option<Self> {
        let byte_length = Self::plain_bytes(dtype, &shape)?;
        Some(Self { dtype, shape, is_dead: false, byte_length })
    }

    /// The bytes of a live tensor; `None` as for [`new`](Self::new).
    pub(crate) fn plain_bytes(dtype: DataType, shape: &Shape) -> Option<u64> {
        if !dtype.is_plain() {
            return None;
        }
        let bits = shape.elements().checked_mul(dtype.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The metadata of a live tensor whose content is an encoded `TensorProto` of `byte_length` bytes; `None` for an element type
    /// whose content is plain bytes.
    pub fn encoded(dtype: DataType, shape: Shape, byte_length: u64) -> Option<Self> {
        (!dtype.is_plain()).then_some(Self { dtype, shape, is_dead: false, byte_length })
    }

    /// The metadata of a dead value.
    pub fn dead(dtype: DataType, shape: Shape) -> Self {
        Self { dtype, shape, is_dead: true, byte_length: 0 }
    }
}
