//! Which part of a run's config may change at a later start.

use super::{Config, Role, Timeouts};
use crate::ids::EnvironmentId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The new values of all that may change: when and for how long, never what is trained or measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    pub max_steps: u64,
    pub timeouts: Timeouts,
    /// How often each environment is evaluated; those that are not named stay as they are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub intervals: BTreeMap<EnvironmentId, Option<u64>>,
    /// In a run that only evaluates, rollouts at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// How samples are packed changes what is computed, not what is trained. `None`: as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_prefixes: Option<bool>,
}

impl Changes {
    /// From a run's config to that of its next start; `None` where all is as it was.
    pub fn between(before: &Config, now: &Config) -> Option<Changes> {
        let of = |config: &Config| Changes {
            max_steps: config.run.max_steps,
            timeouts: config.timeouts.clone(),
            intervals: config
                .environment_ids()
                .filter_map(|(id, environment)| match &environment.role {
                    Role::Evaluate(evaluation) => Some((id, evaluation.interval)),
                    Role::Train => None,
                })
                .collect(),
            batch_size: config.only_evaluates().then_some(config.run.batch_size),
            shared_prefixes: Some(config.run.shared_prefixes),
        };
        let (before, now) = (of(before), of(now));
        (before != now).then_some(now)
    }

    /// Takes over all but the steps and the timeouts, on which more depends.
    pub(crate) fn apply(&self, config: &mut Config) {
        for (id, interval) in &self.intervals {
            if let Some(environment) = config.environments.get_mut(id.0 as usize)
                && let Role::Evaluate(evaluation) = &mut environment.role
            {
                evaluation.interval = *interval;
            }
        }
        if let Some(shared_prefixes) = self.shared_prefixes {
            config.run.shared_prefixes = shared_prefixes;
        }
        if let (Some(batch_size), true) = (self.batch_size, config.only_evaluates()) {
            config.run.batch_size = batch_size;
        }
    }
}
