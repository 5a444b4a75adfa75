//! Rollouts in flight: turns, reports, deadlines; what becomes of their groups.

use super::Core;
use crate::config::AlgorithmKind;
use crate::counters::Ended;
use crate::deadlines::Due;
use crate::effect::{CancelReason, Effect};
use crate::event::{Outcome, RolloutError};
use crate::group::{Group, Slot};
use crate::ids::*;
use crate::policy::too_many_policies;
use crate::rollout::{LeftOut, Rollout, Rules, error};
use crate::turn::Turn;

/// So many dropped groups in a row end the run, or a whole batch of them where that is more.
const FAILED_GROUPS_AT_LEAST: u32 = 8;

impl Core {
    pub(super) fn turn_finished(&mut self, id: RolloutId, turn: Turn) {
        let Some(rollout) = self.rollouts.get_mut(&id) else {
            return self.ignore("turn of a rollout that is over");
        };
        let policies = rollout.record(turn);
        if rollout.evaluates.is_none()
            && too_many_policies(policies, self.config.max_off_policy_steps)
        {
            let rollout = self.cancel(id, CancelReason::Stale);
            let message = format!("{policies} policies contributed to one rollout");
            self.fail(rollout, Ended::Stale, &error("stale", message));
        }
    }

    /// Only counted: the environment is told by its own request, and decides whether it goes on.
    pub(super) fn turn_failed(&mut self, rollout: RolloutId) {
        match self.rollouts.contains_key(&rollout) {
            true => *self.failures.entry("turn".to_owned()).or_default() += 1,
            false => self.ignore("failed turn of a rollout that is over"),
        }
    }

    pub(super) fn rollout_finished(&mut self, id: RolloutId, worker: WorkerId, outcome: &Outcome) {
        if self
            .rollouts
            .get(&id)
            .is_none_or(|rollout| rollout.worker != worker)
        {
            return self.ignore("report of a rollout that is over");
        }
        let mut rollout = self.take(id);
        self.effects.push(Effect::RolloutClosed { rollout: id });
        if rollout.evaluates.is_some() {
            return self.evaluation_rollout_finished(rollout, outcome);
        }
        let rules = Rules::of(&self.config, rollout.environment);
        let finished = rollout.finish(outcome, &rules);
        self.flag(outcome, finished.as_ref().err());
        match finished {
            Ok(()) => self.complete(rollout),
            Err(error) => self.fail(rollout, Ended::Failed, &error),
        }
    }

    /// Counts what a report says beside how the rollout ended.
    fn flag(&mut self, outcome: &Outcome, error: Option<&RolloutError>) {
        let mut trained = outcome
            .traces
            .iter()
            .filter(|trace| trace.trainable && trace.ok);
        let truncated = trained.any(|trace| trace.truncated);
        let counters = &mut self.counters;
        counters.errored += u64::from(!outcome.ok);
        counters.truncated += u64::from(outcome.ok && truncated);
        counters.empty += u64::from(error.is_some_and(|error| error.kind == "empty"));
    }

    pub(super) fn rollout_timed_out(&mut self, id: RolloutId) {
        if !self.rollouts.contains_key(&id) {
            return;
        }
        let rollout = self.cancel(id, CancelReason::Timeout);
        let seconds = self.config.timeouts.rollout.as_secs_f64();
        self.fail(
            rollout,
            Ended::Failed,
            &error(
                "timeout",
                format!("not ended {seconds} s after it was leased"),
            ),
        );
    }

    /// Takes a rollout out of flight, and tells the gateway and the worker. The caller ends it.
    pub(super) fn cancel(&mut self, id: RolloutId, reason: CancelReason) -> Rollout {
        let rollout = self.take(id);
        let worker = (reason != CancelReason::WorkerLost).then_some(rollout.worker);
        self.effects.push(Effect::CancelRollout {
            rollout: id,
            worker,
            reason,
        });
        self.effects.push(Effect::RolloutClosed { rollout: id });
        rollout
    }

    /// Ends a rollout that came to nothing; its slot is tried again, or its group dropped.
    pub(super) fn fail(&mut self, rollout: Rollout, ended: Ended, error: &RolloutError) {
        if ended == Ended::Failed {
            *self.failures.entry(error.kind.clone()).or_default() += 1;
        }
        let (id, group_id, slot, environment) =
            (rollout.id, rollout.group, rollout.slot, rollout.environment);
        if rollout.evaluates.is_some() {
            return self.evaluation_rollout_failed(rollout, error);
        }
        rollout.end(ended, &mut self.counters);
        let max_retries = self.config.environment(environment).max_retries;
        let Some(group) = self.groups.get_mut(&group_id) else {
            return;
        };
        if group.fail(slot, id, max_retries) {
            self.sites[environment.0 as usize]
                .queue
                .push_front((group_id, slot));
        } else {
            let RolloutError { kind, message } = error;
            let why = format!(
                "a rollout failed {} times, last with {kind}: {message}",
                max_retries + 1
            );
            self.drop_failed_group(group_id, environment, &why);
        }
    }

    /// Ends a rollout whose worker is gone, and queues its slot again.
    pub(super) fn give_back(&mut self, rollout: Rollout) {
        if rollout.evaluates.is_some() {
            return self.give_back_evaluation(rollout);
        }
        let (id, group_id, slot, environment) =
            (rollout.id, rollout.group, rollout.slot, rollout.environment);
        rollout.end(Ended::Cancelled, &mut self.counters);
        let Some(group) = self.groups.get_mut(&group_id) else {
            return;
        };
        if group.lose(slot, id) {
            self.sites[environment.0 as usize]
                .queue
                .push_front((group_id, slot));
        } else {
            self.drop_failed_group(
                group_id,
                environment,
                "one of its rollouts was lost with its worker too often",
            );
        }
    }

    /// Drops a group that came to nothing. An environment of which nothing else comes ends the run: replacing its
    /// groups for ever would be a hang with a busy machine.
    pub(super) fn drop_failed_group(&mut self, id: GroupId, environment: EnvironmentId, why: &str) {
        self.drop_group(id, Ended::Filtered, why);
        let site = &mut self.sites[environment.0 as usize];
        site.failed_groups += 1;
        let failed = site.failed_groups;
        let groups_per_batch = self.config.batch_size / self.config.group_size;
        if failed >= groups_per_batch.max(FAILED_GROUPS_AT_LEAST) {
            let name = self.name(environment);
            self.hopeless = Some(format!(
                "environment {name:?}: the last {failed} groups were dropped and none was completed; the last because {why}"
            ));
        }
    }

    /// Drops a group: what is in flight is cancelled, what had finished ends as `finished_as`. Its place is free.
    pub(super) fn drop_group(&mut self, id: GroupId, finished_as: Ended, why: &str) {
        let Some(group) = self.groups.remove(&id) else {
            return;
        };
        self.groups_dropped += 1;
        self.ready.retain(|ready| *ready != id);
        self.stop_computing(id);
        let (name, example) = (self.name(group.environment).to_owned(), group.example);
        self.warn(format!(
            "group {id} (example {example} of environment {name:?}) was dropped: {why}"
        ));
        self.sites[group.environment.0 as usize]
            .queue
            .retain(|(queued, _)| *queued != id);
        for slot in group.slots {
            match slot {
                Slot::Queued => {}
                Slot::InFlight(rollout) => {
                    let rollout = self.cancel(rollout, CancelReason::GroupDropped);
                    rollout.end(Ended::Cancelled, &mut self.counters);
                }
                Slot::Finished(rollout) => rollout.end(finished_as, &mut self.counters),
            }
        }
    }

    /// At the end of the run: groups that will not be cut. Nothing is in flight any more.
    pub(super) fn discard_groups(&mut self) {
        self.ready.clear();
        let computing: Vec<GroupId> = self.computing.keys().copied().collect();
        computing.into_iter().for_each(|id| {
            self.stop_computing(id);
        });
        self.sites.iter_mut().for_each(|site| site.queue.clear());
        for slot in std::mem::take(&mut self.groups)
            .into_values()
            .flat_map(|group| group.slots)
        {
            if let Slot::Finished(rollout) = slot {
                rollout.end(Ended::Cancelled, &mut self.counters);
            }
        }
    }

    fn complete(&mut self, rollout: Rollout) {
        let (id, environment) = (rollout.group, rollout.environment);
        let group = self
            .groups
            .get_mut(&id)
            .expect("a rollout in flight has a live group");
        group.finish(rollout);
        if !group.is_complete() {
            return;
        }
        if group.samples().next().is_none() {
            let why = why_nothing_is_left(group, self.config.seq_len);
            return self.drop_failed_group(id, environment, &why);
        }
        match &self.config.environment(environment).algorithm.kind {
            AlgorithmKind::Custom { path, timeout } => {
                let (path, timeout) = (path.clone(), *timeout);
                self.compute_advantages(id, path, timeout);
            }
            _ => self.is_ready(id, environment),
        }
    }

    /// A complete group, with all that its advantages need, waits for its batch.
    pub(super) fn is_ready(&mut self, id: GroupId, environment: EnvironmentId) {
        self.sites[environment.0 as usize].failed_groups = 0;
        self.ready.push_back(id);
    }

    fn take(&mut self, id: RolloutId) -> Rollout {
        let rollout = self
            .rollouts
            .remove(&id)
            .expect("the caller knows the rollout to be in flight");
        self.deadlines.clear(rollout.deadline, Due::Rollout(id));
        self.sites[rollout.environment.0 as usize].in_flight -= 1;
        if let Some(worker) = self.workers.get_mut(&rollout.worker) {
            worker.running.remove(&id);
        }
        if rollout.evaluates.is_some() {
            self.in_flight_evaluation -= 1;
        }
        rollout
    }
}

fn why_nothing_is_left(group: &Group, seq_len: u32) -> String {
    let left_out: Vec<LeftOut> = group.finished().map(|rollout| rollout.left_out).collect();
    if left_out.iter().any(|left_out| left_out.too_long > 0) {
        return format!(
            "all of its samples are longer than seq_len = {seq_len}: raise it or shorten rollouts"
        );
    }
    "all of its rollouts were cut short by the environment, and truncated_rollouts = \"mask\": allow them more tokens \
     or turns"
        .to_owned()
}
