//! What can go wrong with a call to an engine.

use primerl_service::tls::{self, chain};
use std::time::Duration;

/// Timeout of calls that take no time: an engine whose server lives but does not answer these calls hangs.
pub(super) const STANDS_STILL: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error("{call}: no answer: {}", with_hint(source))]
    Transport {
        call: &'static str,
        source: reqwest::Error,
    },
    #[error("{call}: status {status}: {message}")]
    Status {
        call: &'static str,
        status: u16,
        message: String,
    },
    #[error("{call}: malformed answer: {problem}")]
    Malformed { call: &'static str, problem: String },
    #[error("{call}: no answer within {limit:?}")]
    StandsStill { call: &'static str, limit: Duration },
    /// The engine sampled with weights whose version was not proved (it was restarted, or updated by someone else).
    #[error("sampled with weights labelled `{label}`, which were never proved")]
    Unproved { label: String },
    /// The request named an adapter, and the answer names another model.
    #[error("was asked for `{asked}`, and `{answered}` answered")]
    Misnamed { asked: String, answered: String },
    #[error("generate: aborted by the engine after {tokens} tokens")]
    Aborted { tokens: usize },
    /// The engine loaded weights while it answered, and the answer does not say which weights sampled which token.
    #[error(
        "its weights changed from `{before}` to `{after}` while it answered, and a chat answer does not say which of \
         them sampled what"
    )]
    Crossed { before: String, after: String },
    /// The engine cannot do what the run's config needs.
    #[error("{0}")]
    Unfit(String),
    /// The engine got other ids than its `/tokenize` route had returned.
    #[error(
        "chat: the engine was given a prompt of {given} tokens, and /tokenize had rendered the same messages to {expected} \
         others: is a setting of its chat route another (--exclude-tools-when-tool-choice-none, \
         --default-chat-template-kwargs)?"
    )]
    PromptDiffers { given: usize, expected: usize },
    #[error("generate: the stream ended after {tokens} tokens, without its end")]
    CutOff { tokens: usize },
    #[error("generate: the engine was lost while it worked on the request")]
    Lost,
    #[error("serves weights with digest {served}, the manifest says {expected}")]
    Digest { served: String, expected: String },
    #[error("labels its weights `{served}` after it had proved them by the label `{expected}`")]
    Label { served: String, expected: String },
    #[error("does not know `{0}` any more, which it had proved")]
    Forgotten(String),
}

fn with_hint(error: &reqwest::Error) -> String {
    match tls::mend(error, error.url().map_or("", reqwest::Url::as_str)) {
        Some(hint) => format!("{}; {hint}", chain(error)),
        None => chain(error),
    }
}

impl EngineError {
    /// Whether the same request may succeed on another engine (or here, later).
    pub fn is_retryable(&self) -> bool {
        match self {
            EngineError::Status { status, .. } => {
                *status >= 500 || matches!(status, 404 | 408 | 429)
            }
            _ => true,
        }
    }

    /// Whether the files that the engine should load may be the cause.
    pub fn is_about_weights(&self) -> bool {
        let calls = [
            "update_weights",
            "finish_weight_update",
            "load_lora_adapter",
            "collective_rpc",
        ];
        match self {
            EngineError::Status { call, .. } | EngineError::Malformed { call, .. } => {
                calls.contains(call)
            }
            EngineError::Digest { .. } => true,
            _ => false,
        }
    }

    /// Whether the tokens that a stream had brought can be relied on: the engine went away, but reported nothing wrong.
    pub fn leaves_a_part(&self) -> bool {
        match self {
            EngineError::Transport { .. }
            | EngineError::Aborted { .. }
            | EngineError::CutOff { .. }
            | EngineError::Lost => true,
            EngineError::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }
}
