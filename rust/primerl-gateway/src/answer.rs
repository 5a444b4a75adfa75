//! An answer in a form that is independent of dialects, and the traits by which dialects write it.

use super::text::{Delta, Read};
use primerl_core::Turn;
use primerl_core::turn::{FinishReason, TextAnswer};
use primerl_render::{Message, Tokenizer};
use primerl_service::http::ApiError;
use serde_json::Value;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Fields that are known before the first token.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    /// Unique among answers; each dialect adds its own prefix.
    pub id: Arc<str>,
    /// Seconds since 1970.
    pub created: u64,
    pub model: Arc<str>,
    pub prompt_tokens: usize,
    /// Number of answers that will follow.
    pub choices: u32,
    /// The prompt's ids, if the client asked for them.
    pub prompt: Option<Arc<[u32]>>,
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub head: Head,
    /// One choice for each answer that the request asked for; each is a separate turn.
    pub choices: Vec<Choice>,
}

#[derive(Debug)]
pub(crate) struct Choice {
    pub message: Message,
    /// Why parts of the text that look like tool calls are shown as text.
    pub malformed: Vec<String>,
    pub finish: FinishReason,
    /// The stop sequence that ended it.
    pub stop: Option<String>,
    pub sampled: Arc<[u32]>,
    /// Natural-log probabilities; same length as `sampled`.
    pub logprobs: Arc<[f32]>,
    /// Most likely tokens at each position, if the client asked for them and they are still known.
    pub top: Vec<Vec<(u32, f32)>>,
    /// Text of an answer that came without token ids.
    pub text: Option<Arc<TextAnswer>>,
}

/// Tokens that were sampled since the last call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<'a> {
    pub ids: &'a [u32],
    pub logprobs: &'a [f32],
    /// Most likely tokens, as in [`Choice::top`].
    pub top: &'a [Vec<(u32, f32)>],
}

impl Answer {
    pub(crate) fn completion_tokens(&self) -> usize {
        self.choices.iter().map(Choice::n_tokens).sum()
    }
}

impl Choice {
    pub(crate) fn new(turn: &Turn, read: Read, top: Vec<Vec<(u32, f32)>>) -> Choice {
        Choice {
            message: read.message,
            malformed: read.malformed,
            finish: turn.finish,
            stop: read.stop,
            sampled: Arc::clone(&turn.sampled),
            logprobs: Arc::clone(&turn.logprobs),
            top,
            text: None,
        }
    }

    /// The choice of a turn that was recorded as text.
    pub(crate) fn of_text(turn: &Turn) -> Result<Choice, ApiError> {
        let lost =
            |problem: &str| ApiError::internal(format!("the recorded answer is lost: {problem}"));
        let text = turn.text.clone().ok_or_else(|| lost("it has no text"))?;
        let message: Message =
            serde_json::from_str(&text.message).map_err(|error| lost(&error.to_string()))?;
        Ok(Choice {
            message,
            malformed: Vec::new(),
            finish: turn.finish,
            stop: text.stop.as_deref().map(str::to_owned),
            sampled: Arc::default(),
            logprobs: Arc::default(),
            top: Vec::new(),
            text: Some(text),
        })
    }

    /// Number of tokens of the answer; the server's own count if the answer has no ids.
    pub(crate) fn n_tokens(&self) -> usize {
        match &self.text {
            Some(text) => text.completion_tokens as usize,
            None => self.sampled.len(),
        }
    }

    /// The complete text of an answer without ids.
    pub(crate) fn text_deltas(&self) -> Vec<Delta> {
        if self.text.is_none() {
            return Vec::new();
        }
        let message = &self.message;
        let reasoning = message.reasoning_content.clone().map(Delta::Reasoning);
        let content = message.content.joined().unwrap_or_default().into_owned();
        let content = (!content.is_empty()).then_some(Delta::Content(content));
        let calls = message.tool_calls.iter().flatten().enumerate();
        let calls = calls.map(|(index, call)| Delta::ToolCall {
            index,
            id: call.id.clone().unwrap_or_default(),
            name: call.function.name.clone(),
            arguments: match &call.function.arguments {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            },
        });
        reasoning.into_iter().chain(content).chain(calls).collect()
    }

    pub(crate) fn tokens(&self) -> Tokens<'_> {
        Tokens {
            ids: &self.sampled,
            logprobs: &self.logprobs,
            top: &self.top,
        }
    }
}

/// How an answer is written for the client.
pub(crate) trait Reply: Send + Sync {
    /// Whether the client wants a stream of events.
    fn streams(&self) -> bool;

    /// Whether the client wants to see the prompt's ids.
    fn shows_prompt(&self) -> bool {
        false
    }

    /// Data about the answer, in addition to its turn, that a restart needs.
    fn note(&self, _head: &Head, _request: u32) -> Option<Arc<str>> {
        None
    }

    /// The body of an answer that is not streamed.
    fn whole(&self, answer: &Answer, tokenizer: &Tokenizer) -> Vec<u8>;

    /// The writer of one stream.
    fn events(&self) -> Box<dyn Events>;
}

/// Writes one stream of server-sent events, in the order of the calls: `begin`, any number of `progress`, then `end` or
/// `error`.
pub(crate) trait Events: Send {
    fn begin(&mut self, head: &Head, out: &mut Vec<u8>);

    /// `deltas` are the text that `tokens` added to a choice. Text that may be the beginning of a marker is held back,
    /// so either may be empty.
    fn progress(
        &mut self,
        choice: usize,
        deltas: &[Delta],
        tokens: Tokens<'_>,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    );

    fn end(&mut self, answer: &Answer, out: &mut Vec<u8>);

    /// Writes an error that occurred after the stream's status was sent.
    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>);
}

/// Seconds since 1970, for `created`.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
