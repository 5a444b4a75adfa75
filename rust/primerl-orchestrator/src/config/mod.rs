//! The orchestrator's config: one TOML file, unknown keys refused, every refusal naming the field and the remedy.

mod algorithm;
mod clients;
mod core;
mod limits;
mod teacher;
mod timeouts;
mod validate;

pub use self::algorithm::*;
pub(crate) use self::clients::ScoringTeacher;
pub use self::core::flops_model;
pub use self::teacher::{DemonstrationConfig, TeacherConfig};
pub use self::timeouts::TimeoutsConfig;

use primerl_core::config::{
    Admission, LongSamples, TrainingMode, TrajectoryStrategy, TruncatedRollouts,
};
use primerl_core::group::OnCancel;
use primerl_engines::clients::{ClientConfig, ClientType};
use primerl_gateway::RolloutLimits;
use primerl_render::{ControlTokenPolicy, ParserSetting};
use primerl_service::config_error::{ConfigError, field};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::PathBuf;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where journal, spool, records and `run/orchestrator.json` go.
    pub output_dir: PathBuf,
    #[serde(default = "default_host")]
    pub host: String,
    /// 0: chosen by the operating system.
    #[serde(default)]
    pub port: u16,
    #[serde(default)]
    pub seed: u64,
    pub max_steps: u64,
    /// Longest sample, tokens; also bounds prompt + answer of a training rollout's turn.
    #[serde(default = "default_seq_len")]
    pub seq_len: u32,
    #[serde(default = "one")]
    pub data_ranks: u32,
    #[serde(default = "default_batch_size")]
    pub batch_size: u32,
    /// In place of `batch_size`.
    #[serde(default)]
    pub token_batch_size: Option<u64>,
    #[serde(default = "default_group_size")]
    pub group_size: u32,
    /// `None`: only whole groups are trained.
    #[serde(default)]
    pub min_group_size: Option<u32>,
    #[serde(default)]
    pub group_on_cancel: OnCancel,
    #[serde(default = "default_async_level")]
    pub max_async_level: u64,
    #[serde(default = "default_off_policy_steps")]
    pub max_off_policy_steps: u64,
    #[serde(default = "one_f64")]
    pub oversampling_factor: f64,
    #[serde(default)]
    pub admission: Admission,
    /// Whether the trainer computes tokens that samples have in common once: batches are then packed as trees.
    #[serde(default)]
    pub shared_prefixes: bool,
    /// Which samples a rollout's turns become.
    #[serde(default)]
    pub trajectory_strategy: TrajectoryStrategy,
    /// What becomes of rollouts the environment cut short.
    #[serde(default)]
    pub truncated_rollouts: TruncatedRollouts,
    /// What becomes of samples longer than `seq_len`.
    #[serde(default)]
    pub long_samples: LongSamples,
    /// What the policy learns from.
    #[serde(default)]
    pub training_mode: TrainingMode,
    /// Whom it learns from, where it is not rewards.
    pub teacher: Option<TeacherConfig>,
    /// What it sees to be its own teacher.
    #[serde(default)]
    pub demonstration: DemonstrationConfig,
    /// Who renders: we, or the engines.
    #[serde(default)]
    pub client_type: ClientType,
    /// URLs of engines that do not join by themselves.
    #[serde(default)]
    pub engines: Vec<String>,
    /// How far an engine's log-probabilities of the probe may be from the trainer's: mean of the differences, nats.
    #[serde(default = "default_probe_tolerance")]
    pub probe_tolerance: f64,
    /// Engines report which experts of a mixture they chose, and the trainer uses the same.
    #[serde(default)]
    pub router_replay: bool,
    pub model: ModelConfig,
    #[serde(default)]
    pub sampling: SamplingConfig,
    #[serde(default)]
    pub parsers: ParsersConfig,
    /// What becomes of control tokens of the model in the text of messages.
    #[serde(default)]
    pub control_tokens: ControlTokenPolicy,
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    #[serde(default)]
    pub buffer: BufferConfig,
    #[serde(default)]
    pub train: TrainConfig,
    #[serde(default)]
    pub eval: EvalConfig,
    #[serde(default)]
    pub timeouts: TimeoutsConfig,
    #[serde(default)]
    pub retention: RetentionConfig,
    #[serde(default)]
    pub log: LogConfig,
}

/// How much of the past is kept on disk.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionConfig {
    /// Batches kept for a trainer that has saved no checkpoint; with checkpoints, those after the last one are kept.
    pub spool_steps: u64,
    /// Keep every batch, also those that a checkpoint covers: `primerl verify` needs them.
    pub keep_spool: bool,
    /// Larger than this, in MiB, the journal loses its oldest events. The last 128 MiB or so are always kept.
    pub journal_mb: u64,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        RetentionConfig {
            spool_steps: 256,
            keep_spool: false,
            journal_mb: 1024,
        }
    }
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
#[serde(deny_unknown_fields, default)]
pub struct SamplingConfig {
    pub temperature: f64,
    /// Longest answer of one turn, tokens.
    pub max_tokens: u32,
    /// Tokens sampled in a whole rollout; `None`: as many as its turns take.
    pub rollout_max_tokens: Option<u32>,
    /// Whether training rollouts may leave tokens out before sampling.
    pub truncated: TruncatedSampling,
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
    /// Variables of the chat template, where a request does not name them.
    pub chat_template_kwargs: Map<String, Value>,
}

/// Training rollouts whose requests leave tokens out before sampling (`top_p`, `top_k`, `min_p`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedSampling {
    /// They are refused: a trainer that does not know of it takes the whole distribution for the one sampled from.
    #[default]
    Refuse,
    /// They are recorded, and the trainer leaves out the same tokens.
    Replay,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        SamplingConfig {
            temperature: 1.0,
            max_tokens: 512,
            rollout_max_tokens: None,
            truncated: TruncatedSampling::Refuse,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            chat_template_kwargs: Map::new(),
        }
    }
}

/// How answers are read; `None` follows from the model's files. Names are those of `primerl_render`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParsersConfig {
    pub tool: Option<ParserSetting>,
    pub reasoning: Option<ParserSetting>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalSamplingConfig {
    /// `None`: as in `[sampling]`.
    pub temperature: Option<f64>,
    pub max_tokens: Option<u32>,
    pub rollout_max_tokens: Option<u32>,
}

/// The difficulty buffer. Names and defaults are those of Prime Intellect's hosted form.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BufferConfig {
    /// Draw by difficulty, and do not train groups whose advantages would all be 0.
    pub online_difficulty_filtering: bool,
    /// An example is easy when the mean reward of its last group is at least this.
    pub easy_threshold: f64,
    /// An example is hard when the mean reward of its last group is at most this.
    pub hard_threshold: f64,
    /// Weight of an easy example in the draw, where a normal one has 1; 0 is never.
    pub easy_fraction: f64,
    /// Weight of a hard example in the draw, likewise.
    pub hard_fraction: f64,
    /// One number for each training environment, in order, in place of their `ratio`.
    pub env_ratios: Option<Vec<f64>>,
    /// Seed of the order of examples; `None`: the run's.
    pub seed: Option<u64>,
}

impl Default for BufferConfig {
    fn default() -> Self {
        let core = primerl_core::config::Buffer::default();
        BufferConfig {
            online_difficulty_filtering: core.online_difficulty_filtering,
            easy_threshold: core.easy_threshold,
            hard_threshold: core.hard_threshold,
            easy_fraction: core.easy_fraction,
            hard_fraction: core.hard_fraction,
            env_ratios: None,
            seed: core.seed,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    pub env: Vec<TrainEnvironment>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    pub env: Vec<EvalEnvironment>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainEnvironment {
    pub id: String,
    /// `None`: the id.
    pub name: Option<String>,
    /// Relative share of the groups; `None`: 1.
    pub ratio: Option<f64>,
    #[serde(default = "default_retries")]
    pub max_retries: u32,
    /// `None`: the run's.
    pub algorithm: Option<AlgorithmConfig>,
    /// `None`: the run's.
    pub group_size: Option<u32>,
    /// `None`: the run's.
    pub training_mode: Option<TrainingMode>,
    /// `None`: the run's.
    pub teacher: Option<TeacherConfig>,
    /// `None`: the run's.
    pub demonstration: Option<DemonstrationConfig>,
    /// `None`: the run's.
    pub sampling: Option<SamplingConfig>,
    /// Less than `timeouts.rollout_s`; `None`: that.
    pub rollout_s: Option<f64>,
    #[serde(default)]
    pub limits: RolloutLimits,
    /// What workers that join are told; not looked at here.
    #[serde(default)]
    pub worker: Map<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalEnvironment {
    pub id: String,
    /// `None`: the id and `-eval`.
    pub name: Option<String>,
    /// The training environment that this one validates: results are told under its name.
    pub validates: Option<String>,
    pub num_examples: Option<u32>,
    #[serde(default = "one")]
    pub rollouts_per_example: u32,
    pub interval: Option<u64>,
    #[serde(default = "yes")]
    pub base_model: bool,
    /// A rollout with at least this reward has passed.
    #[serde(default = "one_f64")]
    pub pass_threshold: f64,
    #[serde(default)]
    pub sampling: EvalSamplingConfig,
    /// Who answers in place of the policy; `None`: the run's engines.
    pub client: Option<ClientConfig>,
    /// Less than `timeouts.rollout_s`; `None`: that.
    pub rollout_s: Option<f64>,
    #[serde(default)]
    pub limits: RolloutLimits,
    /// What workers that join are told; not looked at here.
    #[serde(default)]
    pub worker: Map<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        LogConfig {
            level: "info".into(),
        }
    }
}

fn default_host() -> String {
    "127.0.0.1".into()
}
fn one() -> u32 {
    1
}
fn one_f64() -> f64 {
    1.0
}
fn yes() -> bool {
    true
}
fn default_retries() -> u32 {
    2
}
fn default_seq_len() -> u32 {
    2048
}
fn default_batch_size() -> u32 {
    128
}
fn default_group_size() -> u32 {
    8
}
fn default_async_level() -> u64 {
    2
}
fn default_off_policy_steps() -> u64 {
    8
}
/// Above what half precision makes of unlikely tokens, and below what other weights do.
fn default_probe_tolerance() -> f64 {
    0.5
}

impl TrainEnvironment {
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.id.clone())
    }
}

impl EvalEnvironment {
    pub fn name(&self) -> String {
        self.name
            .clone()
            .unwrap_or_else(|| format!("{}-eval", self.id))
    }
}
