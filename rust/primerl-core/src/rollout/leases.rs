//! Who gets which rollout, when.
//!
//! Work is handed out one rollout at a time: to the environment whose oldest queued group is the oldest of all, so that
//! the curriculum's ratios hold whatever the workers' speeds. A group is begun only when a worker waits and no queued
//! rollout is for it: the policy is then as fresh as it can be. Evaluations go first, up to their share.
//!
//! An environment whose turn it is gets a group although another one's worker waits, or ratios would follow the
//! workers' speeds. But its places must not stay empty for good: groups that nobody came for during `timeouts.worker`
//! are set aside, so that others may use their places, and go on when their environment's workers ask again.
//!
//! Of an environment that rewards whole groups, all rollouts of a group go into one answer, and it takes as few groups as
//! reach what was asked for, at least one. Where there is no room for all of a group, nobody overtakes it.

use crate::Core;
use crate::curriculum::Draw;
use crate::deadlines::Due;
use crate::effect::{Effect, LeasedRollout};
use crate::evaluation::{Attempt, Progress};
use crate::group::Group;
use crate::ids::*;
use crate::machine::LeaseRequest;
use crate::rollout::{Lease, Rollout};
use std::collections::BTreeMap;

/// What requests get, collected before they are answered.
type Answers = BTreeMap<RequestId, Vec<LeasedRollout>>;

impl Core {
    pub(crate) fn lease_requested(&mut self, request: RequestId, worker: WorkerId, max: u32) {
        self.worker_seen(worker);
        let Some(known) = self.workers.get(&worker) else {
            let reason = format!("worker {worker} is not registered (any more): register again");
            let finished = self.finished.is_some();
            return self.effects.push(Effect::NoLease {
                request,
                reason,
                finished,
            });
        };
        let (environment, deadline) =
            (known.environment, self.now + self.config.timeouts.long_poll);
        self.deadlines.set(deadline, Due::Lease(request));
        let place = self.next_place;
        self.next_place += 1;
        self.lease_requests.insert(
            request,
            LeaseRequest {
                worker,
                environment,
                max: max.max(1),
                deadline,
                place,
            },
        );
        if !self.is_blocked(worker) {
            let site = &mut self.sites[environment.0 as usize];
            site.requests.insert(place, request);
            site.absent = false;
        }
    }

    pub(crate) fn forget_lease_request(&mut self, request: RequestId) -> Option<LeaseRequest> {
        let lease = self.lease_requests.remove(&request)?;
        self.deadlines.clear(lease.deadline, Due::Lease(request));
        let site = &mut self.sites[lease.environment.0 as usize];
        site.requests.remove(&lease.place);
        site.unasked_since = self.now;
        Some(lease)
    }

    pub(crate) fn refuse_lease(&mut self, request: RequestId, reason: String) {
        if self.forget_lease_request(request).is_some() {
            let finished = self.finished.is_some();
            self.effects.push(Effect::NoLease {
                request,
                reason,
                finished,
            });
        }
    }

    pub(crate) fn lease_poll_ended(&mut self, request: RequestId) {
        let Some(lease) = self.lease_requests.get(&request).copied() else {
            return;
        };
        // What this event made possible is handed out first.
        self.dispatch();
        if self.lease_requests.contains_key(&request) {
            let reason = match self.is_blocked(lease.worker) {
                true => "the worker is blocked by its environment".to_owned(),
                false => self.why_no_lease(lease.environment),
            };
            self.refuse_lease(request, reason);
        }
    }

    pub(crate) fn dispatch(&mut self) {
        if self.lease_requests.is_empty() {
            return;
        }
        if let Some(reason) = self.finished.clone() {
            let waiting: Vec<RequestId> = self.lease_requests.keys().copied().collect();
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
        let Some(round) = &self.round else { return };
        let (version, environments) = (
            round.version,
            round.environments.keys().copied().collect::<Vec<_>>(),
        );
        for environment in environments {
            let size = self.leased_together(environment);
            while self.evaluation_has_room(size) {
                let Some(request) = self.sites[environment.0 as usize].first_request() else {
                    break;
                };
                let Some(progress) = self.evaluating(environment) else {
                    break;
                };
                let first = size.min(progress.queue.len());
                let attempts: Vec<Attempt> = progress.queue.drain(..first).collect();
                if attempts.is_empty() {
                    break;
                }
                for attempt in attempts {
                    let Attempt {
                        group,
                        slot,
                        example,
                        ..
                    } = attempt;
                    let at = Some(version);
                    let id = self.lease(request, environment, group, slot, example, at, answers);
                    if let Some(progress) = self.evaluating(environment) {
                        progress.in_flight.insert(id, attempt);
                    }
                    self.in_flight_evaluation += 1;
                }
                self.answer_if_full(request, answers);
            }
        }
    }

    /// How far the evaluation of an environment is, if there is one.
    pub(crate) fn evaluating(&mut self, environment: EnvironmentId) -> Option<&mut Progress> {
        self.round.as_mut()?.environments.get_mut(&environment)
    }

    fn lease_training(&mut self, answers: &mut Answers) {
        while self.training_has_room(1) {
            let Some((environment, request)) = self.next_served() else {
                match self.someone_waits_to_train() && self.begin_group() {
                    true => continue,
                    false => break,
                }
            };
            let size = self.leased_together(environment);
            if size > 1 && !self.training_has_room(size) {
                break;
            }
            for _ in 0..size {
                let queue = &mut self.sites[environment.0 as usize].queue;
                let (group_id, slot) = queue.pop_first().expect("a served environment has a queue");
                let example = self.groups[&group_id].example;
                let id = self.lease(request, environment, group_id, slot, example, None, answers);
                self.groups
                    .get_mut(&group_id)
                    .expect("queued slots belong to live groups")
                    .lease(slot, id);
            }
            self.answer_if_full(request, answers);
            self.let_others_go_first(environment, request);
        }
    }

    /// Rollouts are dealt out in turn: one worker that asks for many would else run all of them, and others none.
    fn let_others_go_first(&mut self, environment: EnvironmentId, request: RequestId) {
        let site = &mut self.sites[environment.0 as usize];
        let Some(lease) = self.lease_requests.get_mut(&request) else {
            return;
        };
        if site.requests.len() > 1 {
            site.requests.remove(&lease.place);
            lease.place = self.next_place;
            self.next_place += 1;
            site.requests.insert(lease.place, request);
        }
    }

    /// The environment, of those with a queue and a waiting worker, whose first queued group is the oldest.
    fn next_served(&self) -> Option<(EnvironmentId, RequestId)> {
        let servable = self.sites.iter().enumerate().filter_map(|(index, site)| {
            Some((
                site.queue.first()?.0,
                EnvironmentId(index as u32),
                site.first_request()?,
            ))
        });
        servable
            .min()
            .map(|(_, environment, request)| (environment, request))
    }

    fn someone_waits_to_train(&self) -> bool {
        self.config
            .environment_ids()
            .any(|(id, _)| self.is_training(id) && !self.sites[id.0 as usize].requests.is_empty())
    }

    /// Queues the rollouts of another group, if admission allows: of one that was set aside, or of a new one.
    fn begin_group(&mut self) -> bool {
        if !self.may_begin_group() && !self.set_aside_unasked() {
            return false;
        }
        let present: Vec<bool> = self
            .config
            .environment_ids()
            .map(|(id, _)| self.may_draw(id))
            .collect();
        let may = |environment: EnvironmentId| present[environment.0 as usize];
        let Some(environment) = self.curriculum.turn(may) else {
            return false;
        };
        if let Some(id) = self.sites[environment.0 as usize].set_aside.pop_first() {
            self.take_up(id);
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
        let id = self.new_groups(1);
        let size = self.config.group_size as usize;
        let mut group = Group::new(id, environment, example, size);
        group.whole = self.sites[environment.0 as usize].whole_groups;
        self.groups.insert(id, group);
        self.tries(environment, id);
        (0..size).for_each(|slot| self.enqueue(id, slot));
        true
    }

    /// A group that was set aside goes on.
    fn take_up(&mut self, id: GroupId) {
        let slots: Vec<usize> = self.groups[&id].queued().collect();
        slots.into_iter().for_each(|slot| self.enqueue(id, slot));
        if self.config.max_async_level == 0 {
            self.void_off_policy(id);
        }
    }

    /// Makes a slot wait for a worker.
    pub(crate) fn enqueue(&mut self, id: GroupId, slot: usize) {
        let environment = self.groups[&id].environment;
        let site = &mut self.sites[environment.0 as usize];
        if site.set_aside.contains(&id) {
            return;
        }
        if site.queue.is_empty() {
            site.unasked_since = self.now;
        }
        site.queue.insert((id, slot));
    }

    /// Sets aside what environments have queued that nobody asked for during `timeouts.worker`. A group of which a
    /// rollout is in flight stays. Returns whether that made room for another group.
    fn set_aside_unasked(&mut self) -> bool {
        let patience = self.config.timeouts.worker;
        for index in 0..self.sites.len() {
            let site = &self.sites[index];
            let unasked = self.now.since(site.unasked_since);
            if site.queue.is_empty() || !site.requests.is_empty() || unasked < patience {
                continue;
            }
            let idle = |id: &GroupId| self.groups[id].in_flight_count() == 0;
            let mut groups: Vec<GroupId> = site.queue.iter().map(|(id, _)| *id).collect();
            groups.dedup();
            groups.retain(idle);
            if groups.is_empty() {
                continue;
            }
            let site = &mut self.sites[index];
            site.queue
                .retain(|(id, _)| groups.binary_search(id).is_err());
            site.absent = true;
            site.set_aside.extend(&groups);
            self.losses.groups_set_aside += groups.len() as u64;
            let (name, seconds) = (&self.config.environments[index].name, unasked.as_secs_f64());
            self.warn(format!(
                "{} groups of environment {name:?} are set aside: its workers have not asked for rollouts for \
                 {seconds:.0} s, and other environments' wait; they go on when one asks",
                groups.len()
            ));
        }
        self.may_begin_group()
    }

    /// Numbers for that many new groups; returns the first.
    pub(crate) fn new_groups(&mut self, count: u32) -> GroupId {
        let first = GroupId(self.next_group);
        self.next_group += u64::from(count);
        first
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a lease, from two kinds of queue"
    )]
    fn lease(
        &mut self,
        request: RequestId,
        environment: EnvironmentId,
        group: GroupId,
        slot: usize,
        example: ExampleIndex,
        evaluates: Option<PolicyVersion>,
        answers: &mut Answers,
    ) -> RolloutId {
        let worker = self.lease_requests[&request].worker;
        let id = RolloutId(self.next_rollout);
        self.next_rollout += 1;
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
        self.rollouts
            .insert(id, Box::new(Rollout::leased(lease, &mut self.counters)));
        self.deadlines.set(deadline, Due::Rollout(id));
        self.sites[environment.0 as usize].in_flight += 1;
        self.workers
            .get_mut(&worker)
            .expect("a waiting worker is known")
            .running
            .insert(id);
        let evaluation = evaluates.is_some();
        let leased = LeasedRollout {
            rollout: id,
            group,
            environment,
            example,
            evaluation,
            deadline: span,
        };
        answers.entry(request).or_default().push(leased);
        id
    }

    fn answer_if_full(&mut self, request: RequestId, answers: &mut Answers) {
        let max = self.lease_requests[&request].max as usize;
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
