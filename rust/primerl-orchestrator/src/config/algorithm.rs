//! `[algorithm]`, and an environment's own one.

use super::{ClientType, Config, ConfigError, TrainEnvironment, field};
use primerl_core::config::{Algorithm, AlgorithmKind, Echo, LengthNormalization, LengthPenalty};
use primerl_core::time::Duration;
use primerl_core::turn::MessageRole;
use serde::Deserialize;

/// How rewards become advantages; `primerl_core::signal` has the formulas and their papers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmType {
    Grpo,
    DrGrpo,
    Rloo,
    Maxrl,
    ReinforcePlusPlus,
    Rae,
    HierarchicalGrpo,
    Custom,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlgorithmConfig {
    pub r#type: AlgorithmType,
    pub normalize_std: bool,
    /// `None`: the type's own, `constant` for `dr_grpo` and `token` for the others.
    pub length_normalization: Option<LengthNormalization>,
    pub shuffle_advantages: bool,
    /// Of `grpo` and `dr_grpo`.
    pub length_penalty: Option<LengthPenalty>,
    /// What the environment says is learnt, too.
    pub echo: Option<Echo>,
    /// Of `rae`: how much of its baseline a seat keeps at each reward.
    pub decay: f64,
    /// Of `hierarchical_grpo`: seats that are compared within their rollout.
    pub episode_agents: Vec<String>,
    /// `module:function` of `custom`, or the name of an installed one.
    pub path: Option<String>,
    /// Of `custom`: a group is dropped when the function has not answered for this long, seconds.
    pub timeout_s: f64,
}

impl AlgorithmConfig {
    pub(super) fn to_core(&self) -> Algorithm {
        let kind = match self.r#type {
            AlgorithmType::Grpo => AlgorithmKind::Grpo,
            AlgorithmType::DrGrpo => AlgorithmKind::DrGrpo,
            AlgorithmType::Rloo => AlgorithmKind::Rloo,
            AlgorithmType::Maxrl => AlgorithmKind::MaxRl,
            AlgorithmType::ReinforcePlusPlus => AlgorithmKind::ReinforcePlusPlus,
            AlgorithmType::Rae => AlgorithmKind::Rae { decay: self.decay },
            AlgorithmType::HierarchicalGrpo => AlgorithmKind::HierarchicalGrpo {
                episode_agents: self.episode_agents.clone(),
            },
            AlgorithmType::Custom => AlgorithmKind::Custom {
                path: self.path.clone().unwrap_or_default(),
                timeout: Duration::from_secs_f64(self.timeout_s),
            },
        };
        let usual = match self.r#type {
            AlgorithmType::DrGrpo => LengthNormalization::Constant,
            _ => LengthNormalization::Token,
        };
        Algorithm {
            kind,
            normalize_std: self.normalize_std,
            length_normalization: self.length_normalization.unwrap_or(usual),
            shuffle_advantages: self.shuffle_advantages,
            length_penalty: self.length_penalty,
            echo: self.echo,
        }
    }

    /// Whose messages are learnt.
    pub(super) fn observes(&self) -> Vec<MessageRole> {
        let echo = self.echo;
        let is_learnt = |role: &MessageRole| echo.is_some_and(|echo| echo.weight(*role) > 0.0);
        MessageRole::ALL.into_iter().filter(is_learnt).collect()
    }

    /// What the core cannot see. `name` is where it stands in the file.
    fn validate(&self, name: &str) -> Result<(), ConfigError> {
        if self.r#type != AlgorithmType::Custom && self.path.is_some() {
            return Err(field(
                &format!("{name}.path"),
                "is read for type = \"custom\" only",
                "leave it out, or set the type",
            ));
        }
        Ok(())
    }
}

impl Config {
    pub(super) fn algorithm_of<'a>(&'a self, own: &'a TrainEnvironment) -> &'a AlgorithmConfig {
        own.algorithm.as_ref().unwrap_or(&self.algorithm)
    }

    pub(super) fn validate_algorithms(&self) -> Result<(), ConfigError> {
        self.algorithm.validate("algorithm")?;
        for environment in &self.train.env {
            if let Some(algorithm) = &environment.algorithm {
                algorithm.validate(&format!("train.env.{}.algorithm", environment.name()))?;
            }
            let echoes = self.algorithm_of(environment).echo.is_some();
            if echoes && self.client_type != ClientType::Renderer {
                return Err(field(
                    "algorithm.echo",
                    "is set, and engines that render messages do not say which tokens are whose",
                    "leave out client_type, or echo",
                ));
            }
        }
        Ok(())
    }
}
