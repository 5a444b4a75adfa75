//! Checks of a config before the run.

use super::{Admission, Algorithm, Buffer, Config, ConfigError, Environment, FlopsModel, Role};
use std::collections::BTreeSet;

impl Config {
    /// What does not go together. That each number alone is one that a run can have is the caller's to check: the classes
    /// in `python/primerl/config/schema` have the bounds.
    ///
    /// # Errors
    /// The first field found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_groups()?;
        self.validate_staleness()?;
        self.buffer.validate()?;
        self.run.admission.validate()?;
        self.validate_environments()?;
        self.flops.validate()
    }

    fn validate_groups(&self) -> Result<(), ConfigError> {
        let filters = self.buffer.online_difficulty_filtering;
        let taught = |id| !self.training_mode(id).is_rl();
        let mut trained = self.trained();
        if filters && !self.only_evaluates() && trained.all(|(id, _)| taught(id)) {
            let mode = self.run.training_mode;
            return Err(ConfigError::FilteredTeaching { mode });
        }
        for (id, environment) in self.trained() {
            if taught(id) || self.rollouts_per_group(id) > 1 {
                continue;
            }
            let kind = &environment.algorithm.kind;
            let key = || match environment.own.group_size {
                Some(_) => format!("{}.group_size", environment.key()),
                None => "group_size".to_owned(),
            };
            if kind.is_relative() {
                return Err(ConfigError::GroupOfOne { key: key() });
            }
            if filters && !kind.learns_alone() {
                return Err(ConfigError::FilteredGroupOfOne { key: key() });
            }
        }
        self.validate_whole_groups()
    }

    /// A batch is whole groups: where all have one size, a multiple of it.
    fn validate_whole_groups(&self) -> Result<(), ConfigError> {
        if self.run.token_batch_size.is_some() {
            return self.validate_min_group_size(self.largest_group() as u32);
        }
        let own = |environment: &Environment| environment.own.group_size;
        let batch_size = self.run.batch_size;
        let sizes: BTreeSet<u32> = self
            .trained()
            .map(|(_, environment)| own(environment).unwrap_or(self.run.group_size))
            .collect();
        let group_size = sizes.last().copied().unwrap_or(self.run.group_size);
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
            .run
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
            (self.run.max_off_policy_steps, self.run.max_async_level);
        if max_off_policy_steps < max_async_level {
            return Err(ConfigError::AsyncBeyondOffPolicy {
                max_off_policy_steps,
                max_async_level,
            });
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
            let mut same = self.environments.iter().filter(|other| other.name == name);
            let count = same.clone().count();
            if let Some(last) = same.next_back().filter(|_| count > 1) {
                let key = last.key();
                return Err(ConfigError::DuplicateEnvironment { name, count, key });
            }
            match &environment.role {
                Role::Train if evaluation_seen => {
                    return Err(ConfigError::EnvironmentOrder { index, name });
                }
                Role::Train => environment.algorithm.validate(&name)?,
                Role::Evaluate(_) => evaluation_seen = true,
            }
        }
        self.validate_purpose()
    }

    /// Something is trained or evaluated.
    fn validate_purpose(&self) -> Result<(), ConfigError> {
        let mut roles = self.environments.iter().map(|own| &own.role);
        match (roles.any(|role| *role == Role::Train), self.run.max_steps) {
            (true, 0) => Err(ConfigError::NothingIsTrained),
            (false, 1..) => Err(ConfigError::NoTrainingEnvironment),
            (false, 0) if self.environments.is_empty() => Err(ConfigError::NothingToEvaluate),
            _ => Ok(()),
        }
    }
}

impl Environment {
    /// As the file of a run has it, but by its name.
    fn key(&self) -> String {
        let list = match self.role {
            Role::Train => "train.env",
            Role::Evaluate(_) => "eval.env",
        };
        format!("{list}.{}", self.name)
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

impl Algorithm {
    /// `name` is the environment's.
    fn validate(&self, name: &str) -> Result<(), ConfigError> {
        match self.problem() {
            None => Ok(()),
            Some(problem) => Err(ConfigError::Algorithm {
                name: name.to_owned(),
                problem,
            }),
        }
    }
}

impl Admission {
    fn validate(&self) -> Result<(), ConfigError> {
        let start = self.start_per_engine;
        if self.min_per_engine <= start && start <= self.max_per_engine {
            return Ok(());
        }
        Err(ConfigError::Admission {
            start,
            min: self.min_per_engine,
            max: self.max_per_engine,
        })
    }
}

impl Buffer {
    fn validate(&self) -> Result<(), ConfigError> {
        let (hard, easy) = (self.hard_threshold, self.easy_threshold);
        if hard >= easy {
            return Err(ConfigError::Thresholds { hard, easy });
        }
        Ok(())
    }
}
