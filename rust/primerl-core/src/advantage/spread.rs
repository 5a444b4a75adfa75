//! Mean and spread of rewards, and which differences are more than rounding.

/// Numbers of which the largest is about 1 differ where they are further apart than this share of it: some ulps of the
/// 32-bit floats in which judges and reward models compute.
const ROUNDING: f64 = 1e-6;

/// Numbers of any size differ where they are further apart than this. Near 0 there is no share to go by: `0.1 + 0.2 - 0.3`
/// is 5.6e-17 where `0.3 - 0.3` is 0.
pub(crate) const SMALLEST_DIFFERENCE: f64 = 1e-9;

/// Whether there is a signal: the values differ by more than the rounding of their computation, as `0.3` and
/// `0.1 + 0.2` do not. The one place where that is decided; without it, what divides by a spread makes noise of size 1.
pub(crate) fn differ(values: impl Iterator<Item = f64>) -> bool {
    let start = (f64::INFINITY, f64::NEG_INFINITY);
    let (low, high) = values.fold(start, |(low, high), value| {
        (low.min(value), high.max(value))
    });
    let largest = low.abs().max(high.abs());
    low < high && high - low > SMALLEST_DIFFERENCE.max(ROUNDING * largest)
}

/// 0 for no values.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// Population standard deviation; 0 for no values. Exactly 0 where the values do not [`differ`].
pub(crate) fn standard_deviation(values: &[f64]) -> f64 {
    if !differ(values.iter().copied()) {
        return 0.0;
    }
    let center = mean(values.iter().copied());
    mean(values.iter().map(|value| (value - center).powi(2))).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_no_difference() {
        let equal: [&[f64]; 8] = [
            &[],
            &[0.3],
            &[0.3, 0.1 + 0.2],
            &[0.0, 0.1 + 0.2 - 0.3],
            &[-0.3, -(0.1 + 0.2)],
            &[f64::from(0.7_f32), f64::from(0.7_f32.next_up())],
            &[1e20, 1e20 * (1.0 + f64::EPSILON)],
            &[0.0, -0.0],
        ];
        for values in equal {
            assert!(!differ(values.iter().copied()), "{values:?}");
            assert_eq!(standard_deviation(values), 0.0, "{values:?}");
        }
        let different: [&[f64]; 5] = [
            &[0.3, 0.300_01],
            &[0.0, 1e-6],
            &[-1e30, 1e30],
            &[1000.0, 1000.01],
            &[0.3, 0.1 + 0.2, 0.4],
        ];
        for values in different {
            assert!(differ(values.iter().copied()), "{values:?}");
            assert!(standard_deviation(values) > 0.0, "{values:?}");
        }
    }
}
