//! Limits on what one rollout may use, of its environment and of its example.

use serde::{Deserialize, Serialize};

/// `None`: no such limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutLimits {
    /// Seconds since the lease during which the model answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_s: Option<f64>,
    /// Answers of the model, over all conversations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turns: Option<u32>,
    /// Sampled tokens, over all conversations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u32>,
}

impl RolloutLimits {
    /// For each limit, the smaller of the two values.
    pub fn tightened(self, other: RolloutLimits) -> RolloutLimits {
        let least = |one: Option<u32>, other: Option<u32>| one.into_iter().chain(other).min();
        let times = self.time_s.into_iter().chain(other.time_s);
        RolloutLimits {
            time_s: times.reduce(f64::min),
            turns: least(self.turns, other.turns),
            tokens: least(self.tokens, other.tokens),
        }
    }

    /// The first invalid limit: its name, what is wrong, and how to fix it.
    pub fn problem(&self) -> Option<(&'static str, String, &'static str)> {
        let counts = [("turns", self.turns), ("tokens", self.tokens)];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            return Some((name, "is 0".into(), "give at least 1, or omit it"));
        }
        match self.time_s {
            Some(seconds) if !(seconds.is_finite() && seconds > 0.0) => Some((
                "time_s",
                format!("is {seconds}"),
                "give seconds above 0, or omit it",
            )),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_limits_the_smaller_one_counts() {
        let environment = RolloutLimits {
            time_s: Some(30.0),
            turns: Some(4),
            tokens: None,
        };
        let example = RolloutLimits {
            time_s: Some(60.0),
            turns: Some(2),
            tokens: Some(100),
        };
        let both = RolloutLimits {
            time_s: Some(30.0),
            turns: Some(2),
            tokens: Some(100),
        };
        assert_eq!(environment.tightened(example), both);
        assert_eq!(example.tightened(environment), both);
        assert_eq!(both.tightened(RolloutLimits::default()), both);
    }

    #[test]
    fn no_time_and_no_turns_are_refused_by_name() {
        for (text, name) in [
            (r#"{"turns": 0}"#, "turns"),
            (r#"{"tokens": 0}"#, "tokens"),
            (r#"{"time_s": 0.0}"#, "time_s"),
            (r#"{"time_s": -1.0}"#, "time_s"),
        ] {
            let limits: RolloutLimits = serde_json::from_str(text).expect("is read");
            assert_eq!(limits.problem().map(|(name, ..)| name), Some(name));
        }
        assert!(serde_json::from_str::<RolloutLimits>(r#"{"turn": 3}"#).is_err());
    }
}
