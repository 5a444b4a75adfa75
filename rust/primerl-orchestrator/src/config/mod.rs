//! The orchestrator's config: one TOML file, unknown keys refused, every refusal naming the field and the remedy.
//!
//! The types say what keys there are. Their defaults and bounds are those of `schema`, and come before: here every key
//! is given, but for those that may be unset.

mod algorithm;
mod batches;
mod clients;
mod core;
mod demonstration;
mod limits;
mod names;
mod read;
mod schema;
mod teacher;
#[cfg(test)]
mod testing;
mod timeouts;
mod validate;

pub use self::algorithm::*;
pub(crate) use self::clients::ScoringTeacher;
pub use self::core::flops_model;
pub use self::demonstration::DemonstrationConfig;
pub use self::teacher::TeacherConfig;
pub use self::timeouts::TimeoutsConfig;

use primerl_core::config::{Buffer, EnvironmentConfig, Evaluation, RunConfig};
use primerl_engines::clients::{ClientConfig, ClientType};
use primerl_gateway::RolloutLimits;
use primerl_render::{ControlTokenPolicy, ParserSetting};
use primerl_service::config_error::{ConfigError, field};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::PathBuf;

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Where journal, spool, records and `run/orchestrator.json` go.
    pub output_dir: PathBuf,
    pub host: String,
    /// 0: chosen by the operating system.
    pub port: u16,
    /// What the core reads as it is.
    #[serde(flatten)]
    pub run: RunConfig,
    /// Whom it learns from, where it is not rewards.
    pub teacher: Option<TeacherConfig>,
    /// What it sees to be its own teacher.
    pub demonstration: DemonstrationConfig,
    /// Who renders: we, or the engines.
    pub client_type: ClientType,
    /// URLs of engines that do not join by themselves.
    pub engines: Vec<String>,
    /// How far an engine's log-probabilities of the probe may be from the trainer's: mean of the differences, nats.
    pub probe_tolerance: f64,
    /// Engines report which experts of a mixture they chose, and the trainer uses the same.
    pub router_replay: bool,
    pub model: ModelConfig,
    pub sampling: SamplingConfig,
    pub parsers: ParsersConfig,
    /// What becomes of control tokens of the model in the text of messages.
    pub control_tokens: ControlTokenPolicy,
    pub algorithm: AlgorithmConfig,
    pub buffer: BufferConfig,
    pub train: TrainConfig,
    pub eval: EvalConfig,
    pub timeouts: TimeoutsConfig,
    pub retention: RetentionConfig,
    pub log: LogConfig,
}

/// How much of the past is kept on disk.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetentionConfig {
    /// Batches kept for a trainer that has saved no checkpoint; with checkpoints, those after the last one are kept.
    pub spool_steps: u64,
    /// Keep every batch, also those that a checkpoint covers: `primerl verify` needs them.
    pub keep_spool: bool,
    /// Larger than this, in MiB, the journal loses its oldest events. The last 128 MiB or so are always kept.
    pub journal_mb: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Folder with tokenizer, chat template and `config.json`.
    pub path: PathBuf,
    /// The name engines serve the model under; `None`: the folder's.
    pub name: Option<String>,
}

impl ModelConfig {
    pub fn name(&self) -> String {
        let folder = || {
            self.path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
        };
        self.name
            .clone()
            .or_else(folder)
            .unwrap_or_else(|| "model".into())
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingConfig {
    pub temperature: f64,
    /// Longest answer of one turn, tokens.
    pub max_tokens: u32,
    /// Tokens sampled in a whole rollout; `None`: as many as its turns take.
    pub rollout_max_tokens: Option<u32>,
    /// Whether training rollouts may remove tokens before sampling.
    pub truncated: TruncatedSampling,
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
    /// Variables of the chat template, where a request does not name them.
    pub chat_template_kwargs: Map<String, Value>,
}

/// Training rollouts whose requests remove tokens before sampling (`top_p`, `top_k`, `min_p`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedSampling {
    /// They are refused: a trainer that does not know of it takes the whole distribution for the one sampled from.
    Refuse,
    /// They are recorded, and the trainer removes the same tokens.
    Replay,
}

/// How answers are read; `None` follows from the model's files. Names are those of `primerl_render`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParsersConfig {
    pub tool: Option<ParserSetting>,
    pub reasoning: Option<ParserSetting>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalSamplingConfig {
    pub temperature: f64,
    /// `None`: as in `[sampling]`.
    pub max_tokens: Option<u32>,
    pub rollout_max_tokens: Option<u32>,
}

/// The difficulty buffer. Names are those of Prime Intellect's hosted form.
#[derive(Clone, Debug, Deserialize)]
pub struct BufferConfig {
    #[serde(flatten)]
    pub core: Buffer,
    /// One number for each training environment, in order, in place of their `ratio`.
    pub env_ratios: Option<Vec<f64>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    pub env: Vec<TrainEnvironment>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    pub env: Vec<EvalEnvironment>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TrainEnvironment {
    pub id: String,
    /// `None`: the id's last part, without a version.
    pub name: Option<String>,
    /// Relative share of the groups; `None`: 1.
    pub ratio: Option<f64>,
    #[serde(flatten)]
    pub own: EnvironmentConfig,
    /// `None`: the run's.
    pub algorithm: Option<AlgorithmConfig>,
    /// `None`: the run's.
    pub teacher: Option<TeacherConfig>,
    /// `None`: the run's.
    pub demonstration: Option<DemonstrationConfig>,
    /// `None`: the run's.
    pub sampling: Option<SamplingConfig>,
    /// Less than `timeouts.rollout_s`; `None`: that.
    pub rollout_s: Option<f64>,
    pub limits: RolloutLimits,
    /// Sent to workers that join; not looked at here.
    pub worker: Map<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct EvalEnvironment {
    pub id: String,
    /// `None`: that of the id, and `-eval`.
    pub name: Option<String>,
    /// The training environment that this one validates: results are reported under its name.
    pub validates: Option<String>,
    #[serde(flatten)]
    pub measured: Evaluation,
    pub sampling: EvalSamplingConfig,
    /// Who answers in place of the policy; `None`: the run's engines.
    pub client: Option<ClientConfig>,
    /// Less than `timeouts.rollout_s`; `None`: that.
    pub rollout_s: Option<f64>,
    pub limits: RolloutLimits,
    /// Sent to workers that join; not looked at here.
    pub worker: Map<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    pub level: String,
}
