//! Why a rollout gave no result, and which kind of error that is: decided here and nowhere else.
//!
//! What the gateway saw goes before what the worker guesses: an environment that raises since no engine answered is not
//! to blame. Then comes the type of the exception, where it is a known one, then the report's own word.

use crate::ids::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Who is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// What the policy wrote: too much for its context, or for the rollout's limits.
    Model,
    /// Those who sample: an engine, a teacher, a server that is evaluated.
    Engine,
    /// A tool that the environment offers.
    Tool,
    /// The environment's own code, its rewards, or what it asks of the gateway.
    Environment,
    /// The time was up.
    Timeout,
    /// What it all runs on: workers that are lost, sandboxes, tunnels.
    Infrastructure,
}

impl ErrorKind {
    pub const ALL: [ErrorKind; 6] = [
        ErrorKind::Model,
        ErrorKind::Engine,
        ErrorKind::Tool,
        ErrorKind::Environment,
        ErrorKind::Timeout,
        ErrorKind::Infrastructure,
    ];

    /// As in metrics: `errors/<name>`.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Model => "model",
            ErrorKind::Engine => "engine",
            ErrorKind::Tool => "tool",
            ErrorKind::Environment => "environment",
            ErrorKind::Timeout => "timeout",
            ErrorKind::Infrastructure => "infrastructure",
        }
    }

    pub fn of(error: &RolloutError) -> ErrorKind {
        let seen = error.refusal.as_ref().and_then(of_refusal);
        let exception = error.exception.as_deref();
        let reported = exception.and_then(|name| of_exception(name, error.status));
        let (first, second) = match &error.refusal {
            // Agents end in order at these: what failed then came after it, unless it is that refusal in other words.
            Some(Refusal { code, .. }) if ENDS_IN_ORDER.contains(&code.as_str()) => {
                (reported.filter(|kind| *kind != ErrorKind::Engine), seen)
            }
            _ => (seen, reported),
        };
        first.or(second).unwrap_or_else(|| of_word(&error.kind))
    }
}

/// [`RolloutError::kind`] of a rollout whose first prompt is longer than the context: no policy can answer it.
pub const PROMPT_TOO_LONG: &str = "prompt_too_long";

/// An answer of the gateway that was an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// As sent to the client; empty where it has none.
    pub code: String,
    /// HTTP status code.
    pub status: u16,
    /// Where the prompt was longer than the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overflow: Option<Overflow>,
}

/// A prompt that is longer than the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    pub prompt_tokens: u32,
    /// The context, prompt and answer together.
    pub most: u32,
}

/// Why a rollout gave no result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutError {
    /// Which boundary failed, as the reporter names it: `environment`, `engine`, `timeout`, `worker_lost`, ... What it counts
    /// as, [`ErrorKind::of`] decides.
    pub kind: String,
    pub message: String,
    /// Type of the exception, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exception: Option<String>,
    /// HTTP status that it came with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// [`crate::event::Outcome::refusal`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl RolloutError {
    pub(crate) fn new(kind: &str, message: String) -> RolloutError {
        RolloutError {
            kind: kind.to_owned(),
            message,
            ..RolloutError::default()
        }
    }

    /// With the kind in place of the worker's guess at it, so that it is counted and told by one word. What was found here
    /// has words of its own, which say more than the kind.
    pub(crate) fn in_one_word(&self) -> RolloutError {
        let is_guess = ErrorKind::ALL.iter().any(|kind| kind.name() == self.kind);
        RolloutError {
            kind: match is_guess {
                true => ErrorKind::of(self).name().to_owned(),
                false => self.kind.clone(),
            },
            ..self.clone()
        }
    }
}

const ENDS_IN_ORDER: [&str; 2] = ["context_length_exceeded", "rollout_limit_reached"];

/// The kind of the gateway's last answer to the rollout.
fn of_refusal(Refusal { code, status, .. }: &Refusal) -> Option<ErrorKind> {
    match (code.as_str(), status) {
        // It has ended: the reason lies elsewhere.
        (_, 410) => None,
        ("context_length_exceeded" | "rollout_limit_reached", _) => Some(ErrorKind::Model),
        ("deadline_passed", _) => Some(ErrorKind::Timeout),
        ("server_busy" | "request_timeout", _) => Some(ErrorKind::Infrastructure),
        (
            "engine_unavailable"
            | "answer_interrupted"
            | "endpoint_unavailable"
            | "answer_not_learnable",
            _,
        ) => Some(ErrorKind::Engine),
        // Requests that are wrong, or that no engine takes.
        (_, 400..500) => Some(ErrorKind::Environment),
        _ => Some(ErrorKind::Infrastructure),
    }
}

/// The kind of an exception's type, as verifiers, SDKs and Python name them.
fn of_exception(name: &str, status: Option<u16>) -> Option<ErrorKind> {
    let name = name.rsplit('.').next().unwrap_or(name);
    match (name, status) {
        ("OverlongPromptError" | "EmptyModelResponseError" | "InvalidModelResponseError", _) => {
            Some(ErrorKind::Model)
        }
        ("ProviderError" | "ModelError" | "APIStatusError", Some(408 | 504)) => {
            Some(ErrorKind::Timeout)
        }
        ("ProviderError" | "ModelError", _) => Some(ErrorKind::Engine),
        ("ToolsetError" | "ToolError" | "ToolCallError" | "ToolParseError", _) => {
            Some(ErrorKind::Tool)
        }
        (
            "SandboxError" | "TunnelError" | "InterceptionError" | "InfraError" | "MemoryError",
            _,
        ) => Some(ErrorKind::Infrastructure),
        ("HarnessError" | "TaskError" | "EnvError", _) => Some(ErrorKind::Environment),
        ("TimeoutError" | "APITimeoutError", _) => Some(ErrorKind::Timeout),
        _ => None,
    }
}

/// The kind of a [`RolloutError::kind`]: a worker's guess, or what was found here.
fn of_word(kind: &str) -> ErrorKind {
    let named = ErrorKind::ALL.into_iter().find(|one| one.name() == kind);
    named.unwrap_or(match kind {
        "version" => ErrorKind::Engine,
        // Only the example is to blame; it counts with what does not fit.
        "truncated" | PROMPT_TOO_LONG => ErrorKind::Model,
        "worker_lost" | "lease_lost" => ErrorKind::Infrastructure,
        _ => ErrorKind::Environment,
    })
}

/// Characters kept of a first error's message.
const LONGEST_FIRST: usize = 400;

/// The first rollout of an environment that failed by an error of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstError {
    pub rollout: RolloutId,
    pub example: ExampleIndex,
    pub message: String,
}

impl FirstError {
    pub(crate) fn of(
        rollout: RolloutId,
        example: ExampleIndex,
        error: &RolloutError,
    ) -> FirstError {
        FirstError {
            rollout,
            example,
            message: error.message.chars().take(LONGEST_FIRST).collect(),
        }
    }
}

/// Failed rollouts by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorCounts([u64; ErrorKind::ALL.len()]);

impl ErrorCounts {
    pub fn count(&mut self, kind: ErrorKind) {
        self.0[kind as usize] += 1;
    }

    /// One that was counted does not count any more.
    pub fn take_back(&mut self, kind: ErrorKind) {
        let count = &mut self.0[kind as usize];
        *count = count.saturating_sub(1);
    }

    pub fn add(&mut self, other: &ErrorCounts) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count += more;
        }
    }

    pub fn of(&self, kind: ErrorKind) -> u64 {
        self.0[kind as usize]
    }

    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Those that there were.
    pub fn named(&self) -> BTreeMap<ErrorKind, u64> {
        let counts = ErrorKind::ALL.into_iter().map(|kind| (kind, self.of(kind)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(of: RolloutError) -> ErrorKind {
        ErrorKind::of(&of)
    }

    fn refused(code: &str, status: u16) -> RolloutError {
        let code = code.to_owned();
        RolloutError {
            refusal: Some(Refusal {
                code,
                status,
                overflow: None,
            }),
            exception: Some("ValueError".to_owned()),
            ..RolloutError::new("environment", "it raised".to_owned())
        }
    }

    fn raised(exception: &str, status: Option<u16>) -> RolloutError {
        RolloutError {
            exception: Some(exception.to_owned()),
            status,
            ..RolloutError::new("environment", "it raised".to_owned())
        }
    }

    #[test]
    fn what_the_gateway_saw_goes_before_the_workers_guess() {
        let expected = [
            ("context_length_exceeded", 400, ErrorKind::Model),
            ("rollout_limit_reached", 400, ErrorKind::Model),
            ("engine_unavailable", 503, ErrorKind::Engine),
            ("answer_interrupted", 503, ErrorKind::Engine),
            ("engine_refused", 400, ErrorKind::Environment),
            ("unsupported_parameter", 400, ErrorKind::Environment),
            ("", 400, ErrorKind::Environment),
            ("deadline_passed", 503, ErrorKind::Timeout),
            ("server_busy", 503, ErrorKind::Infrastructure),
            ("", 500, ErrorKind::Infrastructure),
        ];
        for (code, status, wanted) in expected {
            assert_eq!(kind(refused(code, status)), wanted, "{code} {status}");
            let guess = RolloutError {
                exception: Some("ToolError".to_owned()),
                ..refused(code, status)
            };
            let wanted = match ENDS_IN_ORDER.contains(&code) {
                true => ErrorKind::Tool,
                false => wanted,
            };
            assert_eq!(kind(guess), wanted, "{code} {status}");
        }
        let overflow = RolloutError {
            exception: Some("ProviderError".to_owned()),
            ..refused("context_length_exceeded", 400)
        };
        assert_eq!(kind(overflow), ErrorKind::Model);
        let over = RolloutError {
            exception: Some("SandboxError".to_owned()),
            ..refused("rollout_over", 410)
        };
        assert_eq!(kind(over), ErrorKind::Infrastructure);
    }

    #[test]
    fn a_failure_has_one_word() {
        let guessed = raised("TimeoutError", None).in_one_word();
        assert_eq!(
            (&*guessed.kind, kind(guessed.clone())),
            ("timeout", ErrorKind::Timeout)
        );
        let refused = refused("engine_unavailable", 503).in_one_word();
        assert_eq!(
            (&*refused.kind, kind(refused.clone())),
            ("engine", ErrorKind::Engine)
        );
        let found = RolloutError::new("no_turns", String::new()).in_one_word();
        assert_eq!(&*found.kind, "no_turns", "says more than the kind");
    }

    #[test]
    fn a_known_exception_goes_before_the_reports_word() {
        let expected = [
            ("ProviderError", Some(502), ErrorKind::Engine),
            ("ProviderError", Some(504), ErrorKind::Timeout),
            ("ToolsetError", None, ErrorKind::Tool),
            ("verifiers.errors.ToolCallError", None, ErrorKind::Tool),
            ("SandboxError", None, ErrorKind::Infrastructure),
            ("TaskError", None, ErrorKind::Environment),
            ("OverlongPromptError", None, ErrorKind::Model),
            ("TimeoutError", None, ErrorKind::Timeout),
            ("KeyError", None, ErrorKind::Environment),
        ];
        for (exception, status, wanted) in expected {
            assert_eq!(kind(raised(exception, status)), wanted, "{exception}");
        }
        let words = [
            ("engine", ErrorKind::Engine),
            ("tool", ErrorKind::Tool),
            ("timeout", ErrorKind::Timeout),
            ("version", ErrorKind::Engine),
            ("truncated", ErrorKind::Model),
            ("empty", ErrorKind::Environment),
            ("no_turns", ErrorKind::Environment),
            ("worker_lost", ErrorKind::Infrastructure),
            ("of somebody else's", ErrorKind::Environment),
        ];
        for (word, wanted) in words {
            assert_eq!(
                kind(RolloutError::new(word, String::new())),
                wanted,
                "{word}"
            );
        }
    }
}
