//! What the orchestrator is told: one TOML file, unknown keys refused, every refusal naming the field and the mend.

use primerl_core::config::{Algorithm, Environment, Evaluation, FlopsModel, Role, Timeouts};
use primerl_core::time::Duration;
use serde::Deserialize;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("cannot read {path}: {source}; give the path of a TOML file")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{origin}: {message}")]
    Parse { origin: String, message: String },
    #[error("{field}: {problem}; {mend}")]
    Field {
        field: String,
        problem: String,
        mend: String,
    },
    #[error(transparent)]
    Core(#[from] primerl_core::config::ConfigError),
    #[error("model.path: {0}")]
    Model(String),
}

fn field(name: &str, problem: impl Into<String>, mend: impl Into<String>) -> ConfigError {
    ConfigError::Field {
        field: name.into(),
        problem: problem.into(),
        mend: mend.into(),
    }
}

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
    #[serde(default = "default_group_size")]
    pub group_size: u32,
    #[serde(default = "default_async_level")]
    pub max_async_level: u64,
    #[serde(default = "default_off_policy_steps")]
    pub max_off_policy_steps: u64,
    #[serde(default = "one_f64")]
    pub oversampling_factor: f64,
    /// URLs of engines that do not join by themselves.
    #[serde(default)]
    pub engines: Vec<String>,
    pub model: ModelConfig,
    #[serde(default)]
    pub sampling: SamplingConfig,
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    #[serde(default)]
    pub train: TrainConfig,
    #[serde(default)]
    pub eval: EvalConfig,
    #[serde(default)]
    pub timeouts: TimeoutsConfig,
    #[serde(default)]
    pub log: LogConfig,
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
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        SamplingConfig {
            temperature: 1.0,
            max_tokens: 512,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalSamplingConfig {
    /// `None`: as in `[sampling]`.
    pub temperature: Option<f64>,
    pub max_tokens: Option<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, tag = "type", rename_all = "snake_case")]
pub enum AlgorithmConfig {
    Grpo {
        #[serde(default)]
        normalize_std: bool,
        #[serde(default)]
        shuffle_advantages: bool,
    },
}

impl Default for AlgorithmConfig {
    fn default() -> Self {
        AlgorithmConfig::Grpo {
            normalize_std: false,
            shuffle_advantages: false,
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
    #[serde(default = "one_f64")]
    pub ratio: f64,
    #[serde(default = "default_retries")]
    pub max_retries: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalEnvironment {
    pub id: String,
    /// `None`: the id and `-eval`.
    pub name: Option<String>,
    pub num_examples: Option<u32>,
    #[serde(default = "one")]
    pub rollouts_per_example: u32,
    pub interval: Option<u64>,
    #[serde(default = "yes")]
    pub base_model: bool,
    #[serde(default)]
    pub sampling: EvalSamplingConfig,
}

/// Seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimeoutsConfig {
    pub rollout_s: f64,
    pub worker_s: f64,
    pub long_poll_s: f64,
    pub evaluation_s: f64,
    pub engine_request_s: f64,
    pub engine_update_s: f64,
    /// The run fails when no engine answered for this long, after one had proved its weights.
    pub no_engine_s: f64,
    /// A trainer that holds a batch and has not published its weights for this long is warned about.
    pub weights_s: f64,
}

impl Default for TimeoutsConfig {
    fn default() -> Self {
        TimeoutsConfig {
            rollout_s: 600.0,
            worker_s: 15.0,
            long_poll_s: 10.0,
            evaluation_s: 600.0,
            engine_request_s: 300.0,
            engine_update_s: 120.0,
            no_engine_s: 60.0,
            weights_s: 600.0,
        }
    }
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

/// How the requests of one environment's rollouts are sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub temperature: f64,
    pub max_tokens: u32,
}

impl Sampling {
    /// As in a chat request: what a lease tells the environment to ask for.
    pub fn to_wire(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut wire = serde_json::Map::new();
        wire.insert("temperature".into(), self.temperature.into());
        wire.insert("max_tokens".into(), self.max_tokens.into());
        wire
    }
}

impl Config {
    /// Read, parse and check a TOML file.
    pub fn from_file(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Config::from_toml(&text, &path.display().to_string())
    }

    /// `origin` names the text in errors.
    pub fn from_toml(text: &str, origin: &str) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text).map_err(|error| ConfigError::Parse {
            origin: origin.into(),
            message: error.to_string().trim_end().into(),
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Everything that can be said without reading the model.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sampling = &self.sampling;
        if !(sampling.temperature.is_finite() && sampling.temperature > 0.0) {
            return Err(field(
                "sampling.temperature",
                format!("is {}", sampling.temperature),
                "training needs a temperature above 0",
            ));
        }
        let altered = [
            ("sampling.top_p", sampling.top_p != 1.0, "1.0"),
            ("sampling.top_k", sampling.top_k > 0, "0"),
            ("sampling.min_p", sampling.min_p != 0.0, "0.0"),
        ];
        for (name, set, neutral) in altered {
            if set {
                return Err(field(
                    name,
                    "changes the distribution the trainer assumes",
                    format!("leave it at {neutral}"),
                ));
            }
        }
        for (name, tokens) in
            std::iter::once(("sampling.max_tokens".to_owned(), Some(sampling.max_tokens))).chain(
                self.eval.env.iter().map(|environment| {
                    (
                        format!("eval.env.{}.sampling.max_tokens", environment.name()),
                        environment.sampling.max_tokens,
                    )
                }),
            )
        {
            if tokens == Some(0) {
                return Err(field(&name, "is 0", "give at least 1, or leave it out"));
            }
        }
        for environment in &self.eval.env {
            if let Some(temperature) = environment.sampling.temperature
                && !(temperature.is_finite() && temperature >= 0.0)
            {
                let name = format!("eval.env.{}.sampling.temperature", environment.name());
                return Err(field(
                    &name,
                    format!("is {temperature}"),
                    "give 0 (greedy) or more",
                ));
            }
        }
        if sampling.max_tokens >= self.seq_len {
            return Err(field(
                "sampling.max_tokens",
                format!(
                    "leaves no room for a prompt within seq_len = {}",
                    self.seq_len
                ),
                "lower it or raise seq_len",
            ));
        }
        self.validate_timeouts()?;
        self.validate_engines()?;
        if self
            .log
            .level
            .parse::<tracing_subscriber::EnvFilter>()
            .is_err()
        {
            return Err(field(
                "log.level",
                format!("`{}` is no log level", self.log.level),
                "use error, warn, info, debug or trace",
            ));
        }
        // The model's shape only balances micro-batches, so any will do for a check.
        Ok(self
            .to_core(FlopsModel {
                linear: 1.0,
                quadratic: 0.0,
            })
            .validate()?)
    }

    fn validate_timeouts(&self) -> Result<(), ConfigError> {
        let timeouts = &self.timeouts;
        let all = [
            ("rollout_s", timeouts.rollout_s),
            ("worker_s", timeouts.worker_s),
            ("long_poll_s", timeouts.long_poll_s),
            ("evaluation_s", timeouts.evaluation_s),
            ("engine_request_s", timeouts.engine_request_s),
            ("engine_update_s", timeouts.engine_update_s),
            ("no_engine_s", timeouts.no_engine_s),
            ("weights_s", timeouts.weights_s),
        ];
        for (name, seconds) in all {
            // A year: larger numbers overflow the clock's arithmetic.
            if !(seconds > 0.0 && seconds <= 366.0 * 86_400.0) {
                return Err(field(
                    &format!("timeouts.{name}"),
                    format!("is {seconds}"),
                    "give seconds above 0 and up to a year",
                ));
            }
        }
        Ok(())
    }

    fn validate_engines(&self) -> Result<(), ConfigError> {
        for (index, url) in self.engines.iter().enumerate() {
            crate::engines::client::parse_url(url).map_err(|problem| {
                field(
                    &format!("engines[{index}]"),
                    problem,
                    "give a URL like http://host:port",
                )
            })?;
        }
        Ok(())
    }

    /// What the core is told. Training environments come first: an environment's id is its index.
    pub fn to_core(&self, flops: FlopsModel) -> primerl_core::Config {
        let training = self.train.env.iter().map(|environment| Environment {
            name: environment.name(),
            role: Role::Train,
            ratio: environment.ratio,
            max_retries: environment.max_retries,
        });
        let evaluation = self.eval.env.iter().map(|environment| Environment {
            name: environment.name(),
            role: Role::Evaluate(Evaluation {
                num_examples: environment.num_examples,
                rollouts_per_example: environment.rollouts_per_example,
                interval: environment.interval,
                base_model: environment.base_model,
            }),
            ratio: 1.0,
            max_retries: 1,
        });
        let AlgorithmConfig::Grpo {
            normalize_std,
            shuffle_advantages,
        } = self.algorithm;
        let seconds = Duration::from_secs_f64;
        primerl_core::Config {
            seed: self.seed,
            max_steps: self.max_steps,
            batch_size: self.batch_size,
            group_size: self.group_size,
            seq_len: self.seq_len,
            data_ranks: self.data_ranks,
            max_async_level: self.max_async_level,
            max_off_policy_steps: self.max_off_policy_steps,
            oversampling_factor: self.oversampling_factor,
            algorithm: Algorithm::Grpo {
                normalize_std,
                shuffle_advantages,
            },
            environments: training.chain(evaluation).collect(),
            timeouts: Timeouts {
                rollout: seconds(self.timeouts.rollout_s),
                worker: seconds(self.timeouts.worker_s),
                long_poll: seconds(self.timeouts.long_poll_s),
                evaluation: seconds(self.timeouts.evaluation_s),
                weights: seconds(self.timeouts.weights_s),
            },
            flops,
        }
    }

    /// Sampling of each environment, in the order of `to_core`'s environments.
    pub fn samplings(&self) -> Vec<Sampling> {
        let own = Sampling {
            temperature: self.sampling.temperature,
            max_tokens: self.sampling.max_tokens,
        };
        let training = self.train.env.iter().map(|_| own.clone());
        let evaluation = self.eval.env.iter().map(|environment| Sampling {
            temperature: environment.sampling.temperature.unwrap_or(own.temperature),
            max_tokens: environment.sampling.max_tokens.unwrap_or(own.max_tokens),
        });
        training.chain(evaluation).collect()
    }
}

/// Numbers of `config.json` that say what a token costs. Names are those of transformers' configs.
#[derive(Deserialize)]
struct Shape {
    hidden_size: f64,
    intermediate_size: f64,
    num_hidden_layers: f64,
    num_attention_heads: f64,
    num_key_value_heads: Option<f64>,
    head_dim: Option<f64>,
    vocab_size: f64,
}

/// FLOPs of forward and backward: 6 a parameter and token (Kaplan et al. 2020, arXiv:2001.08361), and causal
/// attention's 6 * layers * heads * head_dim a pair of tokens. A model whose `config.json` does not tell its
/// shape is balanced by tokens.
pub fn flops_model(model: &Path) -> FlopsModel {
    let read = || -> Option<Shape> {
        serde_json::from_slice(&std::fs::read(model.join("config.json")).ok()?).ok()
    };
    let Some(shape) = read() else {
        return FlopsModel {
            linear: 1.0,
            quadratic: 0.0,
        };
    };
    let head_dim = shape
        .head_dim
        .unwrap_or(shape.hidden_size / shape.num_attention_heads);
    let attention = shape.num_attention_heads * head_dim;
    let key_value = shape
        .num_key_value_heads
        .unwrap_or(shape.num_attention_heads)
        * head_dim;
    let layer =
        shape.hidden_size * (2.0 * attention + 2.0 * key_value + 3.0 * shape.intermediate_size);
    let parameters = shape.num_hidden_layers * layer + shape.vocab_size * shape.hidden_size;
    FlopsModel {
        linear: 6.0 * parameters,
        quadratic: 6.0 * shape.num_hidden_layers * attention,
    }
}
