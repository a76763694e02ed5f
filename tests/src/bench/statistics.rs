//! Medians, percentiles and ratios of what was measured.

/// The middle value; of an even number of values the mean of the two in the middle. `None` if
/// there is no value.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// The smallest value that `percent` in a hundred of the values do not exceed. Sorts the values.
/// `None` if there is no value.
pub fn percentile(values: &mut [u64], percent: usize) -> Option<u64> {
    values.sort_unstable();
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).copied()
}

/// The median of the ratios round by round. Rounds in which either is missing, or the base is
/// zero, do not count. A machine whose speed changes between rounds changes both, and so not
/// their ratio; the ratio of two medians would keep the change.
pub fn ratio_by_round(values: &[Option<f64>], base: &[Option<f64>]) -> Option<f64> {
    let ratios: Vec<f64> = values
        .iter()
        .zip(base)
        .filter_map(|(value, base)| Some((*value)? / base.filter(|base| *base != 0.0)?))
        .collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_no_outlier_moves_it() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[9.0, 1.0, 1000.0]), Some(9.0));
        assert_eq!(median(&[4.0, 1.0, 1000.0, 2.0]), Some(3.0));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<_> = (1..=200).rev().collect();
        assert_eq!(percentile(&mut values, 50), Some(100));
        assert_eq!(percentile(&mut values, 99), Some(198));
        assert_eq!(percentile(&mut values, 100), Some(200));
        assert_eq!(percentile(&mut [5], 1), Some(5));
        assert_eq!(percentile(&mut [], 50), None);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // Twice as fast in every round, while the machine's speed changes tenfold.
        let ours = [Some(20.0), Some(200.0), Some(2.0), Some(40.0)];
        let theirs = [Some(10.0), Some(100.0), Some(1.0), Some(20.0)];
        assert_eq!(ratio_by_round(&ours, &theirs), Some(2.0));
    }

    #[test]
    fn a_round_without_both_does_not_count() {
        let ours = [None, Some(3.0), Some(8.0), Some(1.0)];
        let theirs = [Some(1.0), Some(1.0), None, Some(0.0)];
        assert_eq!(ratio_by_round(&ours, &theirs), Some(3.0));
        assert_eq!(ratio_by_round(&[None], &[Some(1.0)]), None);
    }
}
