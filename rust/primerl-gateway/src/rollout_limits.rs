//! Limits on what one rollout may use, of its environment and of its example.

use primerl_service::http::ApiError;
use serde::{Deserialize, Serialize};

/// `type` of the refusals; `param` names the limit.
pub(super) const KIND: &str = "rollout_limit";
/// `code` of the refusals: agents end in an orderly way at a full context, and a limit is just as final.
pub(super) const CODE: &str = "context_length_exceeded";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    Time,
    Turns,
    Tokens,
}

impl Limit {
    /// The limit's name in configs and refusals.
    pub(super) fn name(self) -> &'static str {
        match self {
            Limit::Time => "limits.time_s",
            Limit::Turns => "limits.turns",
            Limit::Tokens => "limits.tokens",
        }
    }

    /// `stop_condition` in a trace.
    pub(super) fn stop(self) -> &'static str {
        match self {
            Limit::Time => "limit_time",
            Limit::Turns => "limit_turns",
            Limit::Tokens => "limit_tokens",
        }
    }

    /// The limit because of which a request was refused.
    pub(super) fn of(error: &ApiError) -> Option<Limit> {
        let name = error.param.as_deref().filter(|_| error.kind == KIND)?;
        let all = [Limit::Time, Limit::Turns, Limit::Tokens];
        all.into_iter().find(|limit| limit.name() == name)
    }

    /// `used` describes how much the rollout has used.
    pub(super) fn refusal(self, used: &str) -> ApiError {
        let refused = ApiError::invalid(format!(
            "the rollout {used} ({}): it has to end, as at the maximum context length",
            self.name()
        ));
        ApiError {
            kind: KIND,
            ..refused.param(self.name()).code(CODE)
        }
    }
}

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
    fn the_smaller_of_two_limits_counts() {
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
