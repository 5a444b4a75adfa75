//! Workers come, show signs of life, and go; their leases go back to the queue.

mod blocked;

pub(crate) use blocked::Blocked;

use crate::Core;
use crate::deadlines::Due;
use crate::effect::{CancelReason, Effect};
use crate::ids::*;
use crate::machine::Worker;
use crate::status::own_name;
use std::collections::BTreeSet;

/// Rollouts of a worker that are named one by one.
const MOST_NAMED: usize = 8;

impl Core {
    pub(crate) fn worker_joined(
        &mut self,
        worker: WorkerId,
        environment: EnvironmentId,
        name: String,
    ) {
        if environment.0 as usize >= self.sites.len() {
            return self.ignore("worker_joined of an unknown environment");
        }
        if self.workers.contains_key(&worker) {
            return self.ignore("worker_joined of a known worker");
        }
        self.sites[environment.0 as usize].workers += 1;
        self.next_worker = self.next_worker.max(worker.0 + 1);
        self.workers.insert(
            worker,
            Worker {
                environment,
                name,
                last_seen: self.now,
                running: BTreeSet::new(),
                blocked: None,
            },
        );
        self.deadlines
            .set(self.now + self.config.timeouts.worker, Due::Worker(worker));
    }

    /// Its deadline moves on.
    pub(crate) fn worker_seen(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return self.ignore("sign of life of an unknown worker");
        };
        let timeout = self.config.timeouts.worker;
        self.deadlines
            .clear(worker.last_seen + timeout, Due::Worker(id));
        worker.last_seen = self.now;
        self.deadlines.set(self.now + timeout, Due::Worker(id));
    }

    pub(crate) fn worker_left(&mut self, worker: WorkerId, reason: Option<&str>) {
        match self.workers.contains_key(&worker) {
            true => self.remove_worker(worker, reason.unwrap_or("has left"), "the worker left"),
            false => self.ignore("worker_left of an unknown worker"),
        }
    }

    pub(crate) fn worker_timed_out(&mut self, id: WorkerId) {
        if !self.workers.contains_key(&id) {
            return;
        }
        let seconds = self.config.timeouts.worker.as_secs_f64();
        let how = format!("was not heard of for {seconds} s");
        self.effects.push(Effect::WorkerLost {
            worker: id,
            reason: format!("{} {how}", self.worker_of(id)),
            is_blocked: false,
        });
        self.remove_worker(id, &how, "the worker was not heard of");
    }

    /// What it ran is handed out again, and named: one of them may be why it is gone.
    pub(crate) fn remove_worker(&mut self, id: WorkerId, how: &str, why_no_lease: &str) {
        let named = self.running_in_words(id);
        let who = self.worker_of(id);
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let running: Vec<RolloutId> = worker.running.iter().copied().collect();
        if !running.is_empty() {
            let count = running.len();
            self.effects.push(Effect::WorkerGone {
                worker: id,
                why: format!("{who} {how}; its {count} rollouts are handed out again: {named}"),
            });
        }
        self.deadlines.clear(
            worker.last_seen + self.config.timeouts.worker,
            Due::Worker(id),
        );
        self.sites[worker.environment.0 as usize].workers -= 1;
        for rollout in running {
            // One that was given back may have taken its group along, and others with it.
            if self.rollouts.contains_key(&rollout) {
                let rollout = self.cancel(rollout, CancelReason::WorkerLost);
                self.give_back(rollout);
            }
        }
        self.workers.remove(&id);
        for request in self.requests_of(id) {
            self.refuse_lease(request, why_no_lease.to_owned());
        }
    }

    // In words

    pub(crate) fn requests_of(&self, id: WorkerId) -> Vec<RequestId> {
        let leases = self.lease_requests.iter();
        leases
            .filter(|(_, lease)| lease.worker == id)
            .map(|(request, _)| *request)
            .collect()
    }

    /// `worker env_task_0 of environment "task"`
    pub(crate) fn worker_of(&self, id: WorkerId) -> String {
        match self.workers.get(&id) {
            Some(worker) => {
                let environment = self.name(worker.environment);
                format!(
                    "worker {} of environment {environment:?}",
                    own_name(&worker.name)
                )
            }
            None => format!("worker {id}"),
        }
    }

    /// `rollout 3 (example 7), rollout 4 (example 7) and 12 others`
    fn running_in_words(&self, id: WorkerId) -> String {
        let running = self.workers.get(&id).map(|worker| &worker.running);
        let known = running.into_iter().flatten();
        let mut rollouts = known.filter_map(|id| self.rollouts.get(id));
        let named: Vec<String> = (&mut rollouts)
            .take(MOST_NAMED)
            .map(|one| format!("rollout {} (example {})", one.id, one.example))
            .collect();
        match rollouts.count() {
            0 => named.join(", "),
            others => format!("{} and {others} others", named.join(", ")),
        }
    }
}
