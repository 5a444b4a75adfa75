//! What is not drawn for a while, or for good: environments whose groups all fail, and examples whose prompts do not fit
//! into the context.
//!
//! An environment that fails may do so for a reason that passes (a judge that is away), so it is tried again, with one group
//! at a time: after a minute, then after twice as long, up to an hour. The others continue meanwhile, in their own
//! ratios. The run ends when none of them is left.

use crate::Core;
use crate::counters::VoidReason;
use crate::deadlines::Due;
use crate::ids::*;
use crate::time::{Duration, Time};
use serde::{Deserialize, Serialize};

const FIRST_REST: Duration = Duration::from_secs(60);
const LONGEST_REST: Duration = Duration::from_secs(3600);

/// So many dropped groups in a row end the run, or a whole batch of them where that is more.
const FAILED_GROUPS_AT_LEAST: u32 = 8;

/// So many groups in a row with prompts that are too long, or four batches where that is more, make the environment
/// rest.
const TOO_LONG_AT_LEAST: u32 = 64;

/// An environment that rests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Rest {
    /// When a group of it may be begun.
    until: Time,
    span: Duration,
    /// The one that was begun.
    trying: Option<GroupId>,
    why: String,
}

impl Rest {
    /// Whether a group may be begun to try the environment again.
    pub fn is_due(&self, now: Time) -> bool {
        self.until <= now && self.trying.is_none()
    }
}

impl Core {
    /// Why nothing, or next to nothing, of a training environment is begun.
    pub(crate) fn why_it_rests(&self, environment: EnvironmentId) -> Option<String> {
        if self.curriculum.is_exhausted(environment) {
            return Some(format!(
                "the first prompt of every example is longer than the context; {FITS}"
            ));
        }
        let rest = self.environments[environment].rest.as_ref()?;
        Some(rest.why.clone())
    }

    /// A group was begun.
    pub(crate) fn tries(&mut self, environment: EnvironmentId, group: GroupId) {
        if let Some(rest) = &mut self.environments[environment].rest {
            rest.trying = Some(group);
        }
    }

    /// Whether this is the group by which an environment that rests is tried.
    pub(crate) fn was_tried(&self, environment: EnvironmentId, group: GroupId) -> bool {
        let rest = &self.environments[environment].rest;
        rest.as_ref().is_some_and(|rest| rest.trying == Some(group))
    }

    /// A group has ended without showing whether its environment works.
    pub(crate) fn tried_in_vain(&mut self, environment: EnvironmentId, group: GroupId) {
        let rest = &mut self.environments[environment].rest;
        if let Some(rest) = rest.as_mut().filter(|rest| rest.trying == Some(group)) {
            rest.trying = None;
        }
    }

    /// A group of the environment was completed.
    pub(crate) fn goes_well(&mut self, environment: EnvironmentId) {
        let state = &mut self.environments[environment];
        state.failed_groups = 0;
        state.too_long_groups = 0;
        if let Some(rest) = state.rest.take() {
            self.deadlines.clear(rest.until, Due::Rest(environment));
            let name = self.name(environment).to_owned();
            self.warn(format!(
                "environment {name:?} is used again: a group of it was completed"
            ));
        }
    }

    /// Drops a group that failed. An environment whose groups all fail rests, and where no other is left, the run ends:
    /// replacing its groups for ever would be a hang with a busy machine.
    pub(crate) fn drop_failed_group(
        &mut self,
        id: GroupId,
        environment: EnvironmentId,
        finished_as: VoidReason,
        why: &str,
    ) {
        let was_tried = self.was_tried(environment, id);
        self.drop_group(id, finished_as, why);
        let state = &mut self.environments[environment];
        state.failed_groups += 1;
        let failed = state.failed_groups;
        let groups_per_batch = self.config.groups_per_batch() as u32;
        if failed >= groups_per_batch.max(FAILED_GROUPS_AT_LEAST) {
            let why = format!(
                "the last {failed} groups were dropped and none was completed; the last because {why}"
            );
            self.rest_environment(environment, why, was_tried);
        }
    }

    /// The run was started again, it may be with a longer context, or with what was away.
    pub(crate) fn end_rests(&mut self) {
        self.signals.at = self.now;
        for environment in self.environments.ids() {
            let state = &mut self.environments[environment];
            state.too_long_groups = 0;
            if let Some(rest) = state.rest.take() {
                self.deadlines.clear(rest.until, Due::Rest(environment));
                state.failed_groups = 0;
            }
        }
        self.curriculum.end_rests(&self.config);
    }

    /// An environment fails: it rests, or the run ends, where all the others do. `was_tried`: it rested, and was
    /// tried again.
    pub(crate) fn rest_environment(
        &mut self,
        environment: EnvironmentId,
        why: String,
        was_tried: bool,
    ) {
        let state = &mut self.environments[environment];
        let before = state.rest.as_ref().map(|rest| (rest.until, rest.span));
        if before.is_some() && !was_tried {
            // Begun before it rested.
            return;
        }
        if let Some((until, _)) = before {
            self.deadlines.clear(until, Due::Rest(environment));
        }
        let span = before.map_or(FIRST_REST, |(_, span)| {
            Duration((span.0 * 2).min(LONGEST_REST.0))
        });
        let until = self.now + span;
        self.environments[environment].rest = Some(Rest {
            until,
            span,
            trying: None,
            why: why.clone(),
        });
        if self.end_without_environments() {
            return;
        }
        self.deadlines.set(until, Due::Rest(environment));
        let (name, seconds) = (self.name(environment).to_owned(), span.as_secs_f64());
        self.warn(format!(
            "environment {name:?} rests for {seconds:.0} s, and the others continue without it: {why}; then one group of it \
             is tried"
        ));
    }

    /// Ends the run where no training environment is left.
    fn end_without_environments(&mut self) -> bool {
        let resting: Option<Vec<String>> = self
            .training_environments()
            .map(|id| {
                let why = self.why_it_rests(id)?;
                Some(format!("environment {:?}: {why}", self.name(id)))
            })
            .collect();
        let Some(resting) = resting else {
            return false;
        };
        self.ending.hopeless = Some(resting.join("; "));
        true
    }

    /// The first prompt of an example is longer than the context, and always will be: its group is dropped, and it is drawn
    /// no more.
    pub(crate) fn rest_example(
        &mut self,
        environment: EnvironmentId,
        example: ExampleIndex,
        group: GroupId,
        (slot, rollout): (usize, RolloutId),
        why: &str,
    ) {
        let Some(live) = self.groups.live.get_mut(&group) else {
            return;
        };
        live.fail(slot, rollout, 0);
        live.give_up(slot);
        self.tally.discards.slots_lost += 1;
        let was_tried = self.was_tried(environment, group);
        self.drop_quietly(group, VoidReason::GroupDropped, why);
        let resting = self.curriculum.rest(environment, example, &self.config);
        let name = self.name(environment).to_owned();
        if let Some(count) = resting.filter(|count| count.is_power_of_two()) {
            self.warn(format!(
                "environment {name:?}: example {example} is no longer drawn (examples dropped so far: {count}): {why}; {FITS}"
            ));
        }
        self.environments[environment].too_long_groups += 1;
        self.rest_if_all_too_long(environment, why, was_tried);
    }

    /// The environment rests once many groups in a row were dropped for their first prompts, or no example is left.
    fn rest_if_all_too_long(&mut self, environment: EnvironmentId, why: &str, was_tried: bool) {
        let name = self.name(environment).to_owned();
        let in_a_row = self.environments[environment].too_long_groups;
        let four_batches = 4 * self.config.groups_per_batch() as u32;
        if self.curriculum.is_exhausted(environment) {
            if !self.end_without_environments() {
                self.warn(format!(
                    "environment {name:?} is no longer used: the first prompt of every example is longer than the \
                     context; {FITS}"
                ));
            }
        } else if in_a_row >= TOO_LONG_AT_LEAST.max(four_batches) {
            let why = format!(
                "the first prompts of the last {in_a_row} groups are longer than the context, the last: {why}; {FITS}"
            );
            self.rest_environment(environment, why, was_tried);
        }
    }
}

/// What to do about it.
const FITS: &str = "raise inference.max_model_len (and seq_len), or use shorter prompts";
