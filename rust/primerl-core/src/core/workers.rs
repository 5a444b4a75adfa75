//! Workers come, show signs of life, and go; their leases go back to the queue.

use super::{Core, Worker};
use crate::deadlines::Due;
use crate::effect::{CancelReason, Effect};
use crate::ids::*;
use std::collections::BTreeSet;

impl Core {
    pub(super) fn worker_joined(
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
            },
        );
        self.deadlines
            .set(self.now + self.config.timeouts.worker, Due::Worker(worker));
    }

    /// Its deadline moves on.
    pub(super) fn worker_seen(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return self.ignore("sign of life of an unknown worker");
        };
        let timeout = self.config.timeouts.worker;
        self.deadlines
            .clear(worker.last_seen + timeout, Due::Worker(id));
        worker.last_seen = self.now;
        self.deadlines.set(self.now + timeout, Due::Worker(id));
    }

    pub(super) fn worker_left(&mut self, worker: WorkerId) {
        match self.workers.contains_key(&worker) {
            true => self.remove_worker(worker, "the worker left"),
            false => self.ignore("worker_left of an unknown worker"),
        }
    }

    pub(super) fn worker_timed_out(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let seconds = self.config.timeouts.worker.as_secs_f64();
        let reason = format!(
            "worker {id} of environment {:?} was not heard of for {seconds} s; its {} rollouts are handed out again",
            self.name(worker.environment),
            worker.running.len()
        );
        self.warn(reason.clone());
        self.effects.push(Effect::WorkerLost { worker: id, reason });
        self.remove_worker(id, "the worker was not heard of");
    }

    fn remove_worker(&mut self, id: WorkerId, why: &str) {
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let running: Vec<RolloutId> = worker.running.iter().copied().collect();
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
        let waiting = self
            .lease_requests
            .iter()
            .filter(|(_, lease)| lease.worker == id);
        let waiting: Vec<RequestId> = waiting.map(|(request, _)| *request).collect();
        for request in waiting {
            self.refuse_lease(request, why.to_owned());
        }
    }
}
