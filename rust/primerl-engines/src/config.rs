//! What engines have to do for the run.

use super::ids::WrittenIds;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct EnginesConfig {
    /// Name the engines serve the run's model under.
    pub model: String,
    pub request_timeout: Duration,
    pub update_timeout: Duration,
    pub stop_token_ids: Vec<u32>,
    /// Size of the model's vocabulary; `None` if the model does not say.
    pub vocabulary_size: Option<u32>,
    /// Longest sequence that is trained, tokens.
    pub seq_len: u32,
    /// Longest answer that is asked for, tokens.
    pub max_tokens: u32,
    /// Training rollouts are not all sampled at temperature 1 from all tokens: log-probabilities must be of the
    /// distribution that was sampled from.
    pub needs_processed: bool,
    /// Engines report with an answer which experts they chose, for the trainer to replay.
    pub returns_experts: bool,
    /// How far an engine's log-probabilities of the probe may be from the trainer's: mean of the differences, nats.
    pub probe_tolerance: f64,
    /// What of the prompts was written before.
    pub written_ids: Arc<WrittenIds>,
    /// Engines are given messages, and say which ids they made of them.
    pub engines_render: bool,
}
