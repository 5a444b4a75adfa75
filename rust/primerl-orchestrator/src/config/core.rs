//! The config as the core wants it.

use super::schema::YEAR_S;
use super::{Config, SamplingConfig, TimeoutsConfig, TruncatedSampling};
use primerl_core::Truncation;
use primerl_core::config::{Algorithm, Environment, EnvironmentConfig, FlopsModel, Role, Timeouts};
use primerl_core::time::Duration;
use primerl_gateway::Sampling;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// A rollout, its second attempt, and what is between them.
const ROLLOUTS_WITHOUT_PROGRESS: f64 = 3.0;

impl TimeoutsConfig {
    fn evaluation_progress_s(&self) -> f64 {
        let usual = (ROLLOUTS_WITHOUT_PROGRESS * self.rollout_s).min(YEAR_S);
        self.evaluation_progress_s.unwrap_or(usual)
    }
}

impl Config {
    /// The core's config. Training environments come first: an environment's id is its index.
    pub fn to_core(&self, flops: FlopsModel) -> primerl_core::Config {
        let training = self.train.env.iter().zip(self.ratios());
        let training = training.map(|(environment, ratio)| Environment {
            name: environment.name(),
            role: Role::Train,
            ratio,
            algorithm: self.algorithm_of(environment).0.clone(),
            own: environment.own.clone(),
        });
        let evaluation = self.eval.env.iter().map(|environment| Environment {
            name: environment.name(),
            role: Role::Evaluate(environment.measured.clone()),
            ratio: 1.0,
            algorithm: Algorithm::plain(),
            own: EnvironmentConfig {
                max_retries: 1,
                group_size: None,
                training_mode: None,
            },
        });
        let seconds = Duration::from_secs_f64;
        primerl_core::Config {
            run: self.run.clone(),
            spool_steps: self.retention.spool_steps,
            buffer: self.buffer.core.clone(),
            environments: training.chain(evaluation).collect(),
            without_engines: self.needs_no_engine(),
            timeouts: Timeouts {
                rollout: seconds(self.timeouts.rollout_s),
                rollout_of: self.rollout_spans(),
                worker: seconds(self.timeouts.worker_s),
                long_poll: seconds(self.timeouts.long_poll_s),
                // Where none is given, the longest that may be.
                evaluation: seconds(self.timeouts.evaluation_s.unwrap_or(YEAR_S)),
                evaluation_progress: Some(seconds(self.timeouts.evaluation_progress_s())),
                weights: seconds(self.timeouts.weights_s),
                teacher: seconds(self.teacher_patience_s()),
            },
            flops,
        }
    }

    /// The spans of environments that have one of their own; empty where none has, as in runs of before there were such.
    fn rollout_spans(&self) -> Vec<Option<Duration>> {
        let training = self.train.env.iter().map(|own| own.rollout_s);
        let evaluation = self.eval.env.iter().map(|own| own.rollout_s);
        let spans = training.chain(evaluation);
        let spans: Vec<_> = spans.map(|own| own.map(Duration::from_secs_f64)).collect();
        match spans.iter().any(Option::is_some) {
            true => spans,
            false => Vec::new(),
        }
    }

    /// Other servers answer every rollout.
    pub fn needs_no_engine(&self) -> bool {
        let mut evaluated = self.eval.env.iter();
        self.train.env.is_empty() && evaluated.all(|environment| environment.client.is_some())
    }

    /// Relative share of each training environment, from `buffer.env_ratios` or its own `ratio`; 1 where neither says.
    fn ratios(&self) -> Vec<f64> {
        let own = self.train.env.iter().map(|own| own.ratio.unwrap_or(1.0));
        self.buffer
            .env_ratios
            .clone()
            .unwrap_or_else(|| own.collect())
    }

    /// The model that is measured in place of the policy, in the order of `to_core`'s environments.
    pub fn measured_models(&self) -> Vec<Option<String>> {
        let training = self.train.env.iter().map(|_| None);
        let evaluation = self.eval.env.iter().map(|environment| {
            let client = environment.client.as_ref();
            client.map(|client| client.model.clone())
        });
        training.chain(evaluation).collect()
    }

    /// The training environment that each one validates, likewise.
    pub fn validated(&self) -> Vec<Option<String>> {
        let training = self.train.env.iter().map(|_| None);
        let evaluation = self.eval.env.iter().map(|own| own.validates.clone());
        training.chain(evaluation).collect()
    }

    /// Sampling of each environment, in the order of `to_core`'s environments.
    pub fn samplings(&self) -> Vec<Sampling> {
        let own = self.sampling.to_gateway();
        let of_run = || own.clone();
        let training = self.train.env.iter().map(|environment| {
            let sampling = environment.sampling.as_ref();
            Sampling {
                observes: self.algorithm_of(environment).observes(),
                ..sampling.map_or_else(of_run, SamplingConfig::to_gateway)
            }
        });
        let evaluation = self.eval.env.iter().map(|environment| Sampling {
            temperature: environment.sampling.temperature,
            max_tokens: environment.sampling.max_tokens.unwrap_or(own.max_tokens),
            rollout_max_tokens: environment
                .sampling
                .rollout_max_tokens
                .or(own.rollout_max_tokens),
            replayed: None,
            template_kwargs: own.template_kwargs.clone(),
            observes: Vec::new(),
        });
        training.chain(evaluation).collect()
    }
}

impl SamplingConfig {
    fn to_gateway(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            max_tokens: self.max_tokens,
            rollout_max_tokens: self.rollout_max_tokens,
            replayed: self.replayed(),
            template_kwargs: self.template_kwargs(),
            observes: Vec::new(),
        }
    }

    /// `None` where there are none: most requests then stay text that is not read.
    fn template_kwargs(&self) -> Option<Arc<Map<String, Value>>> {
        let own = &self.chat_template_kwargs;
        (!own.is_empty()).then(|| Arc::new(own.clone()))
    }

    /// How training rollouts truncate where their requests do not say; `None`: they must not.
    pub fn replayed(&self) -> Option<Truncation> {
        (self.truncated == TruncatedSampling::Replay).then(|| Truncation {
            top_p: self.top_p as f32,
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            min_p: self.min_p as f32,
        })
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
    let heads = shape.num_attention_heads;
    let head_dim = shape.head_dim.unwrap_or(shape.hidden_size / heads);
    let attention = heads * head_dim;
    let key_value = shape.num_key_value_heads.unwrap_or(heads) * head_dim;
    let layer =
        shape.hidden_size * (2.0 * attention + 2.0 * key_value + 3.0 * shape.intermediate_size);
    let parameters = shape.num_hidden_layers * layer + shape.vocab_size * shape.hidden_size;
    FlopsModel {
        linear: 6.0 * parameters,
        quadratic: 6.0 * shape.num_hidden_layers * attention,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeouts(lines: &str) -> Timeouts {
        let toml = format!(
            "output_dir = \"o\"\nmax_steps = 1\n[model]\npath = \"m\"\n[[train.env]]\nid = \"e\"\n[timeouts]\n{lines}"
        );
        let config = Config::from_toml(&toml, "test").expect("is a config");
        let flops = FlopsModel {
            linear: 1.0,
            quadratic: 0.0,
        };
        config.to_core(flops).timeouts
    }

    #[test]
    fn an_evaluation_may_last_but_not_without_progress() {
        let usual = timeouts("rollout_s = 100.0");
        assert_eq!(usual.evaluation, Duration::from_secs_f64(YEAR_S));
        assert_eq!(usual.evaluation_progress, Some(Duration::from_secs(300)));
        let given = timeouts("evaluation_s = 60.0\nevaluation_progress_s = 7.0");
        assert_eq!(given.evaluation, Duration::from_secs(60));
        assert_eq!(given.evaluation_progress, Some(Duration::from_secs(7)));
    }
}
