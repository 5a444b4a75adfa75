//! How groups end: complete and ready for a batch, filtered, or dropped.

use super::{Group, Slot};
use crate::Core;
use crate::counters::{CancelReason, VoidReason};
use crate::effect::Effect;
use crate::ids::*;
use crate::rollout::LeftOut;

impl Core {
    /// Passes on a group whose last slot has ended.
    pub(crate) fn complete_if_whole(&mut self, id: GroupId) {
        let Some(group) = self.groups.live.get_mut(&id) else {
            return;
        };
        let environment = group.environment;
        if !group.is_complete(self.config.min_group_size(environment)) {
            return;
        }
        if group.samples().next().is_none() {
            let (why, reason) = why_nothing_is_left(group, self.config.run.seq_len);
            self.file_example(id);
            return self.drop_failed_group(id, environment, reason, &why);
        }
        if !self.file_example(id) {
            self.goes_well(environment);
            return self.filter_group(id);
        }
        self.score(id, environment);
    }

    /// A complete group, with all that its advantages need, waits for its batch.
    pub(crate) fn set_ready(&mut self, id: GroupId, environment: EnvironmentId) {
        self.goes_well(environment);
        self.signals.at = self.now;
        self.groups.set_ready(id);
    }

    /// Drops a group: what is in flight is cancelled, what had finished ends as `finished_as`. Its place is free.
    pub(crate) fn drop_group(&mut self, id: GroupId, finished_as: VoidReason, why: &str) {
        if let Some(group) = self.groups.live.get(&id) {
            let (name, example) = (self.name(group.environment).to_owned(), group.example);
            self.warn(format!(
                "group {id} (example {example} of environment {name:?}) was dropped: {why}"
            ));
        }
        self.drop_quietly(id, finished_as, why);
    }

    /// [`Core::drop_group`] without a warning: the caller warns of something else.
    pub(crate) fn drop_quietly(&mut self, id: GroupId, finished_as: VoidReason, why: &str) {
        let Some(group) = self.groups.remove(id) else {
            return;
        };
        self.tally.discards.groups_dropped += 1;
        self.tried_in_vain(group.environment, id);
        self.effects.push(Effect::GroupDropped {
            group: id,
            reason: finished_as,
            why: why.to_owned(),
        });
        self.stop_awaiting(id);
        let state = &mut self.environments[group.environment];
        state.set_aside.remove(&id);
        for slot in group.queued() {
            state.queue.remove(&(id, slot));
        }
        for slot in group.slots {
            match slot {
                Slot::Lost | Slot::Queued => {}
                Slot::InFlight(rollout) => {
                    self.cancel_with_group(rollout, CancelReason::GroupDropped)
                }
                Slot::Finished(rollout) => self.void_with_group(rollout, finished_as),
            }
        }
    }

    /// At the end of the run: discards groups that will not be cut. Nothing is in flight any more.
    pub(crate) fn discard_groups(&mut self) {
        self.rollouts.by_age.clear();
        let waiting: Vec<GroupId> = self.signals.waiting().collect();
        waiting.into_iter().for_each(|id| self.stop_awaiting(id));
        for state in self.environments.iter_mut() {
            state.queue.clear();
            state.set_aside.clear();
        }
        for rollout in self.groups.take_all().flat_map(Group::into_finished) {
            self.void(rollout, VoidReason::RunFinished);
        }
    }

    /// Drops groups under way beyond those that the run's last step leaves room for, the newest first, and complete ones
    /// last: the run was resumed with a smaller `max_steps`.
    pub(crate) fn drop_beyond_last_step(&mut self) {
        let (allowed, begun) = (self.allowed(), self.begun());
        if begun <= allowed {
            return;
        }
        let surplus = self.surplus(allowed);
        if surplus.is_empty() {
            return;
        }
        let (count, max_steps) = (surplus.len(), self.config.run.max_steps);
        let why = format!("no step up to max_steps = {max_steps} is left to train it");
        self.warn(format!(
            "{count} groups that were begun are dropped: the run was resumed with max_steps = {max_steps}, which leaves \
             no step to train them"
        ));
        for id in surplus {
            self.drop_quietly(id, VoidReason::RunFinished, &why);
        }
    }

    /// Groups beyond what is allowed, in the order in which they are dropped.
    fn surplus(&self, allowed: u64) -> Vec<GroupId> {
        let set_aside = |group: &Group| {
            let state = &self.environments[group.environment];
            state.set_aside.contains(&group.id)
        };
        let under_way = self.groups.live.values().filter(|group| !set_aside(group));
        let of_tokens = self.config.run.token_batch_size.is_some();
        let size = |group: &Group| match group.ready_since {
            Some(_) => group.ready_size(of_tokens),
            None => self.measured(group.slots.len()),
        };
        let mut under_way: Vec<(bool, GroupId, u64)> = under_way
            .map(|group| (group.ready_since.is_none(), group.id, size(group)))
            .collect();
        under_way.sort_unstable();
        // As when groups are begun, the last one may reach beyond what is allowed.
        let mut kept = 0;
        under_way.retain(|(_, _, size)| {
            let fits = kept < allowed;
            kept += size;
            !fits
        });
        under_way.into_iter().rev().map(|(_, id, _)| id).collect()
    }
}

fn why_nothing_is_left(group: &Group, seq_len: u32) -> (String, VoidReason) {
    let left_out: Vec<LeftOut> = group.finished().map(|rollout| rollout.left_out).collect();
    if left_out.iter().any(|left_out| left_out.too_long > 0) {
        let why = format!(
            "all of its samples are longer than seq_len = {seq_len}: raise it or shorten rollouts"
        );
        return (why, VoidReason::TooLong);
    }
    let why = "all of its rollouts were cut short by the environment, and truncated_rollouts = \"mask\": allow them more \
               tokens or turns";
    (why.to_owned(), VoidReason::Masked)
}
