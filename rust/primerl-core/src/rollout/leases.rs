//! Which worker gets which rollout, and when.
//!
//! Work is handed out one rollout at a time: to the environment whose oldest queued group is the oldest of all, so that
//! the curriculum's ratios hold whatever the workers' speeds. A group is begun only when a worker waits and no queued
//! rollout is for it: the policy is then as fresh as it can be. Evaluations go first, up to their share.
//!
//! An environment whose turn it is gets a group although another one's worker waits, or ratios would follow the
//! workers' speeds. But its places must not stay empty for good: groups that no worker asked for during
//! `timeouts.worker` are set aside, so that others may use their places, and resume when their environment's workers ask
//! again.
//!
//! For an environment that rewards whole groups, all rollouts of a group go into one answer, and it takes as few groups
//! as reach what was asked for, at least one. Where there is no room for all of a group, no other group overtakes it.

use super::{Lease, Rollout};
use crate::Core;
use crate::curriculum::Draw;
use crate::deadlines::Due;
use crate::effect::{Effect, LeasedRollout};
use crate::evaluation::Attempt;
use crate::ids::*;
use crate::time::{Duration, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Requests of workers that wait for rollouts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leases {
    pub requests: BTreeMap<RequestId, LeaseRequest>,
    pub next_place: u64,
}

impl Leases {
    /// The next place in the order of arrival.
    fn place(&mut self) -> u64 {
        let place = self.next_place;
        self.next_place += 1;
        place
    }

    pub fn of(&self, worker: WorkerId) -> Vec<RequestId> {
        let own = self
            .requests
            .iter()
            .filter(|(_, lease)| lease.worker == worker);
        own.map(|(request, _)| *request).collect()
    }
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LeaseRequest {
    pub worker: WorkerId,
    pub environment: EnvironmentId,
    pub max: u32,
    pub deadline: Time,
    /// Its place in its environment's queue of requests.
    pub place: u64,
}

/// What requests get, collected before they are answered.
type Answers = BTreeMap<RequestId, Vec<LeasedRollout>>;

impl Core {
    pub(crate) fn lease_requested(&mut self, request: RequestId, worker: WorkerId, max: u32) {
        self.worker_seen(worker);
        let Some(known) = self.workers.registered.get(&worker) else {
            let reason = format!("worker {worker} is not registered (any more): register again");
            return self.push_no_lease(request, reason);
        };
        let (environment, deadline) =
            (known.environment, self.now + self.config.timeouts.long_poll);
        self.deadlines.set(deadline, Due::Lease(request));
        let place = self.leases.place();
        let lease = LeaseRequest {
            worker,
            environment,
            max: max.max(1),
            deadline,
            place,
        };
        self.leases.requests.insert(request, lease);
        if !self.is_blocked(worker) {
            self.environments[environment].add_request(place, request);
        }
    }

    pub(crate) fn forget_lease_request(&mut self, request: RequestId) -> Option<LeaseRequest> {
        let lease = self.leases.requests.remove(&request)?;
        self.deadlines.clear(lease.deadline, Due::Lease(request));
        let state = &mut self.environments[lease.environment];
        state.requests.remove(&lease.place);
        state.unasked_since = self.now;
        Some(lease)
    }

    pub(crate) fn refuse_lease(&mut self, request: RequestId, reason: String) {
        if self.forget_lease_request(request).is_some() {
            self.push_no_lease(request, reason);
        }
    }

    fn push_no_lease(&mut self, request: RequestId, reason: String) {
        let finished = self.ending.finished.is_some();
        self.effects.push(Effect::NoLease {
            request,
            reason,
            finished,
        });
    }

    pub(crate) fn lease_poll_ended(&mut self, request: RequestId) {
        let Some(lease) = self.leases.requests.get(&request).copied() else {
            return;
        };
        // What this event made possible is handed out first.
        self.dispatch();
        if self.leases.requests.contains_key(&request) {
            let reason = match self.is_blocked(lease.worker) {
                true => "the worker is blocked by its environment".to_owned(),
                false => self.words(self.lease_wait(lease.environment)),
            };
            self.refuse_lease(request, reason);
        }
    }

    pub(crate) fn dispatch(&mut self) {
        if self.leases.requests.is_empty() {
            return;
        }
        if let Some(reason) = self.ending.finished.clone() {
            let waiting: Vec<RequestId> = self.leases.requests.keys().copied().collect();
            waiting
                .into_iter()
                .for_each(|request| self.refuse_lease(request, reason.clone()));
            return;
        }
        let mut answers = Answers::new();
        self.lease_evaluation(&mut answers);
        self.lease_training(&mut answers);
        let partial: Vec<RequestId> = answers.keys().copied().collect();
        partial
            .into_iter()
            .for_each(|request| self.answer_lease(request, &mut answers));
    }

    fn lease_evaluation(&mut self, answers: &mut Answers) {
        let Some(round) = &self.evaluations.round else {
            return;
        };
        let version = round.version;
        let environments: Vec<EnvironmentId> = round.environments.keys().copied().collect();
        for environment in environments {
            let size = self.leased_together(environment);
            while self.evaluation_has_room(size) {
                let Some(request) = self.environments[environment].first_request() else {
                    break;
                };
                let Some(progress) = self.evaluations.progress_mut(environment) else {
                    break;
                };
                let first = size.min(progress.queue.len());
                let attempts: Vec<Attempt> = progress.queue.drain(..first).collect();
                if attempts.is_empty() {
                    break;
                }
                for attempt in attempts {
                    self.lease_attempt(request, environment, attempt, version, answers);
                }
                self.answer_if_full(request, answers);
            }
        }
    }

    fn lease_attempt(
        &mut self,
        request: RequestId,
        environment: EnvironmentId,
        attempt: Attempt,
        version: PolicyVersion,
        answers: &mut Answers,
    ) {
        let place = attempt.place();
        let id = self.lease(request, environment, place, Some(version), answers);
        if let Some(progress) = self.evaluations.progress_mut(environment) {
            progress.in_flight.insert(id, attempt);
        }
        self.rollouts.evaluating += 1;
    }

    fn lease_training(&mut self, answers: &mut Answers) {
        while self.training_has_room(1) {
            let Some((environment, request)) = self.next_served() else {
                match self.a_worker_waits_to_train() && self.begin_group() {
                    true => continue,
                    false => break,
                }
            };
            let size = self.leased_together(environment);
            if size > 1 && !self.training_has_room(size) {
                break;
            }
            for _ in 0..size {
                let queue = &mut self.environments[environment].queue;
                let (group, slot) = queue.pop_first().expect("a served environment has a queue");
                let place = (group, slot, self.groups.live[&group].example);
                let id = self.lease(request, environment, place, None, answers);
                self.groups
                    .live
                    .get_mut(&group)
                    .expect("queued slots belong to live groups")
                    .lease(slot, id);
            }
            self.answer_if_full(request, answers);
            self.let_others_go_first(environment, request);
        }
    }

    /// Rollouts are dealt out in turn: one worker that asks for many would else run all of them, and others none.
    fn let_others_go_first(&mut self, environment: EnvironmentId, request: RequestId) {
        let requests = &mut self.environments[environment].requests;
        let Some(lease) = self.leases.requests.get_mut(&request) else {
            return;
        };
        if requests.len() > 1 {
            requests.remove(&lease.place);
            lease.place = self.leases.next_place;
            self.leases.next_place += 1;
            requests.insert(lease.place, request);
        }
    }

    /// The environment, of those with a queue and a waiting worker, whose first queued group is the oldest.
    fn next_served(&self) -> Option<(EnvironmentId, RequestId)> {
        let servable = self.environments.ids().filter_map(|id| {
            let state = &self.environments[id];
            Some((state.queue.first()?.0, id, state.first_request()?))
        });
        servable
            .min()
            .map(|(_, environment, request)| (environment, request))
    }

    fn a_worker_waits_to_train(&self) -> bool {
        self.training_environments()
            .any(|id| !self.environments[id].requests.is_empty())
    }

    /// Queues the rollouts of another group, if admission allows: one that was set aside, or a new one.
    fn begin_group(&mut self) -> bool {
        if !self.may_begin_group() && !self.set_aside_unasked() {
            return false;
        }
        let (environments, now) = (&self.environments, self.now);
        let may = |environment| environments[environment].may_draw(now);
        let Some(environment) = self.curriculum.turn(may) else {
            return false;
        };
        if let Some(id) = self.environments[environment].set_aside.pop_first() {
            self.resume_group(id);
            self.tries(environment, id);
            return true;
        }
        let Some(Draw { example, returned }) = self.curriculum.draw(environment, &self.config)
        else {
            return false;
        };
        if let Some(times) = returned {
            self.warn_of_returned_pools(environment, times);
        }
        self.begin_new_group(environment, example);
        true
    }

    /// Sets aside what environments have queued that no worker asked for during `timeouts.worker`. A group of which a
    /// rollout is in flight stays. Returns whether that made room for another group.
    fn set_aside_unasked(&mut self) -> bool {
        for id in self.environments.ids() {
            let unasked = self.now.since(self.environments[id].unasked_since);
            let groups = self.unasked_groups(id, unasked);
            if groups.is_empty() {
                continue;
            }
            let state = &mut self.environments[id];
            state
                .queue
                .retain(|(id, _)| groups.binary_search(id).is_err());
            state.absent = true;
            state.set_aside.extend(&groups);
            self.tally.discards.groups_set_aside += groups.len() as u64;
            let (name, seconds) = (self.name(id).to_owned(), unasked.as_secs_f64());
            self.warn(format!(
                "{} groups of environment {name:?} are set aside: its workers have not asked for rollouts for \
                 {seconds:.0} s, and other environments' wait; they resume when one asks",
                groups.len()
            ));
        }
        self.may_begin_group()
    }

    /// Queued groups that no worker has asked for since `unasked`, and of which nothing is in flight; in order.
    fn unasked_groups(&self, environment: EnvironmentId, unasked: Duration) -> Vec<GroupId> {
        let state = &self.environments[environment];
        let is_asked = !state.requests.is_empty() || unasked < self.config.timeouts.worker;
        if is_asked {
            return Vec::new();
        }
        let mut groups: Vec<GroupId> = state.queue.iter().map(|(id, _)| *id).collect();
        groups.dedup();
        groups.retain(|id| self.groups.live[id].in_flight_count() == 0);
        groups
    }

    fn lease(
        &mut self,
        request: RequestId,
        environment: EnvironmentId,
        (group, slot, example): (GroupId, usize, ExampleIndex),
        evaluates: Option<PolicyVersion>,
        answers: &mut Answers,
    ) -> RolloutId {
        let worker = self.leases.requests[&request].worker;
        let id = self.rollouts.number();
        let span = self.config.rollout_span(environment);
        let deadline = self.now + span;
        let lease = Lease {
            id,
            group,
            slot,
            environment,
            example,
            evaluates,
            worker,
            deadline,
        };
        let rollout = Box::new(Rollout::leased(lease, &mut self.tally.counters));
        let leased = rollout.as_leased(span);
        self.rollouts.in_flight.insert(id, rollout);
        self.deadlines.set(deadline, Due::Rollout(id));
        self.environments[environment].in_flight += 1;
        self.workers
            .registered
            .get_mut(&worker)
            .expect("a waiting worker is known")
            .running
            .insert(id);
        answers.entry(request).or_default().push(leased);
        id
    }

    fn answer_if_full(&mut self, request: RequestId, answers: &mut Answers) {
        let max = self.leases.requests[&request].max as usize;
        if answers
            .get(&request)
            .is_some_and(|answer| answer.len() >= max)
        {
            self.answer_lease(request, answers);
        }
    }

    fn answer_lease(&mut self, request: RequestId, answers: &mut Answers) {
        let Some(rollouts) = answers.remove(&request) else {
            return;
        };
        if let Some(lease) = self.forget_lease_request(request) {
            self.effects.push(Effect::Lease {
                request,
                worker: lease.worker,
                rollouts,
            });
        }
    }
}
