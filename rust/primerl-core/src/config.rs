//! The config of a run. Checked once, by [`Config::validate`], before a [`crate::Core`] is made.

mod admission;
mod buffer;
mod changes;
mod error;
mod training;
mod validate;

pub use crate::advantage::{
    Algorithm, AlgorithmKind, AlgorithmProblem, Echo, LengthNormalization, LengthPenalty,
};
pub use admission::{Admission, LimitRule};
pub use buffer::Buffer;
pub use changes::Changes;
pub use error::ConfigError;
pub use training::*;

use crate::ids::{EnvironmentId, PolicyVersion};
use crate::time::Duration;
use serde::{Deserialize, Serialize};

/// Keys that are the same in the file of a run, in this state machine and in its journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunConfig {
    pub seed: u64,
    /// The run ends after this many steps. 0: nothing is trained, version 0 is evaluated.
    pub max_steps: u64,
    /// Rollouts per step. Groups are whole, so a step has more where their sizes do not add up to it.
    pub batch_size: u32,
    /// Tokens per step, in place of `batch_size`: all that is computed of the samples. Likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_batch_size: Option<u64>,
    /// Rollouts per example, where the environment has no number of its own.
    pub group_size: u32,
    /// Rollouts with which a group may be trained when the others are lost, 2 to `group_size`; `None`, or in a smaller
    /// group: all of them.
    pub min_group_size: Option<u32>,
    /// What becomes of a group that loses a rollout as stale.
    pub group_on_cancel: OnCancel,
    /// Longest micro-batch, tokens, and so the longest prompt and answer of a training rollout's turn. What becomes of a
    /// longer sample, `long_samples` says.
    pub seq_len: u32,
    pub data_ranks: u32,
    /// How many steps generation may run ahead of the trainer; 0 is synchronous.
    pub max_async_level: u64,
    /// Bound on staleness of trained samples and on the policies one rollout in flight may have seen.
    pub max_off_policy_steps: u64,
    /// The in-flight target is this many times `batch_size`; at least 1.
    pub oversampling_factor: f64,
    pub admission: Admission,
    pub trajectory_strategy: TrajectoryStrategy,
    pub truncated_rollouts: TruncatedRollouts,
    pub long_samples: LongSamples,
    /// What the policy learns from, where the environment does not say it itself.
    #[serde(default, skip_serializing_if = "TrainingMode::is_rl")]
    pub training_mode: TrainingMode,
    /// Tokens that samples of a group have in common are packed as a tree, to be computed once: the trainer can do so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared_prefixes: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    #[serde(flatten)]
    pub run: RunConfig,
    /// Batches kept for a trainer that has saved no checkpoint.
    pub spool_steps: u64,
    pub buffer: Buffer,
    /// Training environments first, then evaluation environments; an [`crate::EnvironmentId`] is an index here.
    pub environments: Vec<Environment>,
    /// Other servers answer every rollout of a run that only evaluates: no engine takes part.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_engines: bool,
    pub timeouts: Timeouts,
    /// Model shape for estimated FLOPs, by which micro-batches are balanced.
    pub flops: FlopsModel,
}

/// What a training environment may have of its own, under the names of the file of a run. Not looked at in an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EnvironmentConfig {
    /// How often a failed rollout is tried again before its group is dropped.
    pub max_retries: u32,
    /// Rollouts per example; `None`: the run's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// What the policy learns from its rollouts; `None`: as in the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training_mode: Option<TrainingMode>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// Unique among environments, appears in metrics and logs.
    pub name: String,
    pub role: Role,
    /// Relative share of training groups.
    pub ratio: f64,
    /// How its rewards become advantages. Not looked at in an evaluation.
    pub algorithm: Algorithm,
    #[serde(flatten)]
    pub own: EnvironmentConfig,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Train,
    Evaluate(Evaluation),
}

/// An evaluation runs at one pinned policy version: the next weight update waits until it has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Examples taken from the front of the environment's list; `None` is all.
    pub num_examples: Option<u32>,
    pub rollouts_per_example: u32,
    /// Every that many steps; `None` is only at the start and at the end.
    pub interval: Option<u64>,
    /// Evaluate version 0 before the first step.
    pub base_model: bool,
    /// A rollout with at least this reward has passed, for `pass@k`. The default is not serialised, so that runs from
    /// before this field resume.
    #[serde(
        default = "Evaluation::usual_threshold",
        skip_serializing_if = "Evaluation::is_usual_threshold"
    )]
    pub pass_threshold: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeouts {
    /// A rollout that has not ended this long after it was leased is cancelled and counts as failed.
    pub rollout: Duration,
    /// The same of single environments, in their order, where they have a shorter one of their own. Empty: none has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rollout_of: Vec<Option<Duration>>,
    /// A worker that sends nothing for this long has lost its leases.
    pub worker: Duration,
    /// Longest time a lease or batch request waits before it is answered with a reason.
    pub long_poll: Duration,
    /// An evaluation that has not ended by then is closed with what it has.
    pub evaluation: Duration,
    /// So is one that has measured nothing for this long, where training waits for it; `None`: that may last.
    #[serde(default)]
    pub evaluation_progress: Option<Duration>,
    /// A trainer that holds a batch and has not published its weights for this long is warned about, and again after
    /// the same span: the core waits on (a step may be long), but never in silence.
    pub weights: Duration,
    /// A group that the teacher has not scored so long after it was complete is dropped.
    #[serde(default = "Timeouts::default_teacher")]
    pub teacher: Duration,
}

impl Timeouts {
    fn default_teacher() -> Duration {
        Duration::from_secs(600)
    }
}

/// FLOPs of a forward and backward pass over one sequence of `n` tokens:
/// `linear * n + quadratic * n^2` (parameters' and attention's part).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FlopsModel {
    pub linear: f64,
    pub quadratic: f64,
}

impl Config {
    /// Groups in one batch, where all are of the run's size. Where it is of tokens: at least.
    pub fn groups_per_batch(&self) -> usize {
        let rollouts = match self.run.token_batch_size {
            None => u64::from(self.run.batch_size),
            Some(tokens) => tokens / u64::from(self.run.seq_len.max(1)),
        };
        (rollouts / u64::from(self.run.group_size)) as usize
    }

    /// How much a step holds: rollouts, or tokens.
    pub fn step_size(&self) -> u64 {
        self.run
            .token_batch_size
            .unwrap_or(u64::from(self.run.batch_size))
    }

    /// The largest group of any training environment.
    pub fn largest_group(&self) -> usize {
        let sizes = self.trained().map(|(id, _)| self.rollouts_per_group(id));
        sizes.max().unwrap_or(self.run.group_size as usize)
    }

    /// Rollouts of one example of an environment.
    pub fn rollouts_per_group(&self, id: EnvironmentId) -> usize {
        let environment = self.environment(id);
        match &environment.role {
            Role::Train => environment.own.group_size.unwrap_or(self.run.group_size) as usize,
            Role::Evaluate(evaluation) => evaluation.rollouts_per_example as usize,
        }
    }

    /// Rollouts with which a training group of the environment may be trained.
    pub fn min_group_size(&self, id: EnvironmentId) -> usize {
        let size = self.rollouts_per_group(id);
        let least = self.run.min_group_size.map(|least| least as usize);
        least.map_or(size, |least| least.min(size))
    }

    /// What the policy learns from rollouts of the environment.
    pub fn training_mode(&self, id: EnvironmentId) -> TrainingMode {
        self.environment(id)
            .own
            .training_mode
            .unwrap_or(self.run.training_mode)
    }

    /// The training environments, in the order of the config.
    pub fn trained(&self) -> impl Iterator<Item = (EnvironmentId, &Environment)> {
        self.environment_ids()
            .filter(|(_, environment)| environment.role == Role::Train)
    }

    /// Whether training environments learn from different things.
    pub fn mixes_modes(&self) -> bool {
        let mut modes = self.trained().map(|(id, _)| self.training_mode(id));
        let first = modes.next();
        modes.any(|mode| Some(mode) != first)
    }

    /// Whether what some environment says is learnt.
    pub fn echoes(&self) -> bool {
        let mut trained = self.trained();
        trained.any(|(_, environment)| environment.algorithm.echo.is_some())
    }

    /// Most rollouts in flight at once, whatever the engines could take. Where a step is of tokens, no more than may be
    /// begun for its steps are.
    pub fn max_in_flight(&self) -> usize {
        if self.run.token_batch_size.is_some() {
            return u32::MAX as usize;
        }
        (self.run.oversampling_factor * f64::from(self.run.batch_size)).floor() as usize
    }

    /// The environment with this id.
    ///
    /// # Panics
    /// If the id is not an index into `environments`.
    pub fn environment(&self, id: EnvironmentId) -> &Environment {
        &self.environments[id.0 as usize]
    }

    /// Ids and definitions of all environments, in the order of the config.
    pub fn environment_ids(&self) -> impl Iterator<Item = (EnvironmentId, &Environment)> {
        self.environments
            .iter()
            .enumerate()
            .map(|(index, environment)| (EnvironmentId(index as u32), environment))
    }

    /// Nothing is trained: the one version that there is is evaluated.
    pub fn only_evaluates(&self) -> bool {
        self.run.max_steps == 0
    }

    /// From a rollout's lease to its deadline.
    pub fn rollout_span(&self, environment: EnvironmentId) -> Duration {
        let own = self.timeouts.rollout_of.get(environment.0 as usize);
        let longest = self.timeouts.rollout;
        own.copied()
            .flatten()
            .map_or(longest, |own| own.min(longest))
    }
}

impl Evaluation {
    /// A full reward, where rewards are from 0 to 1.
    pub fn usual_threshold() -> f64 {
        1.0
    }

    fn is_usual_threshold(threshold: &f64) -> bool {
        *threshold == Evaluation::usual_threshold()
    }

    /// Whether `version` is evaluated, in a run of `max_steps`.
    pub fn is_due(&self, version: PolicyVersion, max_steps: u64) -> bool {
        let PolicyVersion(version) = version;
        let interval_due = self
            .interval
            .is_some_and(|interval| version > 0 && version % interval == 0);
        (version == 0 && self.base_model) || interval_due || version == max_steps
    }
}

#[cfg(test)]
mod tests;
