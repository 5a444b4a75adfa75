//! Bodies of `/inference/v1/generate`: the request, and the checks that an answer must pass before it is trained on.

mod checks;

use super::body::RequestBody;
use super::error::EngineError;
use super::experts::{BYTES_A_ROW, WantedExperts};
use super::ids::{PromptIds, WrittenIds};
use checks::{check_logprobs, check_stop, cut_runs, tops, version_runs};
use primerl_core::turn::FinishReason;
use primerl_core::{Experts, Grammar, Truncation, VersionRuns};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// Body of `/inference/v1/generate`.
#[derive(Debug, Serialize)]
pub(crate) struct GenerateBody<'a> {
    pub request_id: &'a str,
    pub model: &'a str,
    #[serde(skip)]
    pub token_ids: PromptIds<'a>,
    pub sampling_params: SamplingParams<'a>,
    /// The policy version: a prefix computed by other weights must not be reused.
    pub cache_salt: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
}

impl GenerateBody<'_> {
    pub(crate) fn encode(&self, written: &WrittenIds) -> Result<RequestBody, serde_json::Error> {
        let mut others = serde_json::to_vec(self)?;
        // The body has fields, so a comma replaces its opening brace.
        others[0] = b',';
        Ok(self
            .token_ids
            .write_json(written, "{\"token_ids\":", &others))
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct SamplingParams<'a> {
    pub temperature: f64,
    #[serde(flatten)]
    pub truncation: Truncation,
    pub max_tokens: u32,
    /// 0: only the sampled token's.
    pub logprobs: u32,
    pub stop_token_ids: &'a [u32],
    pub detokenize: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structured_outputs: Option<&'a serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structured_reasoning: Option<&'a serde_json::Value>,
    /// First token of the prompt whose experts are reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_experts_prompt_start: Option<usize>,
}

/// Follows an answer while it is sampled.
pub trait Progress: Send {
    /// More tokens came. The result ends the answer after that many tokens.
    fn tokens(&mut self, ids: &[u32], logprobs: &[TokenLogprob]) -> Option<usize>;

    /// The engine failed, and another continues after these tokens of the answer. Returns whether it may: not if a
    /// client has seen more of them.
    fn go_on(&mut self, kept: &[u32]) -> bool;
}

/// One sampled answer; `logprobs` and `versions` cover `token_ids` exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    pub token_ids: Vec<u32>,
    /// Nats.
    pub logprobs: Vec<f32>,
    pub versions: VersionRuns,
    pub finish: FinishReason,
    /// Most likely tokens at each position, in order; empty if none were requested.
    pub top: Vec<Vec<(u32, f32)>>,
    /// What decided which tokens were allowed, if the engine reports it.
    pub grammar: Option<Arc<Grammar>>,
    /// The experts it chose, where they are wanted and it reports them.
    pub experts: Option<Arc<Experts>>,
}

#[derive(Deserialize)]
pub struct GenerateAnswer {
    /// The model that answered, by the name that requests use.
    pub(super) model: Option<String>,
    pub(super) choices: Vec<Choice>,
}

#[derive(Clone, Deserialize)]
pub(super) struct Choice {
    pub token_ids: Vec<u32>,
    pub finish_reason: Option<String>,
    pub logprobs: Option<Logprobs>,
    pub weight_versions: Option<Vec<VersionSpan>>,
    pub grammar: Option<Applied>,
    pub routed_experts: Option<String>,
}

/// The vocabulary and the library by name, and the constraints that they enforce.
#[derive(Clone, Deserialize)]
pub(super) struct Applied {
    pub masks: Arc<str>,
    pub spec: serde_json::Value,
}

impl From<Applied> for Grammar {
    fn from(applied: Applied) -> Grammar {
        Grammar {
            masks: applied.masks,
            spec: applied.spec.to_string().into(),
        }
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct Logprobs {
    pub content: Vec<TokenLogprob>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TokenLogprob {
    pub token_id: u32,
    /// Nats.
    pub logprob: f32,
    /// The sampled token, then the most likely ones.
    #[serde(default)]
    pub top_logprobs: SmallVec<[TopLogprob; 1]>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TopLogprob {
    pub token_id: u32,
    pub logprob: f32,
    #[serde(default)]
    pub rank: u32,
}

impl TokenLogprob {
    /// The `count` most likely tokens; they include the sampled one only if it is one of them.
    pub fn top(&self, count: u32) -> Vec<(u32, f32)> {
        let likely = |top: &&TopLogprob| top.rank <= count;
        let mut top: Vec<&TopLogprob> = self.top_logprobs.iter().filter(likely).collect();
        top.sort_by_key(|top| top.rank);
        top.iter().map(|top| (top.token_id, top.logprob)).collect()
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct VersionSpan {
    pub version: String,
    pub start: usize,
    pub end: usize,
}

/// What vLLM reports where a log-probability is not finite.
const NOT_FINITE: f32 = -9999.0;

/// A token is sampled by its probability in fp32, which is at least 2^-149: ln is -103.3, and rounding is allowed for.
const LOWEST_SAMPLED: f64 = -104.0;
/// An engine may report a token at temperature 1 that it sampled at another: the sum of all probabilities is at most this
/// (nats) above the largest, with a vocabulary of a million.
const VOCABULARY_NATS: f64 = 14.0;

/// The lowest log-probability that a sampled token can have. `is_constrained`: by a grammar, which may allow only
/// tokens whose probability is the smallest that a logarithm can express.
pub(crate) fn lowest_logprob(temperature: f64, is_constrained: bool) -> f32 {
    match is_constrained {
        true => NOT_FINITE,
        false => (LOWEST_SAMPLED * temperature.max(1.0) - VOCABULARY_NATS) as f32,
    }
}

/// Bytes of an answer besides those of its tokens.
const ENVELOPE: usize = 1 << 20;
/// Bytes of a token in an answer: its id and its log-probability, with names and texts as vLLM writes them.
const BYTES_A_TOKEN: usize = 1 << 10;
const BYTES_AN_ALTERNATIVE: usize = 1 << 9;

/// The limits of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Bounds<'a> {
    pub max_tokens: u32,
    /// Alternatives requested at each position.
    pub top_logprobs: u32,
    /// Token ids are below this; `None` if the model does not say.
    pub vocabulary_size: Option<u32>,
    /// For a sampled token: [`lowest_logprob`].
    pub lowest_logprob: f32,
    /// Tokens that may end an answer; empty if they are not known.
    pub stop_token_ids: &'a [u32],
    /// The experts that are kept of the answer.
    pub experts: Option<WantedExperts>,
    /// Tokens whose experts the answer may report.
    pub experts_rows: usize,
}

impl Bounds<'_> {
    /// Bytes of a whole answer. The rest is not read: an engine that sends without end must not fill the memory.
    pub fn longest_answer(&self) -> usize {
        let alternatives = BYTES_AN_ALTERNATIVE.saturating_mul(self.top_logprobs as usize + 1);
        let tokens = self.max_tokens as usize;
        ENVELOPE
            .saturating_add(tokens.saturating_mul(BYTES_A_TOKEN + alternatives))
            .saturating_add(self.experts_rows.saturating_mul(BYTES_A_ROW))
    }

    fn check(&self, token_ids: &[u32]) -> Result<(), String> {
        if token_ids.len() > self.max_tokens as usize {
            let (n, max) = (token_ids.len(), self.max_tokens);
            return Err(format!(
                "{n} tokens were sampled, at most {max} were asked for"
            ));
        }
        let size = self.vocabulary_size.unwrap_or(u32::MAX);
        match token_ids.iter().find(|id| **id >= size) {
            Some(id) => Err(format!(
                "token id {id} is not of this model, whose vocabulary has {size}"
            )),
            None => Ok(()),
        }
    }
}

impl GenerateAnswer {
    pub fn parse(bytes: &[u8]) -> Result<GenerateAnswer, EngineError> {
        serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))
    }

    pub fn check(self, bounds: &Bounds<'_>) -> Result<Generated, EngineError> {
        let [choice] = <[Choice; 1]>::try_from(self.choices)
            .map_err(|choices| malformed(format!("{} choices instead of one", choices.len())))?;
        choice.check(bounds, None)
    }
}

fn malformed(problem: String) -> EngineError {
    EngineError::Malformed {
        call: "generate",
        problem,
    }
}

impl Choice {
    /// `ended_at`: our own code ended the answer, after so many tokens.
    pub(crate) fn check(
        mut self,
        bounds: &Bounds<'_>,
        ended_at: Option<usize>,
    ) -> Result<Generated, EngineError> {
        bounds.check(&self.token_ids).map_err(malformed)?;
        let content = self.logprobs.take().map(|logprobs| logprobs.content);
        let content = content.unwrap_or_default();
        check_logprobs(&content, &self.token_ids, bounds.lowest_logprob)?;
        let spans = self.weight_versions.take().unwrap_or_default();
        let mut versions = version_runs(spans, self.token_ids.len())?;
        let finish = self.end(bounds, ended_at, &mut versions)?;
        let kept = &content[..self.token_ids.len()];
        Ok(Generated {
            logprobs: kept.iter().map(|token| token.logprob).collect(),
            top: tops(kept, bounds.top_logprobs),
            experts: self.experts(bounds)?,
            token_ids: self.token_ids,
            versions,
            finish,
            grammar: self.grammar.map(|applied| Arc::new(applied.into())),
        })
    }

    fn experts(&self, bounds: &Bounds<'_>) -> Result<Option<Arc<Experts>>, EngineError> {
        match (bounds.experts, &self.routed_experts) {
            (Some(wanted), Some(text)) => {
                let experts = wanted.read(text, self.token_ids.len());
                experts.map_err(malformed)
            }
            _ => Ok(None),
        }
    }

    /// Why the answer ended; cut off where our own code ended it.
    fn end(
        &mut self,
        bounds: &Bounds<'_>,
        ended_at: Option<usize>,
        versions: &mut VersionRuns,
    ) -> Result<FinishReason, EngineError> {
        let sampled = self.token_ids.len();
        match (self.finish_reason.as_deref(), ended_at) {
            (_, Some(kept)) if kept <= sampled => {
                self.token_ids.truncate(kept);
                cut_runs(versions, kept);
                Ok(FinishReason::StopSequence)
            }
            // Only the engine ended it: a part of an answer is not a sample of the policy.
            (Some("abort" | "error"), _) => Err(EngineError::Aborted { tokens: sampled }),
            _ if sampled == 0 => Err(malformed("no token was sampled".into())),
            (Some("stop"), _) => {
                check_stop(&self.token_ids, bounds.stop_token_ids)?;
                Ok(FinishReason::Stop)
            }
            (Some("length" | "repetition"), _) => Ok(FinishReason::Length),
            (other, _) => Err(malformed(format!("finish_reason is {other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests;
