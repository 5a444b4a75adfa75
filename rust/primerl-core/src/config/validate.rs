//! Checks of a config before the run.

use super::{Config, ConfigError, Environment, Evaluation, FlopsModel, Role};
use crate::time::Duration;
use std::collections::BTreeSet;

/// More says nothing that this does not, and would leave no room to count beyond it.
const MOST_STEPS_APART: u64 = 1_000_000;

impl Config {
    /// Everything that can be known to be wrong before the run.
    ///
    /// # Errors
    /// The first field found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_sizes()?;
        self.validate_groups()?;
        self.validate_staleness()?;
        self.buffer.validate()?;
        self.admission.validate()?;
        self.validate_environments()?;
        self.validate_timeouts()?;
        self.flops.validate()
    }

    fn validate_sizes(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("batch_size", u64::from(self.batch_size)),
            ("token_batch_size", self.token_batch_size.unwrap_or(1)),
            ("group_size", u64::from(self.group_size)),
            ("seq_len", u64::from(self.seq_len)),
            ("data_ranks", u64::from(self.data_ranks)),
            ("spool_steps", self.spool_steps),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero { field });
        }
        let mut empty = self.environments.iter();
        match empty.find(|environment| environment.group_size == Some(0)) {
            Some(environment) => Err(ConfigError::EmptyGroups {
                name: environment.name.clone(),
            }),
            None => Ok(()),
        }
    }

    fn validate_groups(&self) -> Result<(), ConfigError> {
        let filters = self.buffer.online_difficulty_filtering;
        let taught = |id| !self.training_mode(id).is_rl();
        let mut trained = self.trained();
        if filters && !self.only_evaluates() && trained.all(|(id, _)| taught(id)) {
            let mode = self.training_mode;
            return Err(ConfigError::FilteredTeaching { mode });
        }
        for (id, environment) in self.trained() {
            if taught(id) || self.rollouts_per_group(id) > 1 {
                continue;
            }
            let kind = &environment.algorithm.kind;
            if kind.is_relative() {
                return Err(ConfigError::GroupOfOne);
            }
            if filters && !kind.learns_alone() {
                return Err(ConfigError::FilteredGroupOfOne);
            }
        }
        self.validate_whole_groups()
    }

    /// A batch is whole groups: where all have one size, a multiple of it.
    fn validate_whole_groups(&self) -> Result<(), ConfigError> {
        if self.token_batch_size.is_some() {
            return self.validate_min_group_size(self.largest_group() as u32);
        }
        let own = |environment: &Environment| environment.group_size;
        let batch_size = self.batch_size;
        let sizes: BTreeSet<u32> = self
            .trained()
            .map(|(_, environment)| own(environment).unwrap_or(self.group_size))
            .collect();
        let group_size = sizes.last().copied().unwrap_or(self.group_size);
        if sizes.len() > 1 && batch_size < group_size {
            return Err(ConfigError::BatchBelowGroup {
                batch_size,
                group_size,
            });
        }
        if sizes.len() <= 1 && !batch_size.is_multiple_of(group_size) {
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
        self.validate_min_group_size(group_size)
    }

    fn validate_min_group_size(&self, group_size: u32) -> Result<(), ConfigError> {
        if let Some(min_group_size) = self
            .min_group_size
            .filter(|size| !(2..=group_size).contains(size))
        {
            return Err(ConfigError::MinGroupSize {
                min_group_size,
                group_size,
            });
        }
        Ok(())
    }

    fn validate_staleness(&self) -> Result<(), ConfigError> {
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

impl FlopsModel {
    fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [("linear", self.linear), ("quadratic", self.quadratic)] {
            if !value.is_finite() || value < 0.0 {
                return Err(ConfigError::Flops { field, value });
            }
        }
        if self.linear + self.quadratic <= 0.0 {
            return Err(ConfigError::Flops {
                field: "linear",
                value: self.linear,
            });
        }
        Ok(())
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
}
