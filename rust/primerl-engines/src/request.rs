//! Requests to engines, and their results.

use super::body::RequestBody;
use super::config::EnginesConfig;
use super::error::EngineError;
use super::experts::WantedExperts;
use super::generate::{Bounds, GenerateBody, Generated, SamplingParams, lowest_logprob};
use super::ids::PromptIds;
use super::routing::Resident;
use super::served_version::Named;
use crate::clients::with_messages;
use bytes::Bytes;
use primerl_core::{RolloutId, Truncation};
use serde_json::{Map, Value};
use std::time::Instant;

/// Messages that the engine renders.
#[derive(Clone, Debug, Default)]
pub struct ChatMessages {
    /// A JSON list of messages.
    pub messages: Bytes,
    pub tools: Option<Vec<Value>>,
    pub template_kwargs: Map<String, Value>,
}

impl ChatMessages {
    /// Fields of both routes.
    pub(super) fn fields(&self, model: &str) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("model".into(), model.into());
        fields.insert("add_generation_prompt".into(), true.into());
        if let Some(tools) = &self.tools {
            fields.insert("tools".into(), tools.clone().into());
        }
        if !self.template_kwargs.is_empty() {
            let kwargs = self.template_kwargs.clone();
            fields.insert("chat_template_kwargs".into(), kwargs.into());
        }
        fields
    }

    pub(super) fn with(&self, fields: &Map<String, Value>) -> Result<Bytes, serde_json::Error> {
        Ok(with_messages(&self.messages, &serde_json::to_vec(fields)?))
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    #[error("no engine could answer within the rollout's deadline; last: {last}")]
    Deadline { last: String },
    #[error("the engines failed {attempts} times; last: {last}")]
    Exhausted { attempts: u32, last: String },
    #[error(
        "the engine failed in the middle of an answer that was being shown, while its weights may have changed: no other \
         engine can continue it; last: {last}"
    )]
    Interrupted { last: String },
    #[error("the engine refused the request: {0}")]
    Refused(EngineError),
    #[error("cannot encode the request: {0}")]
    Encode(#[from] serde_json::Error),
}

/// What to sample.
#[derive(Clone, Debug)]
pub struct SampleRequest<'a> {
    /// Unique among requests; appears in the engine's log.
    pub request_id: &'a str,
    pub prompt: PromptIds<'a>,
    /// Messages that the engine renders to that prompt; `None` if it is given the ids.
    pub chat: Option<&'a ChatMessages>,
    pub temperature: f64,
    pub truncation: Truncation,
    pub max_tokens: u32,
    /// Number of most likely tokens to return at each position.
    pub top_logprobs: u32,
    pub structured_outputs: Option<&'a serde_json::Value>,
    /// A reasoning block that comes before the structured part.
    pub structured_reasoning: Option<&'a serde_json::Value>,
    /// The experts of the tokens that this turn adds are kept, where engines report them.
    pub keeps_experts: bool,
    /// The engine that holds this conversation's prefix.
    pub resident: Option<Resident>,
    /// The rollout whose first turn this is: the core learns when and with which version it begins.
    pub first_of: Option<RolloutId>,
    pub deadline: Instant,
}

impl<'a> SampleRequest<'a> {
    /// One token after this prompt.
    pub fn one_token(request_id: &'a str, prompt: PromptIds<'a>) -> SampleRequest<'a> {
        SampleRequest {
            request_id,
            prompt,
            chat: None,
            temperature: 1.0,
            truncation: Truncation::default(),
            max_tokens: 1,
            top_logprobs: 0,
            structured_outputs: None,
            structured_reasoning: None,
            keeps_experts: false,
            resident: None,
            first_of: None,
            deadline: Instant::now(),
        }
    }

    pub fn body(
        &self,
        config: &EnginesConfig,
        named: &Named,
        stream: bool,
    ) -> Result<RequestBody, serde_json::Error> {
        let body = GenerateBody {
            request_id: self.request_id,
            model: &named.model,
            token_ids: self.prompt,
            sampling_params: SamplingParams {
                temperature: self.temperature,
                truncation: self.truncation,
                max_tokens: self.max_tokens,
                // vLLM counts the sampled token as one of k.
                logprobs: match self.top_logprobs {
                    0 => 0,
                    count => count + 1,
                },
                stop_token_ids: &config.stop_token_ids,
                detokenize: false,
                structured_outputs: self.structured_outputs,
                structured_reasoning: self.structured_reasoning,
                routed_experts_prompt_start: (config.returns_experts)
                    .then(|| self.prompt.len() - self.prompt_rows()),
            },
            cache_salt: named.version.to_string(),
            stream,
        };
        body.encode(&config.written_ids)
    }

    /// Tokens of the prompt whose experts are asked for: those that no earlier turn has reported, among them the last
    /// of the answer before, which was computed only now. Others are of no use.
    fn prompt_rows(&self) -> usize {
        match self.keeps_experts {
            true => self.prompt.suffix.len() + self.prompt.history.len().min(1),
            false => 0,
        }
    }

    pub fn bounds<'b>(&self, config: &'b EnginesConfig) -> Bounds<'b> {
        Bounds {
            max_tokens: self.max_tokens,
            top_logprobs: self.top_logprobs,
            vocabulary_size: config.vocabulary_size,
            lowest_logprob: lowest_logprob(self.temperature, self.structured_outputs.is_some()),
            stop_token_ids: &config.stop_token_ids,
            experts: (config.returns_experts && self.keeps_experts).then(|| WantedExperts {
                before: self.prompt.history.len().min(1) as u32,
                prompt: self.prompt.suffix.len(),
            }),
            experts_rows: match config.returns_experts {
                true => self.prompt_rows() + self.max_tokens as usize,
                false => 0,
            },
        }
    }
}

/// An answer and the engine that gave it.
#[derive(Debug)]
pub struct Sampled {
    pub generated: Generated,
    /// The engine that holds its prefix now.
    pub resident: Resident,
}
