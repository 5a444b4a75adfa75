//! What is wrong with a config.

use super::{AlgorithmProblem, TrainingMode};

/// What is wrong with a [`super::Config`]; each message names the field and what to do about it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
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
    #[error(
        "batch_size = {batch_size} is less than the largest group_size = {group_size}: a batch holds whole groups; raise \
         the first or lower the second"
    )]
    BatchBelowGroup { batch_size: u32, group_size: u32 },
    #[error("environment {name:?}: algorithm.{}", .problem)]
    Algorithm {
        name: String,
        problem: AlgorithmProblem,
    },
    #[error(
        "group_size = 1: an advantage compares a rollout with the others of its group, and alone it is always 0; \
         set group_size to at least 2"
    )]
    GroupOfOne { key: String },
    #[error(
        "group_size = 1 with buffer.online_difficulty_filtering: a reward alone is always equal to itself, so every group \
         would be filtered; set group_size to at least 2, or filtering to false"
    )]
    FilteredGroupOfOne { key: String },
    #[error(
        "buffer.online_difficulty_filtering drops groups whose rewards are all equal, and training_mode = {mode:?} \
         learns from a teacher, not from rewards: set it to false"
    )]
    FilteredTeaching { mode: TrainingMode },
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
         group_size = {group_size}; omit it to train whole groups only"
    )]
    MinGroupSize {
        min_group_size: u32,
        group_size: u32,
    },
    #[error(
        "admission.start_per_engine = {start} is not between admission.min_per_engine = {min} and \
         admission.max_per_engine = {max}; move one of them"
    )]
    Admission { start: u32, min: u32, max: u32 },
    #[error(
        "buffer.hard_threshold = {hard} is not below buffer.easy_threshold = {easy}: \
         an example would be both; lower the first or raise the second"
    )]
    Thresholds { hard: f64, easy: f64 },
    #[error(
        "environments: there is no training environment; add at least one, or set max_steps to 0 to evaluate only"
    )]
    NoTrainingEnvironment,
    #[error("max_steps is 0, and there is nothing to evaluate; add an evaluation environment")]
    NothingToEvaluate,
    #[error(
        "max_steps is 0, which is for a run that only evaluates, but there are training environments; set it to at \
         least 1, or omit them"
    )]
    NothingIsTrained,
    #[error(
        "environments: {name:?} is used {count} times; metrics and logs go by name, give each environment its own"
    )]
    DuplicateEnvironment {
        name: String,
        count: usize,
        key: String,
    },
    #[error("environments[{index}].name is empty; give it a name")]
    UnnamedEnvironment { index: usize },
    #[error(
        "environments[{index}] ({name:?}) trains but comes after an evaluation environment; list training environments first"
    )]
    EnvironmentOrder { index: usize, name: String },
    #[error(
        "flops.{field} = {value} must be a finite number of at least 0, and one of the two above 0"
    )]
    Flops { field: &'static str, value: f64 },
}

impl ConfigError {
    /// The key to change first.
    pub fn key(&self) -> &str {
        match self {
            ConfigError::BatchNotWholeGroups { .. } | ConfigError::BatchBelowGroup { .. } => {
                "batch_size"
            }
            ConfigError::Algorithm { .. } => "algorithm",
            ConfigError::GroupOfOne { key }
            | ConfigError::FilteredGroupOfOne { key }
            | ConfigError::DuplicateEnvironment { key, .. } => key,
            ConfigError::FilteredTeaching { .. } => "buffer.online_difficulty_filtering",
            ConfigError::AsyncBeyondOffPolicy { .. } => "max_off_policy_steps",
            ConfigError::MinGroupSize { .. } => "min_group_size",
            ConfigError::Admission { .. } => "admission.start_per_engine",
            ConfigError::Thresholds { .. } => "buffer.hard_threshold",
            ConfigError::NothingToEvaluate | ConfigError::NothingIsTrained => "max_steps",
            ConfigError::NoTrainingEnvironment => "train.env",
            ConfigError::UnnamedEnvironment { .. } | ConfigError::EnvironmentOrder { .. } => {
                "environments"
            }
            ConfigError::Flops { .. } => "flops",
        }
    }
}
