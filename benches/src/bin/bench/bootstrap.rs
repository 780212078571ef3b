//! Confidence intervals of medians.

use super::phase::quantile;

/// Number of resamples.
const RESAMPLES: usize = 2_000;
/// Share of the resamples that the interval covers.
const COVERED: f64 = 0.90;

/// The 90 % bootstrap interval of the median of `values`: medians of samples of the same size, drawn with replacement.
/// The same values give the same interval.
pub(super) fn median_interval(values: &[f64]) -> (f64, f64) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let place = (u128::from(state) * values.len() as u128) >> 64;
        values.get(place as usize).copied().unwrap_or(0.0)
    };
    let mut resample = || {
        let drawn: Vec<f64> = (0..values.len()).map(|_| draw()).collect();
        quantile(&drawn, 0.5)
    };
    let medians: Vec<f64> = (0..RESAMPLES).map(|_| resample()).collect();
    (quantile(&medians, (1.0 - COVERED) / 2.0), quantile(&medians, f64::midpoint(1.0, COVERED)))
}

#[cfg(test)]
mod tests {
    use super::median_interval;

    #[test]
    fn interval_holds_the_median_and_shrinks_with_more_values() {
        let spread = |count: u32| {
            let values: Vec<f64> = (0..count).map(|n| f64::from(n % 10)).collect();
            let (low, high) = median_interval(&values);
            assert!(low <= 4.0 && high >= 4.0 && (0.0..=9.0).contains(&low), "{low} to {high}");
            high - low
        };
        assert!(spread(10) > spread(1000));
    }

    #[test]
    fn without_spread_there_is_none() {
        assert_eq!(median_interval(&[2.5; 7]), (2.5, 2.5));
        assert_eq!(median_interval(&[]), (0.0, 0.0));
    }
}
