//! The raw bindings to libibverbs. `scripts/gen-verbs-bindings` writes the other files of this module.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)] // C's names
#![allow(missing_docs, missing_debug_implementations, unreachable_pub, dead_code)] // generated
#![allow(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)] // the callers argue
#![allow(clippy::all, clippy::semicolon_if_nothing_returned)]

/// A struct of the functions of a library that is opened at run time. Older releases lack the optional ones.
macro_rules! functions {
    (
        $(fn $name:ident($($argument:ident: $type:ty),*) $(-> $answer:ty)?;)*
        optional:
        $(fn $newer:ident($($newer_argument:ident: $newer_type:ty),*) -> $newer_answer:ty;)*
    ) => {
        pub struct Functions {
            $($name: unsafe extern "C" fn($($type),*) $(-> $answer)?,)*
            $(pub $newer: Option<unsafe extern "C" fn($($newer_type),*) -> $newer_answer>,)*
            _library: Library,
        }

        impl Functions {
            pub unsafe fn open(file: &str) -> Result<Self, libloading::Error> {
                let library = Library::new(file)?;
                Ok(Self {
                    $($name: library.get(stringify!($name)).map(|found| *found)?,)*
                    $($newer: library.get(stringify!($newer)).map(|found| *found).ok(),)*
                    _library: library,
                })
            }

            $(pub unsafe fn $name(&self, $($argument: $type),*) $(-> $answer)? {
                (self.$name)($($argument),*)
            })*
            $(pub unsafe fn $newer(&self, $($newer_argument: $newer_type),*) -> Option<$newer_answer> {
                Some((self.$newer?)($($newer_argument),*))
            })*
        }
    };
}

/// Asserts the size and the alignment of types, and the offsets of their fields. The C library's mutexes differ in size
/// between architectures, so this is asserted only on the one where it was measured.
macro_rules! layout {
    ($($type:ident: $size:literal, $alignment:literal { $($field:ident: $offset:literal),* })*) => {
        #[cfg(target_arch = "x86_64")]
        const _: () = {
            $(
                assert!(size_of::<$type>() == $size, stringify!($type));
                assert!(align_of::<$type>() == $alignment, stringify!($type));
                $(assert!(offset_of!($type, $field) == $offset, stringify!($type.$field));)*
            )*
        };
    };
}

mod functions;
mod layout;
mod numbers;
mod types;

pub use functions::Functions;
pub use numbers::*;
pub use types::*;
