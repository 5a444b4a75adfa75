//! What is simulated. The names and defaults are those of a run's config where it has them.

use crate::distribution::Distribution;
use serde::{Deserialize, Serialize};

mod core_config;

/// Longest time of what happens once a step, a turn or a rollout: long polls and heartbeats continue meanwhile, so a plan
/// with longer times would take very long to simulate.
const LONGEST_S: f64 = 86_400.0;
/// In-flight rollouts, as a multiple of a batch.
const MOST_AHEAD: f64 = 1000.0;
/// More would not fit into this machine's memory, or take longer than a run.
const MOST: u64 = 1_000_000;
const MOST_PROCESSES: u64 = 100_000;
const MOST_EXAMPLES: u64 = 1_000_000_000;
const LONGEST_SEQUENCE: u64 = 100_000_000;
/// The same for a step of an engine, of which a rollout takes thousands.
const LONGEST_ENGINE_STEP_S: f64 = 60.0;
/// The same for times that are multiplied by sequences or tokens.
const LONGEST_EACH_S: f64 = 1.0;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub seed: u64,
    pub max_steps: u64,
    /// Longest micro-batch, and longest sequence an engine takes, tokens.
    pub seq_len: u32,
    pub data_ranks: u32,
    pub orchestrator: Orchestration,
    pub inference: Inference,
    pub environment: EnvironmentPlan,
    pub trainer: TrainerPlan,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orchestration {
    pub batch_size: u32,
    pub group_size: u32,
    pub max_async_level: u64,
    pub max_off_policy_steps: u64,
    pub oversampling_factor: f64,
    /// A rollout that takes longer is cancelled and tried again, seconds.
    pub rollout_s: f64,
}

/// One forward step of an engine takes `step_s`, plus `step_per_sequence_s` for each sequence that decodes, plus
/// `step_per_prefill_token_s` for each prompt token computed in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inference {
    pub engines: u32,
    pub max_num_seqs: u32,
    pub kv_cache_tokens: u64,
    pub max_num_batched_tokens: u32,
    pub step_s: f64,
    pub step_per_sequence_s: f64,
    pub step_per_prefill_token_s: f64,
    /// Pause for each weight update.
    pub update_s: f64,
    /// Share of a conversation's earlier tokens whose KV a later turn finds again, 0 to 1.
    pub prefix_cache_hit: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentPlan {
    pub num_workers: u32,
    pub max_concurrent: u32,
    pub examples: u32,
    pub turns: Distribution,
    /// The worker process's own CPU time for each turn; its rollouts take turns on one core.
    pub cpu_s: f64,
    /// Before the first turn.
    pub setup_s: Distribution,
    /// After each turn: tools, tests, scoring.
    pub turn_s: Distribution,
    pub prompt_tokens: Distribution,
    pub answer_tokens: Distribution,
    /// Prompt tokens that each later turn adds.
    pub observation_tokens: Distribution,
    /// Probability that a rollout fails at its end.
    pub failure_probability: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerPlan {
    pub step_s: f64,
    /// For each token of the fullest data rank.
    pub step_per_token_s: f64,
    pub publish_s: f64,
}

/// A plan that cannot be simulated; the message begins with the field's name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct PlanError {
    pub field: String,
    pub problem: String,
}

impl PlanError {
    fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        PlanError {
            field: field.into(),
            problem: problem.into(),
        }
    }
}

impl Plan {
    /// # Errors
    /// The first field found wrong.
    pub fn validate(&self) -> Result<(), PlanError> {
        self.validate_counts()?;
        self.validate_numbers()?;
        self.validate_distributions()?;
        self.validate_engines()?;
        let core = self.core_config();
        core.validate().map_err(|error| {
            PlanError::new(format!("orchestrator.{}", error.key()), error.to_string())
        })
    }

    /// An engine has room for a sequence, and for a token of each sequence that decodes.
    fn validate_engines(&self) -> Result<(), PlanError> {
        let needed = u64::from(self.seq_len);
        if self.inference.kv_cache_tokens < needed {
            return Err(PlanError::new(
                "inference.kv_cache_tokens",
                format!(
                    "{} tokens cannot hold one sequence of seq_len = {needed}; raise it",
                    self.inference.kv_cache_tokens
                ),
            ));
        }
        if self.inference.max_num_batched_tokens < self.inference.max_num_seqs {
            return Err(PlanError::new(
                "inference.max_num_batched_tokens",
                format!(
                    "must be at least max_num_seqs ({})",
                    self.inference.max_num_seqs
                ),
            ));
        }
        Ok(())
    }

    fn validate_counts(&self) -> Result<(), PlanError> {
        let counts = [
            ("max_steps", self.max_steps, MOST),
            ("seq_len", u64::from(self.seq_len), LONGEST_SEQUENCE),
            ("data_ranks", u64::from(self.data_ranks), MOST_PROCESSES),
            (
                "inference.engines",
                u64::from(self.inference.engines),
                MOST_PROCESSES,
            ),
            (
                "inference.max_num_seqs",
                u64::from(self.inference.max_num_seqs),
                MOST,
            ),
            (
                "environment.num_workers",
                u64::from(self.environment.num_workers),
                MOST_PROCESSES,
            ),
            (
                "environment.max_concurrent",
                u64::from(self.environment.max_concurrent),
                MOST,
            ),
            (
                "environment.examples",
                u64::from(self.environment.examples),
                MOST_EXAMPLES,
            ),
            (
                "orchestrator.batch_size",
                u64::from(self.orchestrator.batch_size),
                MOST,
            ),
            (
                "orchestrator.group_size",
                u64::from(self.orchestrator.group_size),
                MOST,
            ),
        ];
        let off_policy = self.orchestrator.max_off_policy_steps;
        if off_policy > MOST {
            return Err(PlanError::new(
                "orchestrator.max_off_policy_steps",
                format!("{off_policy} must be a number from 0 to {MOST}"),
            ));
        }
        for (field, count, most) in counts {
            if count == 0 || count > most {
                return Err(PlanError::new(
                    field,
                    format!("{count} must be a number from 1 to {most}"),
                ));
            }
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), PlanError> {
        let (inference, environment) = (&self.inference, &self.environment);
        let trainer = &self.trainer;
        let numbers = [
            ("inference.step_s", inference.step_s, LONGEST_ENGINE_STEP_S),
            (
                "inference.step_per_sequence_s",
                inference.step_per_sequence_s,
                LONGEST_EACH_S,
            ),
            (
                "inference.step_per_prefill_token_s",
                inference.step_per_prefill_token_s,
                LONGEST_EACH_S,
            ),
            ("inference.update_s", inference.update_s, LONGEST_S),
            (
                "inference.prefix_cache_hit",
                inference.prefix_cache_hit,
                1.0,
            ),
            ("environment.cpu_s", environment.cpu_s, LONGEST_S),
            (
                "environment.failure_probability",
                environment.failure_probability,
                1.0,
            ),
            ("trainer.step_s", trainer.step_s, LONGEST_S),
            (
                "trainer.step_per_token_s",
                trainer.step_per_token_s,
                LONGEST_EACH_S,
            ),
            ("trainer.publish_s", trainer.publish_s, LONGEST_S),
        ];
        for (field, value, most) in numbers {
            if !(0.0..=most).contains(&value) {
                return Err(PlanError::new(
                    field,
                    format!("{value} must be a number from 0 to {most}"),
                ));
            }
        }
        self.validate_ranges()
    }

    /// Numbers whose range does not begin at 0, or ends before 1.
    fn validate_ranges(&self) -> Result<(), PlanError> {
        let (inference, environment) = (&self.inference, &self.environment);
        if inference.step_s + inference.step_per_sequence_s <= 0.0 {
            return Err(PlanError::new(
                "inference.step_s",
                "a step must take some time; set it above 0",
            ));
        }
        if environment.failure_probability >= 1.0 {
            return Err(PlanError::new(
                "environment.failure_probability",
                "must be below 1, or no group is ever completed",
            ));
        }
        let ahead = self.orchestrator.oversampling_factor;
        if !(1.0..=MOST_AHEAD).contains(&ahead) {
            return Err(PlanError::new(
                "orchestrator.oversampling_factor",
                format!("{ahead} must be a number from 1 to {MOST_AHEAD}"),
            ));
        }
        let rollout_s = self.orchestrator.rollout_s;
        if !(rollout_s > 0.0 && rollout_s <= LONGEST_S) {
            return Err(PlanError::new(
                "orchestrator.rollout_s",
                format!("{rollout_s} must be a number above 0, at most {LONGEST_S}"),
            ));
        }
        Ok(())
    }

    fn validate_distributions(&self) -> Result<(), PlanError> {
        let environment = &self.environment;
        let distributions = [
            ("turns", &environment.turns, 1.0, f64::MAX),
            ("setup_s", &environment.setup_s, 0.0, LONGEST_S),
            ("turn_s", &environment.turn_s, 0.0, LONGEST_S),
            ("prompt_tokens", &environment.prompt_tokens, 1.0, f64::MAX),
            ("answer_tokens", &environment.answer_tokens, 1.0, f64::MAX),
            (
                "observation_tokens",
                &environment.observation_tokens,
                1.0,
                f64::MAX,
            ),
        ];
        for (field, distribution, least, most) in distributions {
            if let Some(problem) = distribution.problem(least, most) {
                return Err(PlanError::new(format!("environment.{field}"), problem));
            }
        }
        self.validate_prompts()
    }

    fn validate_prompts(&self) -> Result<(), PlanError> {
        let prompt = self.environment.prompt_tokens.max();
        if prompt >= f64::from(self.seq_len) {
            return Err(PlanError::new(
                "environment.prompt_tokens",
                format!(
                    "a prompt of {prompt} tokens leaves no room for an answer in seq_len = {}; lower its max or raise seq_len",
                    self.seq_len
                ),
            ));
        }
        Ok(())
    }
}
