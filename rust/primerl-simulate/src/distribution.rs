//! Numbers that vary from rollout to rollout.

use rand::Rng;
use serde::{Deserialize, Serialize};

/// How a length (tokens), a number of turns or a time (seconds) is distributed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Distribution {
    Constant {
        value: f64,
    },
    /// Every number from `min` to `max` is as likely as any other.
    Uniform {
        min: f64,
        max: f64,
    },
    /// A long tail: the logarithm is normal with standard deviation `sigma`. What is drawn above `max` becomes `max`,
    /// as a completion that is cut off there.
    LogNormal {
        /// Mean before the cut.
        mean: f64,
        sigma: f64,
        max: f64,
    },
}

impl Distribution {
    pub fn constant(value: f64) -> Self {
        Distribution::Constant { value }
    }

    pub fn draw(&self, rng: &mut impl Rng) -> f64 {
        match *self {
            Distribution::Constant { value } => value,
            Distribution::Uniform { min, max } => min + rng.random::<f64>() * (max - min),
            Distribution::LogNormal { mean, sigma, max } => {
                let median = mean / (sigma * sigma / 2.0).exp();
                (median * (sigma * standard_normal(rng)).exp()).min(max)
            }
        }
    }

    /// Drawn, rounded to a whole number, at least `least`.
    pub fn draw_count(&self, rng: &mut impl Rng, least: u32) -> u32 {
        (self.draw(rng).round() as u32).max(least)
    }

    /// The largest number that can be drawn.
    pub fn max(&self) -> f64 {
        match *self {
            Distribution::Constant { value } => value,
            Distribution::Uniform { max, .. } | Distribution::LogNormal { max, .. } => max,
        }
    }

    /// What is wrong with it, where numbers below `least` or above `most` make no sense.
    pub fn problem(&self, least: f64, most: f64) -> Option<String> {
        let (low, numbers) = match *self {
            Distribution::Constant { value } => (value, vec![value]),
            Distribution::Uniform { min, max } => (min, vec![min, max]),
            Distribution::LogNormal { mean, sigma, max } => (mean.min(max), vec![mean, sigma, max]),
        };
        if numbers.iter().any(|number| !number.is_finite()) {
            return Some("every number must be finite".to_owned());
        }
        if low < least {
            return Some(format!("{low} is below {least}; raise it"));
        }
        if self.max() > most {
            return Some(format!("{} is above {most}; lower it", self.max()));
        }
        match *self {
            Distribution::Uniform { min, max } if min > max => {
                Some(format!("min ({min}) is above max ({max}); swap them"))
            }
            Distribution::LogNormal { mean, .. } if mean <= 0.0 => {
                Some(format!("mean ({mean}) must be above 0"))
            }
            Distribution::LogNormal { sigma, .. } if sigma < 0.0 => {
                Some(format!("sigma ({sigma}) must be at least 0"))
            }
            _ => None,
        }
    }
}

/// Box and Muller's transform, one of its two numbers.
fn standard_normal(rng: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Stream;

    fn mean_of(distribution: Distribution) -> f64 {
        let mut rng = Stream::new(1, 0, 0);
        (0..200_000)
            .map(|_| distribution.draw(&mut rng))
            .sum::<f64>()
            / 200_000.0
    }

    #[test]
    fn means_are_as_said() {
        let log_normal = |max| Distribution::LogNormal {
            mean: 2000.0,
            sigma: 1.0,
            max,
        };
        assert!((mean_of(log_normal(f64::MAX)) - 2000.0).abs() < 40.0);
        let cut = mean_of(log_normal(4000.0));
        assert!((1400.0..1800.0).contains(&cut), "{cut}");
        let uniform = Distribution::Uniform { min: 1.0, max: 3.0 };
        assert!((mean_of(uniform) - 2.0).abs() < 0.01);
        assert_eq!(mean_of(Distribution::constant(7.0)), 7.0);
    }

    #[test]
    fn nonsense_is_named() {
        let uniform = Distribution::Uniform { min: 3.0, max: 1.0 };
        assert_eq!(
            uniform.problem(1.0, 9.0),
            Some("min (3) is above max (1); swap them".to_owned())
        );
        let constant = |value, least| Distribution::constant(value).problem(least, 9.0);
        assert!(constant(f64::NAN, 0.0).is_some());
        assert!(constant(0.0, 1.0).is_some());
        assert_eq!(constant(1.0, 1.0), None);
        assert_eq!(constant(9.0, 1.0), None);
        assert_eq!(
            constant(9.5, 1.0),
            Some("9.5 is above 9; lower it".to_owned())
        );
    }
}
