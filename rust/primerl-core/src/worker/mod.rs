//! Workers come, show signs of life, and go; their leases go back to the queue.

mod blocked;

use crate::Core;
use crate::counters::CancelReason;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::ids::*;
use crate::status::own_name;
use crate::time::Time;
use blocked::Blocked;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Rollouts of a worker that are named one by one.
const MOST_NAMED: usize = 8;

#[derive(Clone, Debug, Default)]
pub(crate) struct Workers {
    pub registered: BTreeMap<WorkerId, Worker>,
    pub next: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Worker {
    pub environment: EnvironmentId,
    pub name: String,
    pub last_seen: Time,
    pub running: BTreeSet<RolloutId>,
    #[serde(default)]
    pub blocked: Option<Blocked>,
}

impl Core {
    pub(crate) fn environment_ready(
        &mut self,
        environment: EnvironmentId,
        examples: u32,
        whole_groups: bool,
    ) {
        if !self.environments.contains(environment) {
            return self.ignore("environment_ready of an unknown environment");
        }
        let state = &mut self.environments[environment];
        match state.examples {
            None if examples == 0 => {
                let name = self.name(environment).to_owned();
                self.warn(format!("environment {name:?} listed no examples; it is not used until a worker lists some"));
            }
            None => {
                state.examples = Some(examples);
                state.whole_groups = whole_groups;
                self.curriculum.set_examples(environment, examples);
            }
            Some(known) if known != examples => {
                let name = self.name(environment).to_owned();
                self.warn(format!(
                    "a worker of environment {name:?} lists {examples} examples where the first one listed {known}: \
                     workers of one environment must load the same data; the first number is kept"
                ));
            }
            Some(_) if state.whole_groups != whole_groups => {
                let kept = state.whole_groups;
                let name = self.name(environment).to_owned();
                self.warn(format!(
                    "a worker of environment {name:?} says whole_groups = {whole_groups}, the first one said {kept}: \
                     workers of one environment must agree; the first registration wins"
                ));
            }
            Some(_) => {}
        }
    }

    pub(crate) fn worker_joined(
        &mut self,
        worker: WorkerId,
        environment: EnvironmentId,
        name: String,
    ) {
        if !self.environments.contains(environment) {
            return self.ignore("worker_joined of an unknown environment");
        }
        if self.workers.registered.contains_key(&worker) {
            return self.ignore("worker_joined of a known worker");
        }
        self.environments[environment].workers += 1;
        self.workers.next = self.workers.next.max(worker.0 + 1);
        self.workers.registered.insert(
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
        let Some(worker) = self.workers.registered.get_mut(&id) else {
            return self.ignore("sign of life of an unknown worker");
        };
        let timeout = self.config.timeouts.worker;
        self.deadlines
            .clear(worker.last_seen + timeout, Due::Worker(id));
        worker.last_seen = self.now;
        self.deadlines.set(self.now + timeout, Due::Worker(id));
    }

    pub(crate) fn worker_left(&mut self, worker: WorkerId, reason: Option<&str>) {
        match self.workers.registered.contains_key(&worker) {
            true => self.remove_worker(worker, reason.unwrap_or("has left"), "the worker left"),
            false => self.ignore("worker_left of an unknown worker"),
        }
    }

    pub(crate) fn worker_timed_out(&mut self, id: WorkerId) {
        if !self.workers.registered.contains_key(&id) {
            return;
        }
        let seconds = self.config.timeouts.worker.as_secs_f64();
        let how = format!("sent nothing for {seconds} s");
        self.effects.push(Effect::WorkerLost {
            worker: id,
            reason: format!("{} {how}", self.worker_of(id)),
            is_blocked: false,
        });
        self.remove_worker(id, &how, "the worker sent nothing");
    }

    /// What it ran is handed out again, and named: one of them may be why it is gone.
    pub(crate) fn remove_worker(&mut self, id: WorkerId, how: &str, why_no_lease: &str) {
        let named = self.running_in_words(id);
        let who = self.worker_of(id);
        let Some(worker) = self.workers.registered.get(&id) else {
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
        self.environments[worker.environment].workers -= 1;
        for rollout in running {
            // One that was given back may have taken its group along, and others with it.
            if self.rollouts.in_flight.contains_key(&rollout) {
                let rollout = self.cancel(rollout, CancelReason::WorkerLost);
                self.give_back(rollout);
            }
        }
        self.workers.registered.remove(&id);
        for request in self.leases.of(id) {
            self.refuse_lease(request, why_no_lease.to_owned());
        }
    }

    /// `worker env_task_0 of environment "task"`
    pub(crate) fn worker_of(&self, id: WorkerId) -> String {
        match self.workers.registered.get(&id) {
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
        let running = self
            .workers
            .registered
            .get(&id)
            .map(|worker| &worker.running);
        let known = running.into_iter().flatten();
        let mut rollouts = known.filter_map(|id| self.rollouts.in_flight.get(id));
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
