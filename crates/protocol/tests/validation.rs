//! The changes that checksums find.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use tensorwire_protocol::Validation;

fn validation() -> impl Strategy<Value = Validation> {
    prop_oneof![Just(Validation::Crc32c), Just(Validation::Xxh3)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn d_flip_any_flipped_bit_changes_the_checksum(
        mut content in proptest::collection::vec(any::<u8>(), 1..20_000),
        at in any::<prop::sample::Index>(),
        bit in 0..8,
        validation in validation(),
    ) {
        let sent = validation.checksum(&content);
        let at = at.index(content.len());
        content[at] ^= 1u8 << bit;
        prop_assert_ne!(validation.checksum(&content), sent);
    }

    /// A CRC of 32 bits finds such a change with certainty. XXH3 misses it once in 2^64.
    #[test]
    fn d_flip_any_burst_of_32_bits_changes_the_checksum(
        mut content in proptest::collection::vec(any::<u8>(), 4..20_000),
        at in any::<prop::sample::Index>(),
        burst in 1..=u32::MAX,
        validation in validation(),
    ) {
        let sent = validation.checksum(&content);
        let at = at.index(content.len() - 3);
        for (byte, change) in content[at..].iter_mut().zip(burst.to_le_bytes()) {
            *byte ^= change;
        }
        prop_assert_ne!(validation.checksum(&content), sent);
    }

    #[test]
    fn d_flip_bytes_left_out_or_added_change_the_checksum(
        content in proptest::collection::vec(any::<u8>(), 1..2000),
        validation in validation(),
    ) {
        let sent = validation.checksum(&content);
        prop_assert_ne!(validation.checksum(&content[1..]), sent);
        prop_assert_ne!(validation.checksum(&content[..content.len() - 1]), sent);
    }
}
