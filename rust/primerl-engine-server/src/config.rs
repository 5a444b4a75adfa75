//! The config of an engine, checked before it starts.

use crate::model_info::ModelInfo;
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The name requests may give as `model`.
    pub served_model_name: String,
    /// What `/v1/models` shows as `root`.
    pub model_root: String,
    /// Folder whose tokenizer and chat template render messages; `None`: `/v1/chat/completions` is refused.
    pub chat_model: Option<PathBuf>,
    /// Longest sequence, prompt and output together, tokens.
    pub max_model_len: u32,
    /// Most sequences that run at once: KV slots.
    pub max_num_seqs: u32,
    /// KV capacity over all running sequences, tokens.
    pub kv_cache_tokens: u64,
    /// Most tokens one forward call gets. Longer prompts are computed in chunks.
    pub max_num_batched_tokens: u32,
    /// Cap of `logprobs` and `prompt_logprobs`; -1 allows the whole vocabulary.
    pub max_logprobs: i64,
    /// Seeds requests that bring no seed of their own.
    pub seed: u64,
    /// A forward call that takes longer than this makes `/health` answer 503, seconds.
    pub step_deadline_s: f64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            served_model_name: "model".into(),
            model_root: String::new(),
            chat_model: None,
            max_model_len: 2048,
            max_num_seqs: 128,
            kv_cache_tokens: 128 * 2048,
            max_num_batched_tokens: 4096,
            max_logprobs: 20,
            seed: 0,
            step_deadline_s: 60.0,
        }
    }
}

/// A configuration no engine can run with. The message names the field.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{field}: {reason}")]
pub struct ConfigError {
    pub field: &'static str,
    pub reason: String,
}

impl Config {
    pub fn validate(&self, model: &ModelInfo) -> Result<(), ConfigError> {
        self.check_lengths(model)?;
        self.check_batches(model)?;
        let seconds = self.step_deadline_s;
        if !(seconds.is_finite() && seconds > 0.0) {
            let reason = format!("must be a positive number of seconds, got {seconds}");
            return refuse("step_deadline_s", reason);
        }
        Ok(())
    }

    fn check_lengths(&self, model: &ModelInfo) -> Result<(), ConfigError> {
        let (length, positions) = (self.max_model_len, model.max_model_len);
        if length < 2 {
            let reason = format!("must be at least 2 tokens, got {length}");
            return refuse("max_model_len", reason);
        }
        if length > positions {
            let reason = format!("{length} is longer than the model's {positions} positions");
            return refuse("max_model_len", reason);
        }
        Ok(())
    }

    fn check_batches(&self, model: &ModelInfo) -> Result<(), ConfigError> {
        let (sequences, slots) = (self.max_num_seqs, model.slots);
        if sequences == 0 {
            return refuse("max_num_seqs", "must be at least 1".into());
        }
        if sequences > slots {
            let reason = format!("{sequences} is more than the backend's {slots} KV slots");
            return refuse("max_num_seqs", reason);
        }
        let (kv, length) = (self.kv_cache_tokens, self.max_model_len);
        if kv < u64::from(length) {
            let reason =
                format!("{kv} does not hold one sequence of max_model_len = {length} tokens");
            return refuse("kv_cache_tokens", reason);
        }
        let tokens = self.max_num_batched_tokens;
        if tokens < sequences {
            let reason = format!(
                "{tokens} is less than max_num_seqs = {sequences}: not every sequence could advance in a step"
            );
            return refuse("max_num_batched_tokens", reason);
        }
        Ok(())
    }

    pub fn step_deadline(&self) -> Duration {
        Duration::from_secs_f64(self.step_deadline_s)
    }
}

fn refuse(field: &'static str, reason: String) -> Result<(), ConfigError> {
    Err(ConfigError { field, reason })
}
