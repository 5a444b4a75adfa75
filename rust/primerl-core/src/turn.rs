//! One engine request, as the engine answered it.

use crate::experts::Experts;
use crate::ids::{PolicyVersion, TurnIndex};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// A run of consecutive sampled tokens of one policy version, taken from the engine's own `weight_versions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    pub version: PolicyVersion,
    pub n_tokens: u32,
}

/// The versions of one turn: nearly always a single one, which needs no memory of its own.
pub type VersionRuns = SmallVec<[VersionRun; 1]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn; the stop token is the last of `sampled`.
    Stop,
    /// A stop sequence of the request was sampled; `sampled` ends with the token that completed it, and the next turn's
    /// prompt has to close this one.
    StopSequence,
    /// `max_tokens` or the context was reached: the next turn's prompt has to close this one.
    Length,
    /// The request was aborted; what was sampled until then is kept.
    Abort,
}

/// Why a turn does not extend an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForkReason {
    /// The first turn of its conversation (no fork, strictly speaking).
    FirstTurn,
    /// The request's messages contain no answer of ours: a second conversation on the same session.
    NewConversation,
    /// Earlier messages differ from what this conversation recorded.
    HistoryEdited,
    /// The messages before an answer of ours are the same, but the answer came back in other words: some were removed,
    /// added or rewritten.
    AnswerEdited,
    /// Same messages, other tools or template arguments.
    ToolsChanged,
    /// The template's rendering of the new messages could not be proven to be a suffix.
    TemplateNotExtendable,
    /// The engine rendered the messages itself, and its prompt does not begin with the ids that were recorded: its template
    /// rewrites the history, or text encodes otherwise than it was sampled.
    PrefixDiffers,
}

/// How an assistant message is compared with one that we answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerKey {
    /// Hash of what it says and does, without the ways in which clients change it: content by its words, tool calls by
    /// name and by the value of their arguments.
    pub said: u128,
    /// Hash of its reasoning, if it has any.
    pub reasoning: Option<u128>,
}

/// Which tokens were removed before sampling; the default removes none. A token's log-probability is that among the
/// kept ones: temperature first, then `min_p`, `top_k`, `top_p`, each of what the previous one has kept, as in vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Truncation {
    /// The most likely tokens that have this share of the probability are kept; 1 keeps all.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub top_p: f32,
    /// So many of the most likely tokens are kept; 0 keeps all.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub top_k: u32,
    /// Tokens at least this likely are kept, as a share of the most likely one's probability; 0 keeps all.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub min_p: f32,
}

impl Default for Truncation {
    fn default() -> Self {
        Truncation {
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
        }
    }
}

impl Truncation {
    /// All tokens are kept.
    pub fn is_none(&self) -> bool {
        *self == Truncation::default()
    }
}

/// The grammar that an answer was sampled by. With the answer's tokens it gives the set of tokens that was allowed at each
/// of them; a token's log-probability is that among the allowed ones, before temperature and [`Truncation`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grammar {
    /// The vocabulary and the library that turn `spec` into sets of tokens, as the engine named them.
    pub masks: Arc<str>,
    /// What was enforced, as the engine says it: JSON.
    pub spec: Arc<str>,
}

/// Who wrote a message of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageRole {
    System,
    User,
    Assistant,
    Tool,
}

impl MessageRole {
    pub const ALL: [MessageRole; 4] = [
        MessageRole::System,
        MessageRole::User,
        MessageRole::Assistant,
        MessageRole::Tool,
    ];

    /// `None` for a role that a template of its own may know.
    pub fn of(name: &str) -> Option<MessageRole> {
        match name {
            "system" => Some(MessageRole::System),
            "user" => Some(MessageRole::User),
            "assistant" => Some(MessageRole::Assistant),
            "tool" => Some(MessageRole::Tool),
            _ => None,
        }
    }
}

/// Tokens of a prompt that are the text of a message which followed an answer, without what the template writes around
/// it: what the environment said to what the policy did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    pub role: MessageRole,
    /// First token among the turn's `prompt_suffix`, and the token after the last.
    pub begin: u32,
    pub end: u32,
}

fn one() -> f32 {
    1.0
}
fn is_one(value: &f32) -> bool {
    *value == 1.0
}
fn is_zero(value: &u32) -> bool {
    *value == 0
}
fn is_zero_f32(value: &f32) -> bool {
    *value == 0.0
}

/// An answer of a server that gives text and no ids: measured, never trained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextAnswer {
    /// The model that answered, as the server names it.
    pub model: Arc<str>,
    /// The assistant message, as JSON.
    pub message: Arc<str>,
    /// The stop sequence that ended it, where the server says it.
    #[serde(default)]
    pub stop: Option<Arc<str>>,
    /// By the server's own count.
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
}

/// A finished turn. Its prompt is `parent.prompt ++ parent.sampled ++ prompt_suffix` when it has a parent,
/// else `prompt_suffix` alone, so a turn holds only the tokens it added.
///
/// Worked example, two turns of one conversation:
/// ```text
/// turn 0: parent None,    prompt_suffix [p0 p1 p2],  sampled [a b END]
/// turn 1: parent Some(0), prompt_suffix [\n u0 u1],  sampled [c END]
/// prompt of turn 1 = p0 p1 p2 a b END \n u0 u1
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Name of the conversation within the rollout (`X-Session-ID`; empty when absent).
    pub session: Arc<str>,
    pub parent: Option<TurnIndex>,
    /// `None` exactly when `parent` is `Some`.
    pub fork: Option<ForkReason>,
    #[serde(with = "crate::column")]
    pub prompt_suffix: Arc<[u32]>,
    /// What of `prompt_suffix` the environment said, in order and apart, where it is trained to be foreseen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub observed: Vec<Observed>,
    #[serde(with = "crate::column")]
    pub sampled: Arc<[u32]>,
    /// Engine log-probability of each sampled token, nats; same length as `sampled`.
    #[serde(with = "crate::column")]
    pub logprobs: Arc<[f32]>,
    /// Lengths add up to `sampled.len()`.
    pub versions: VersionRuns,
    pub temperature: f32,
    /// Absent in what was written before it was recorded, when a training rollout could not truncate.
    #[serde(default, skip_serializing_if = "Truncation::is_none")]
    pub truncation: Truncation,
    /// Absent where all tokens were allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grammar: Option<Arc<Grammar>>,
    /// The experts that the engine chose, where they are replayed and it reported them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Arc<Experts>>,
    pub finish: FinishReason,
    /// Digest of tools and template arguments, from which the next one continues.
    pub start_digest: u128,
    /// Digest of the messages that made the prompt (and tools, template arguments).
    pub context_digest: u128,
    /// The message we answered: a later request that holds it after this context extends this turn. With all three,
    /// a conversation is rebuilt from its turns.
    pub answer: AnswerKey,
    /// Hash of the request (its body, or its idempotency key): a retry is answered with this turn.
    pub request_digest: u128,
    /// The answer of a server that gives no ids. Where the policy is taught by it, `prompt_suffix` and `sampled` are how
    /// the policy's model writes prompt and answer, else they are empty; `logprobs` and `versions` are empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<Arc<TextAnswer>>,
    /// Which of the rollout's requests it answers, from 1. 0 in journals that did not say.
    #[serde(default)]
    pub request: u32,
    /// Which of that request's answers it is, from 0.
    #[serde(default)]
    pub choice: u32,
}

impl Turn {
    /// A turn of ids alone, sampled at temperature 1 until the model ended it.
    pub fn of_ids(
        session: Arc<str>,
        parent: Option<TurnIndex>,
        prompt_suffix: Arc<[u32]>,
        sampled: Arc<[u32]>,
        logprobs: Arc<[f32]>,
        versions: VersionRuns,
    ) -> Turn {
        Turn {
            session,
            parent,
            fork: parent.is_none().then_some(ForkReason::FirstTurn),
            prompt_suffix,
            observed: Vec::new(),
            sampled,
            logprobs,
            versions,
            temperature: 1.0,
            truncation: Truncation::default(),
            grammar: None,
            experts: None,
            finish: FinishReason::Stop,
            start_digest: 0,
            context_digest: 0,
            answer: AnswerKey::default(),
            request_digest: 0,
            text: None,
            request: 0,
            choice: 0,
        }
    }

    /// Tokens of the answer; of one without ids, by its server's count.
    pub fn answer_tokens(&self) -> usize {
        match &self.text {
            Some(text) => text.completion_tokens as usize,
            None => self.sampled.len(),
        }
    }

    fn experts_are_of_it(&self) -> bool {
        let tokens = self.prompt_suffix.len() + self.sampled.len();
        let experts = self.experts.as_ref();
        experts.is_none_or(|experts| experts.are_of(self.parent.is_some(), tokens))
    }

    fn observed_is_of_it(&self) -> bool {
        let mut end = 0;
        let mut follows = |run: &Observed| {
            let fits = end <= run.begin && run.begin < run.end;
            end = run.end;
            fits
        };
        self.observed.iter().all(&mut follows) && end as usize <= self.prompt_suffix.len()
    }

    /// Tokens that an engine sampled have one log-probability and one version each.
    pub fn is_consistent(&self) -> bool {
        let by_version: u64 = self
            .versions
            .iter()
            .map(|run| u64::from(run.n_tokens))
            .sum();
        let by_engine = match self.text {
            None => self.sampled.len(),
            Some(_) => 0,
        };
        self.logprobs.len() == by_engine
            && by_version == by_engine as u64
            && are_finite(&self.logprobs)
            && self.experts_are_of_it()
            && self.observed_is_of_it()
            && self.parent.is_some() != self.fork.is_some()
    }
}

/// Looks at all of them in any case, and at their exponents only: without a way out the compiler looks at many at a time.
fn are_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    let is_not = |number: &f32| u32::from(number.to_bits() & EXPONENT == EXPONENT);
    numbers.iter().fold(0, |any, number| any | is_not(number)) == 0
}

#[cfg(test)]
mod tests;
