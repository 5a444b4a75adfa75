//! What a run is told. Checked once, by [`Config::validate`], before a [`crate::Core`] is made.

mod admission;
mod buffer;
mod changes;
mod training;

pub use admission::{Admission, LimitRule};
pub use buffer::Buffer;
pub use changes::Changes;
pub use training::*;

use crate::group::OnCancel;
use crate::ids::{EnvironmentId, PolicyVersion};
use crate::time::Duration;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    pub seed: u64,
    /// The run ends after this many steps. 0: nothing is trained, version 0 is evaluated.
    pub max_steps: u64,
    /// Rollouts per step, a multiple of `group_size`.
    pub batch_size: u32,
    /// Rollouts per example.
    pub group_size: u32,
    /// Rollouts with which a group may be trained when the others are lost, 2 to `group_size`; `None`: all of them.
    pub min_group_size: Option<u32>,
    /// What becomes of a group that loses a rollout as stale.
    pub group_on_cancel: OnCancel,
    /// Longest micro-batch, tokens. What becomes of a longer sample, `long_samples` says.
    pub seq_len: u32,
    pub data_ranks: u32,
    /// How many steps generation may run ahead of the trainer; 0 is synchronous.
    pub max_async_level: u64,
    /// Bound on staleness of trained samples and on the policies one rollout in flight may have seen.
    pub max_off_policy_steps: u64,
    /// The in-flight target is this many times `batch_size`; at least 1.
    pub oversampling_factor: f64,
    /// Batches kept for a trainer that has saved no checkpoint.
    pub spool_steps: u64,
    pub admission: Admission,
    pub buffer: Buffer,
    pub trajectory_strategy: TrajectoryStrategy,
    pub truncated_rollouts: TruncatedRollouts,
    pub long_samples: LongSamples,
    #[serde(default, skip_serializing_if = "TrainingMode::is_rl")]
    pub training_mode: TrainingMode,
    /// Training environments first, then evaluation environments; an [`crate::EnvironmentId`] is an index here.
    pub environments: Vec<Environment>,
    /// Other servers answer every rollout of a run that only evaluates: no engine takes part.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_engines: bool,
    pub timeouts: Timeouts,
    /// Model shape for estimated FLOPs, by which micro-batches are balanced.
    pub flops: FlopsModel,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// Unique among environments, appears in metrics and logs.
    pub name: String,
    pub role: Role,
    /// Relative share of training groups.
    pub ratio: f64,
    /// How often a failed rollout is tried again before its group is dropped.
    pub max_retries: u32,
    /// How its rewards become advantages. Not looked at in an evaluation.
    pub algorithm: Algorithm,
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
    /// A rollout with at least this reward has passed, for `pass@k`. What is usual is left out: runs of before it go on.
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
    /// A worker that was not heard of for this long has lost its leases.
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

/// More says nothing that this does not, and would leave no room to count beyond it.
const MOST_STEPS_APART: u64 = 1_000_000;

/// What is wrong with a [`Config`]; each message names the field and what to do about it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("{field} is 0: set it to at least 1")]
    Zero { field: &'static str },
    #[error(
        "batch_size = {batch_size} is not a multiple of group_size = {group_size}: \
         a batch holds whole groups; set batch_size to {lower} or {upper}"
    )]
    BatchNotWholeGroups {
        batch_size: u32,
        group_size: u32,
        lower: u32,
        upper: u32,
    },
    #[error("environment {name:?}: algorithm.{field} {problem}")]
    Algorithm {
        name: String,
        field: &'static str,
        problem: &'static str,
    },
    #[error(
        "group_size = 1: an advantage compares a rollout with the others of its group, and alone it is always 0; \
         set group_size to at least 2"
    )]
    GroupOfOne,
    #[error(
        "group_size = 1 with buffer.online_difficulty_filtering: a reward alone is always equal to itself, so every group \
         would be left out; set group_size to at least 2, or filtering to false"
    )]
    FilteredGroupOfOne,
    #[error(
        "buffer.online_difficulty_filtering leaves out groups whose rewards are all equal, and training_mode = {mode:?} \
         learns from a teacher, not from rewards: set it to false"
    )]
    FilteredTeaching { mode: TrainingMode },
    #[error("{field} = {value} is more than {most}; lower it")]
    TooLarge {
        field: &'static str,
        value: u64,
        most: u64,
    },
    #[error(
        "max_off_policy_steps = {max_off_policy_steps} is below max_async_level = {max_async_level}: \
         rollouts would be generated only to be voided as stale; raise the first or lower the second"
    )]
    AsyncBeyondOffPolicy {
        max_off_policy_steps: u64,
        max_async_level: u64,
    },
    #[error(
        "min_group_size = {min_group_size} must be at least 2 (an advantage compares rollouts) and at most \
         group_size = {group_size}; leave it out to train whole groups only"
    )]
    MinGroupSize {
        min_group_size: u32,
        group_size: u32,
    },
    #[error("admission.{field} = {value}: {mend}")]
    Admission {
        field: &'static str,
        value: f64,
        mend: &'static str,
    },
    #[error("oversampling_factor = {value} must be a finite number of at least 1")]
    Oversampling { value: f64 },
    #[error("buffer.{field} = {value} must be a finite number")]
    Threshold { field: &'static str, value: f64 },
    #[error(
        "buffer.hard_threshold = {hard} is not below buffer.easy_threshold = {easy}: \
         an example would be both; lower the first or raise the second"
    )]
    Thresholds { hard: f64, easy: f64 },
    #[error("buffer.{field} = {value} must be from 0 (never drawn) to 1 (drawn like a normal one)")]
    Fraction { field: &'static str, value: f64 },
    #[error(
        "environments: there is no training environment; add at least one, or set max_steps to 0 to evaluate only"
    )]
    NoTrainingEnvironment,
    #[error("max_steps is 0, and there is nothing to evaluate; add an evaluation environment")]
    NothingToEvaluate,
    #[error(
        "max_steps is 0, which is for a run that only evaluates, but there are training environments; set it to at \
         least 1, or leave them out"
    )]
    NothingIsTrained,
    #[error(
        "environments: {name:?} is used {count} times; metrics and logs go by name, give each environment its own"
    )]
    DuplicateEnvironment { name: String, count: usize },
    #[error("environments[{index}].name is empty; give it a name")]
    UnnamedEnvironment { index: usize },
    #[error(
        "environments[{index}] ({name:?}) trains but comes after an evaluation environment; list training environments first"
    )]
    EnvironmentOrder { index: usize, name: String },
    #[error(
        "environment {name:?}: ratio = {ratio} (its own, or of buffer.env_ratios) must be a finite number above 0; \
         leave the environment out to not use it"
    )]
    Ratio { name: String, ratio: f64 },
    #[error("environment {name:?}: pass_threshold = {value} must be a finite number")]
    PassThreshold { name: String, value: f64 },
    #[error("environment {name:?}: {field} is 0; set it to at least 1 or leave it out")]
    ZeroInEnvironment { name: String, field: &'static str },
    #[error(
        "flops.{field} = {value} must be a finite number of at least 0, and one of the two above 0"
    )]
    Flops { field: &'static str, value: f64 },
}

impl Config {
    /// Everything that can be known to be wrong before the run.
    ///
    /// # Errors
    /// The first field found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_sizes()?;
        self.buffer.validate()?;
        self.admission.validate()?;
        self.validate_environments()?;
        self.validate_timeouts()?;
        for (field, value) in [
            ("linear", self.flops.linear),
            ("quadratic", self.flops.quadratic),
        ] {
            if !value.is_finite() || value < 0.0 {
                return Err(ConfigError::Flops { field, value });
            }
        }
        if self.flops.linear + self.flops.quadratic <= 0.0 {
            return Err(ConfigError::Flops {
                field: "linear",
                value: self.flops.linear,
            });
        }
        Ok(())
    }

    /// Whole groups in one batch.
    pub fn groups_per_batch(&self) -> usize {
        (self.batch_size / self.group_size) as usize
    }

    /// Rollouts of one example of an environment.
    pub fn rollouts_per_group(&self, id: EnvironmentId) -> usize {
        match &self.environment(id).role {
            Role::Train => self.group_size as usize,
            Role::Evaluate(evaluation) => evaluation.rollouts_per_example as usize,
        }
    }

    /// Rollouts with which a group may be trained.
    pub fn min_group_size(&self) -> usize {
        self.min_group_size.unwrap_or(self.group_size) as usize
    }

    /// Most rollouts in flight at once, whatever the engines could take.
    pub fn max_in_flight(&self) -> usize {
        (self.oversampling_factor * f64::from(self.batch_size)).floor() as usize
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

    fn validate_sizes(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("batch_size", u64::from(self.batch_size)),
            ("group_size", u64::from(self.group_size)),
            ("seq_len", u64::from(self.seq_len)),
            ("data_ranks", u64::from(self.data_ranks)),
            ("spool_steps", self.spool_steps),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero { field });
        }
        let relative = |environment: &Environment| {
            environment.role == Role::Train && environment.algorithm.kind.is_relative()
        };
        if !self.training_mode.is_rl() && self.buffer.online_difficulty_filtering {
            let mode = self.training_mode;
            return Err(ConfigError::FilteredTeaching { mode });
        }
        if self.group_size == 1
            && self.training_mode.is_rl()
            && self.environments.iter().any(relative)
        {
            return Err(ConfigError::GroupOfOne);
        }
        if self.group_size == 1 && self.buffer.online_difficulty_filtering {
            return Err(ConfigError::FilteredGroupOfOne);
        }
        let (batch_size, group_size) = (self.batch_size, self.group_size);
        if batch_size % group_size != 0 {
            let whole = batch_size / group_size;
            let lower = (whole.max(1)).saturating_mul(group_size);
            let upper = (whole.max(1) + 1).saturating_mul(group_size);
            return Err(ConfigError::BatchNotWholeGroups {
                batch_size,
                group_size,
                lower,
                upper,
            });
        }
        if let Some(min_group_size) = self
            .min_group_size
            .filter(|size| !(2..=group_size).contains(size))
        {
            return Err(ConfigError::MinGroupSize {
                min_group_size,
                group_size,
            });
        }
        let (max_off_policy_steps, max_async_level) =
            (self.max_off_policy_steps, self.max_async_level);
        for (field, value) in [
            ("max_async_level", max_async_level),
            ("max_off_policy_steps", max_off_policy_steps),
        ] {
            if value > MOST_STEPS_APART {
                let most = MOST_STEPS_APART;
                return Err(ConfigError::TooLarge { field, value, most });
            }
        }
        if max_off_policy_steps < max_async_level {
            return Err(ConfigError::AsyncBeyondOffPolicy {
                max_off_policy_steps,
                max_async_level,
            });
        }
        let value = self.oversampling_factor;
        if !value.is_finite() || value < 1.0 {
            return Err(ConfigError::Oversampling { value });
        }
        Ok(())
    }

    fn validate_environments(&self) -> Result<(), ConfigError> {
        let mut evaluation_seen = false;
        for (index, environment) in self.environments.iter().enumerate() {
            let name = environment.name.clone();
            if name.is_empty() {
                return Err(ConfigError::UnnamedEnvironment { index });
            }
            let count = self
                .environments
                .iter()
                .filter(|other| other.name == name)
                .count();
            if count > 1 {
                return Err(ConfigError::DuplicateEnvironment { name, count });
            }
            match &environment.role {
                Role::Train if evaluation_seen => {
                    return Err(ConfigError::EnvironmentOrder { index, name });
                }
                Role::Train if !environment.ratio.is_finite() || environment.ratio <= 0.0 => {
                    return Err(ConfigError::Ratio {
                        name,
                        ratio: environment.ratio,
                    });
                }
                Role::Train => environment.algorithm.validate(&name)?,
                Role::Evaluate(evaluation) => {
                    evaluation_seen = true;
                    evaluation.validate(&name)?;
                }
            }
        }
        let mut roles = self.environments.iter().map(|own| &own.role);
        match (roles.any(|role| *role == Role::Train), self.max_steps) {
            (true, 0) => Err(ConfigError::NothingIsTrained),
            (false, 1..) => Err(ConfigError::NoTrainingEnvironment),
            (false, 0) if self.environments.is_empty() => Err(ConfigError::NothingToEvaluate),
            _ => Ok(()),
        }
    }

    /// Nothing is trained: the one version that there is is evaluated.
    pub fn only_evaluates(&self) -> bool {
        self.max_steps == 0
    }

    /// From a rollout's lease to its deadline.
    pub fn rollout_span(&self, environment: EnvironmentId) -> Duration {
        let own = self.timeouts.rollout_of.get(environment.0 as usize);
        let longest = self.timeouts.rollout;
        own.copied()
            .flatten()
            .map_or(longest, |own| own.min(longest))
    }

    fn validate_timeouts(&self) -> Result<(), ConfigError> {
        if self.timeouts.rollout_of.contains(&Some(Duration(0))) {
            let field = "timeouts.rollout_of";
            return Err(ConfigError::Zero { field });
        }
        let timeouts = [
            ("timeouts.rollout", self.timeouts.rollout),
            ("timeouts.worker", self.timeouts.worker),
            ("timeouts.long_poll", self.timeouts.long_poll),
            ("timeouts.evaluation", self.timeouts.evaluation),
            (
                "timeouts.evaluation_progress",
                self.timeouts.evaluation_progress.unwrap_or(Duration(1)),
            ),
            ("timeouts.weights", self.timeouts.weights),
            ("timeouts.teacher", self.timeouts.teacher),
        ];
        match timeouts.into_iter().find(|(_, span)| span.0 == 0) {
            Some((field, _)) => Err(ConfigError::Zero { field }),
            None => Ok(()),
        }
    }
}

impl Evaluation {
    fn validate(&self, name: &str) -> Result<(), ConfigError> {
        let zero = |field| {
            Err(ConfigError::ZeroInEnvironment {
                name: name.to_owned(),
                field,
            })
        };
        match self {
            Evaluation {
                num_examples: Some(0),
                ..
            } => zero("num_examples"),
            Evaluation {
                rollouts_per_example: 0,
                ..
            } => zero("rollouts_per_example"),
            Evaluation {
                interval: Some(0), ..
            } => zero("interval"),
            Evaluation { pass_threshold, .. } if !pass_threshold.is_finite() => {
                Err(ConfigError::PassThreshold {
                    name: name.to_owned(),
                    value: *pass_threshold,
                })
            }
            _ => Ok(()),
        }
    }

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
