//! How sure a mean over examples is: the ends of its interval of 95 %.
//!
//! The examples are independent of each other, the rollouts of one are not, so it is the examples' scores whose spread
//! counts (Miller, arXiv:2411.00640). Scores from 0 to 1 have Wilson's interval (JASA 22:209, 1927), which stays within
//! these bounds, of as many examples as the spread is worth: of n scores with mean p and variance v, `n p (1 - p) / v` (the
//! design effect is `v / (p (1 - p))`), with Student's quantile where that is estimated (Korn and Graubard, Survey Methodology
//! 24:193, 1998; compared with others by Franco et al., J. Survey Stat. Methodol. 7:334, 2019). Read without a design, it is
//! the score interval of a mean whose variance is taken to be a multiple of p (1 - p).
//!
//! Where every score is 0 or 1 there is nothing to be estimated: it is Wilson's interval of a share. Where all scores are alike
//! their spread is 0, which is no certainty, and says nothing of how the rollouts of an example go together: each example
//! counts once.
//!
//! Scores beyond 0 and 1 have Student's interval of a mean.

use crate::advantage::differ;

/// What half of the rest lies beyond.
const NORMAL_95: f64 = 1.959_963_984_540_054;
/// Student's, of 1 to 4 degrees of freedom: the series is no good for so few.
const STUDENT_95: [f64; 4] = [12.706_205, 4.302_653, 3.182_446, 2.776_445];

/// The interval of at least two scores. `bounded`: whether they are means of numbers from 0 to 1.
pub(super) fn ends(scores: &[f64], bounded: bool) -> Option<(f64, f64)> {
    if scores.len() < 2 {
        return None;
    }
    let count = scores.len() as f64;
    let center = mean(scores);
    let squares = scores.iter().map(|score| (score - center).powi(2));
    let variance = squares.sum::<f64>() / count;
    let student = student(scores.len() - 1);
    if !bounded {
        let half = student * (variance / (count - 1.0)).sqrt();
        return Some((center - half, center + half));
    }
    let (effective, quantile) = match is_share(scores) || is_alike(scores) {
        true => (count, NORMAL_95),
        false => (count * center * (1.0 - center) / variance, student),
    };
    let (low, high) = wilson(center, effective, quantile);
    // Rounding may put an end beyond the mean, or beyond the bound that a share of 0 or 1 is.
    Some((low.clamp(0.0, center), high.clamp(center, 1.0)))
}

/// The mean of at least one value.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn is_share(scores: &[f64]) -> bool {
    scores.iter().all(|score| *score == 0.0 || *score == 1.0)
}

fn is_alike(scores: &[f64]) -> bool {
    !differ(scores.iter().copied())
}

/// The ends of the score interval of a share of `count`, which need not be a whole number.
fn wilson(share: f64, count: f64, quantile: f64) -> (f64, f64) {
    let spread = quantile * quantile / count;
    let center = share + spread / 2.0;
    let half = (spread * (share * (1.0 - share) + spread / 4.0)).sqrt();
    (
        (center - half) / (1.0 + spread),
        (center + half) / (1.0 + spread),
    )
}

/// The quantile of Student's distribution (Abramowitz and Stegun 26.7.5; within 3e-4).
fn student(freedom: usize) -> f64 {
    if let Some(quantile) = STUDENT_95.get(freedom - 1) {
        return *quantile;
    }
    let (z, freedom) = (NORMAL_95, freedom as f64);
    let powers = |coefficients: &[f64]| -> f64 {
        let odd = coefficients.iter().enumerate();
        odd.map(|(index, factor)| factor * z.powi(2 * index as i32 + 1))
            .sum()
    };
    z + powers(&[1.0, 1.0]) / (4.0 * freedom)
        + powers(&[3.0, 16.0, 5.0]) / (96.0 * freedom.powi(2))
        + powers(&[-15.0, 17.0, 19.0, 3.0]) / (384.0 * freedom.powi(3))
        + powers(&[-945.0, -1920.0, 1482.0, 776.0, 79.0]) / (92_160.0 * freedom.powi(4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn close(found: f64, expected: f64, within: f64) {
        assert!(
            (found - expected).abs() < within,
            "{found} is not {expected}"
        );
    }

    #[track_caller]
    fn are(found: Option<(f64, f64)>, low: f64, high: f64) {
        let (found_low, found_high) = found.expect("has an interval");
        close(found_low, low, 1e-6);
        close(found_high, high, 1e-6);
    }

    #[test]
    fn quantiles_are_students() {
        // From a printed table.
        for (freedom, expected) in [
            (1, 12.706),
            (4, 2.776),
            (5, 2.571),
            (9, 2.262),
            (30, 2.042),
            (100, 1.984),
        ] {
            close(student(freedom), expected, 1e-3);
        }
        close(student(1_000_000), NORMAL_95, 1e-5);
    }

    #[test]
    fn a_share_has_wilsons_interval() {
        // As R's `prop.test(x, n, correct = FALSE)` has it, of 9 and 10 of 10, and 50 of 100.
        let of = |passed: usize, all: usize| {
            let scores: Vec<f64> = (0..all)
                .map(|index| f64::from(u8::from(index < passed)))
                .collect();
            ends(&scores, true)
        };
        are(of(9, 10), 0.595_850_0, 0.982_123_8);
        are(of(10, 10), 0.722_467_2, 1.0);
        are(of(50, 100), 0.403_831_5, 0.596_168_5);
        assert_eq!(of(1, 1), None, "one example has no interval");
    }

    #[test]
    fn scores_between_have_that_of_as_many_examples_as_their_spread_is_worth() {
        // A mean of 0.4 and a variance of 0.02 2/3: 3 * 0.24 / 0.026667 = 27 examples.
        let found = ends(&[0.2, 0.4, 0.6], true);
        let (low, high) = wilson(0.4, 27.0, 4.302_653);
        are(found, low, high);
        assert!(low > 0.0 && high < 1.0);
        // All alike, each counts once.
        let (low, high) = wilson(0.5, 4.0, NORMAL_95);
        are(ends(&[0.5; 4], true), low, high);
    }

    #[test]
    fn scores_without_bounds_have_students_interval() {
        let half = 2.776_445 * (2.5_f64 / 5.0).sqrt();
        are(
            ends(&[1.0, 2.0, 3.0, 4.0, 5.0], false),
            3.0 - half,
            3.0 + half,
        );
        are(ends(&[3.0; 4], false), 3.0, 3.0);
    }

    /// The share of evaluations whose interval holds the truth; each example passes with a chance of its own, from 0 to
    /// `2 * mean`.
    fn covered(examples: usize, rollouts: usize, mean: f64) -> f64 {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let trials = 4000;
        let mut held = 0;
        for _ in 0..trials {
            let scores: Vec<f64> = (0..examples)
                .map(|_| {
                    let chance = 2.0 * mean * rng.random::<f64>();
                    let passed = (0..rollouts).filter(|_| rng.random::<f64>() < chance);
                    passed.count() as f64 / rollouts as f64
                })
                .collect();
            let (low, high) = ends(&scores, true).expect("has an interval");
            assert!((0.0..=1.0).contains(&low) && (0.0..=1.0).contains(&high));
            held += usize::from((low..=high).contains(&mean));
        }
        f64::from(held as u32) / f64::from(trials)
    }

    #[test]
    fn nineteen_of_twenty_intervals_hold_the_truth() {
        for (examples, rollouts, mean) in [
            (5, 4, 0.5),
            (10, 1, 0.1),
            (10, 4, 0.1),
            (10, 4, 0.5),
            (30, 2, 0.05),
            (64, 1, 0.3),
            (64, 4, 0.1),
        ] {
            let covered = covered(examples, rollouts, mean);
            assert!(
                (0.92..=0.99).contains(&covered),
                "{covered} of {examples} x {rollouts} at {mean}"
            );
        }
    }
}
