//! What the shell needs at a restart, when it has lost everything that is not in the journal, and what changes then.

use crate::Core;
use crate::config::Changes;
use crate::counters::CancelReason;
use crate::deadlines::Due;
use crate::effect::LeasedRollout;
use crate::ids::*;
use crate::turn::Turn;
use std::sync::Arc;

/// Numbers passed over after a restart: what was handed out in the last moment before it, and is not in the journal,
/// must not be handed out again as something else.
const LOST_NUMBERS: u64 = 1 << 20;

/// Why engines that were not reached since are lost.
const RESTARTED: &str = "the orchestrator was restarted and has not reached it yet";

/// A rollout in flight, as the gateway has to know it.
#[derive(Clone, Debug)]
pub struct OpenRollout<'a> {
    /// Its deadline counts from now.
    pub lease: LeasedRollout,
    pub worker: WorkerId,
    pub turns: &'a [Turn],
    /// The shell's notes about it.
    pub notes: &'a [Arc<str>],
}

/// A worker that was registered.
#[derive(Clone, Debug)]
pub struct OpenWorker<'a> {
    pub worker: WorkerId,
    pub environment: EnvironmentId,
    pub name: &'a str,
}

/// What all workers of an environment have to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub examples: u32,
    pub whole_groups: bool,
}

impl Core {
    /// Rollouts in flight, in the order in which they were leased.
    pub fn open_rollouts(&self) -> impl Iterator<Item = OpenRollout<'_>> {
        self.rollouts.in_flight.values().map(|rollout| OpenRollout {
            lease: rollout.as_leased(rollout.deadline.since(self.now)),
            worker: rollout.worker,
            turns: rollout.turns(),
            notes: rollout.notes(),
        })
    }

    /// Workers that are registered.
    pub fn open_workers(&self) -> impl Iterator<Item = OpenWorker<'_>> {
        self.workers
            .registered
            .iter()
            .map(|(id, worker)| OpenWorker {
                worker: *id,
                environment: worker.environment,
                name: &worker.name,
            })
    }

    /// Engines that ever joined, with their URLs.
    pub fn known_engines(&self) -> impl Iterator<Item = (EngineId, &str)> {
        let engines = self.ledger.engines().iter();
        engines.map(|(id, engine)| (*id, engine.url.as_str()))
    }

    /// What the first worker of each environment registered, where one has.
    pub fn known_examples(&self) -> impl Iterator<Item = (EnvironmentId, Listed)> {
        self.environments.ids().filter_map(|id| {
            let state = &self.environments[id];
            let listed = Listed {
                examples: state.examples?,
                whole_groups: state.whole_groups,
            };
            Some((id, listed))
        })
    }

    /// The number of the next worker after a restart.
    pub fn next_worker(&self) -> WorkerId {
        WorkerId(self.workers.next + LOST_NUMBERS)
    }

    /// The number of the next rollout after a restart.
    pub fn next_rollout(&self) -> RolloutId {
        RolloutId(self.rollouts.next + LOST_NUMBERS)
    }

    /// Everything in the state as text, and the next examples it would draw: two cores with one fingerprint behave alike.
    #[cfg(any(test, feature = "testing"))]
    pub fn fingerprint(&self) -> String {
        let mut core = self.clone();
        // How it is stored depends on how it came to be; what it draws does not.
        core.rollouts.remains.clear();
        core.settled = false;
        let mut draw = || {
            let environment = core.curriculum.turn(|_| true)?;
            core.curriculum.draw(environment, &core.config)
        };
        let drawn: Vec<_> = (0..50).map(|_| draw()).collect();
        core.curriculum = crate::curriculum::Curriculum::new(&core.config);
        // Where the generator is in its block depends on how it was read; where it is in its stream does not.
        let position = (self.rng.get_seed(), self.rng.get_word_pos());
        core.rng = rand::SeedableRng::seed_from_u64(0);
        format!("{core:?}, {drawn:?}, {position:?}")
    }

    /// A run that had come to its end resumes if it is given more steps.
    pub(crate) fn reconfigured(&mut self, changes: Changes) {
        changes.apply(&mut self.config);
        let Changes {
            max_steps,
            timeouts,
            ..
        } = changes;
        if max_steps >= self.next_step.0 && !self.ending.failed {
            self.ending.finished = None;
        }
        // What was cut cannot be undone.
        self.config.run.max_steps = max_steps.max(self.next_step.0 - 1);
        // A worker's deadline is found by the span it was set with.
        let timeout = std::mem::replace(&mut self.config.timeouts, timeouts).worker;
        for (id, worker) in &mut self.workers.registered {
            let due = Due::Worker(*id);
            self.deadlines.clear(worker.last_seen + timeout, due);
            worker.last_seen = self.now;
            self.deadlines
                .set(self.now + self.config.timeouts.worker, due);
        }
        self.postpone_round();
        self.drop_beyond_last_step();
        self.give_back_beyond_limit();
    }

    /// Fewer may be in flight than there are: the newest rollouts of the start before, whose workers are gone, are
    /// handed out later.
    fn give_back_beyond_limit(&mut self) {
        let limit = self.config.max_in_flight();
        while self.rollouts.in_flight.len() > limit
            && let Some(newest) = self.rollouts.in_flight.keys().next_back().copied()
        {
            let rollout = self.cancel(newest, CancelReason::WorkerLost);
            self.give_back(rollout);
        }
    }

    fn pass_over_numbers(&mut self) {
        self.rollouts.next += LOST_NUMBERS;
        self.groups.next += LOST_NUMBERS;
        self.workers.next += LOST_NUMBERS;
    }

    /// What had made a run fail may be fixed by now: it is tried again.
    pub(crate) fn restarted(&mut self) {
        if std::mem::take(&mut self.ending.failed) {
            self.ending.finished = None;
            self.environments
                .iter_mut()
                .for_each(|state| state.failed_groups = 0);
        }
        self.end_rests();
        let leases: Vec<RequestId> = self.leases.requests.keys().copied().collect();
        for request in leases {
            self.forget_lease_request(request);
        }
        self.pass_over_numbers();
        for (request, asked) in std::mem::take(&mut self.batches.requests) {
            self.deadlines.clear(asked.deadline, Due::Batch(request));
        }
        self.trainer.waiting_since = None;
        self.batches.restarted(self.next_step);
        let workers: Vec<WorkerId> = self.workers.registered.keys().copied().collect();
        for worker in workers {
            self.worker_seen(worker);
        }
        self.ledger.lose_all(RESTARTED);
        self.limits.add_up(&self.ledger);
    }
}
