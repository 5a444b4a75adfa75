//! What a restart needs: of the trainer, which goes back to a checkpoint, and of the shell, which lost everything that
//! is not in the journal.

use crate::Core;
use crate::config::Changes;
use crate::deadlines::Due;
use crate::effect::{CancelReason, LeasedRollout};
use crate::ids::*;
use crate::turn::Turn;
use std::sync::Arc;

/// Numbers passed over after a restart: what was handed out in the last moment before it, and is not in the journal,
/// must not be handed out again as something else.
const LOST_NUMBERS: u64 = 1 << 20;

/// Said of engines that were not reached since.
const RESTARTED: &str = "the orchestrator was restarted and has not reached it yet";

/// A rollout in flight, as the gateway has to know it.
#[derive(Clone, Debug)]
pub struct OpenRollout<'a> {
    /// Its deadline counts from now.
    pub lease: LeasedRollout,
    pub worker: WorkerId,
    pub turns: &'a [Turn],
    /// What the shell noted of it.
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
        self.rollouts.values().map(|rollout| OpenRollout {
            lease: LeasedRollout {
                rollout: rollout.id,
                group: rollout.group,
                environment: rollout.environment,
                example: rollout.example,
                evaluation: rollout.evaluates.is_some(),
                deadline: rollout.deadline.since(self.now),
            },
            worker: rollout.worker,
            turns: rollout.turns(),
            notes: rollout.notes(),
        })
    }

    /// Workers that are registered.
    pub fn open_workers(&self) -> impl Iterator<Item = OpenWorker<'_>> {
        self.workers.iter().map(|(id, worker)| OpenWorker {
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

    /// What the first worker of each environment said of it, where one has.
    pub fn known_examples(&self) -> impl Iterator<Item = (EnvironmentId, Listed)> {
        let sites = self.config.environment_ids().map(|(id, _)| id);
        sites.filter_map(|id| {
            let site = &self.sites[id.0 as usize];
            let listed = Listed {
                examples: site.examples?,
                whole_groups: site.whole_groups,
            };
            Some((id, listed))
        })
    }

    /// The number of the next worker after a restart.
    pub fn next_worker(&self) -> WorkerId {
        WorkerId(self.next_worker + LOST_NUMBERS)
    }

    /// The number of the next rollout after a restart.
    pub fn next_rollout(&self) -> RolloutId {
        RolloutId(self.next_rollout + LOST_NUMBERS)
    }

    /// Whether the run came to its end, and did not fail: there is nothing left to do.
    pub fn is_over(&self) -> bool {
        self.finished.is_some() && !self.failed
    }

    /// Time of the last event.
    pub fn now(&self) -> crate::Time {
        self.now
    }

    /// The next step to be cut.
    pub fn next_step(&self) -> Step {
        self.next_step
    }

    /// Everything in the state as text, and the next examples it would draw: two cores with one fingerprint go on alike.
    #[cfg(any(test, feature = "testing"))]
    pub fn fingerprint(&self) -> String {
        let mut core = self.clone();
        // How it is stored depends on how it came to be; what it draws does not.
        core.remains.clear();
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

    /// Why a trainer cannot go on after `step`.
    pub fn refuses_resume(&self, step: Step) -> Option<String> {
        if step.next() < self.batches.kept_from() {
            return Some(self.why_batch_gone());
        }
        (step >= self.next_step).then(|| {
            let last = self.next_step.0 - 1;
            format!("the trainer would go on after step {step}, but only {last} steps were cut")
        })
    }

    /// Why no checkpoint of the trainer can cover `step`: the batches up to it would be gone for a trainer that still
    /// needs them.
    pub fn refuses_checkpoint(&self, step: Step) -> Option<String> {
        let newest = self.ledger.newest_trained();
        (step > newest).then(|| {
            format!(
                "a checkpoint of step {step} was reported, but version {newest} is the newest that its trainer has \
                 published: publish the weights of a step before its checkpoint is reported"
            )
        })
    }

    pub(crate) fn why_batch_gone(&self) -> String {
        let from = self.batches.kept_from();
        format!(
            "batches before step {from} are gone: a checkpoint of the trainer covers them, or it saved none for too \
             long; go on from a checkpoint of step {} or later, or begin a new run",
            from.0 - 1
        )
    }

    pub(crate) fn trainer_resumed(&mut self, step: Step) {
        self.trainer.last_seen = Some(self.now);
        if let Some(why) = self.refuses_resume(step) {
            return self.warn(why);
        }
        self.batches.resume_after(step);
        self.ledger.resume_at(PolicyVersion(step.0));
    }

    pub(crate) fn checkpoint_saved(&mut self, step: Step) {
        self.trainer.last_seen = Some(self.now);
        if let Some(why) = self.refuses_checkpoint(step) {
            return self.warn(format!("{why}; its batches are kept"));
        }
        if self.batches.cover(step) {
            self.forget_batches();
        }
    }

    /// A run that had come to its end goes on if it is given more steps.
    pub(crate) fn reconfigured(&mut self, changes: Changes) {
        changes.apply(&mut self.config);
        let Changes {
            max_steps,
            timeouts,
            ..
        } = changes;
        if max_steps >= self.next_step.0 && !self.failed {
            self.finished = None;
        }
        // What was cut cannot be undone.
        self.config.max_steps = max_steps.max(self.next_step.0 - 1);
        // A worker's deadline is found by the span it was set with.
        let timeout = std::mem::replace(&mut self.config.timeouts, timeouts).worker;
        for (id, worker) in &mut self.workers {
            let due = Due::Worker(*id);
            self.deadlines.clear(worker.last_seen + timeout, due);
            worker.last_seen = self.now;
            self.deadlines
                .set(self.now + self.config.timeouts.worker, due);
        }
        self.postpone_round();
        self.give_back_beyond_limit();
    }

    /// Fewer may be in flight than there are: of those of the start before, whose workers are gone, the newest are handed
    /// out later.
    fn give_back_beyond_limit(&mut self) {
        let limit = self.config.max_in_flight();
        while self.rollouts.len() > limit
            && let Some(newest) = self.rollouts.keys().next_back().copied()
        {
            let rollout = self.cancel(newest, CancelReason::WorkerLost);
            self.give_back(rollout);
        }
    }

    /// What had made a run fail may be mended by now: it is tried again.
    pub(crate) fn restarted(&mut self) {
        if std::mem::take(&mut self.failed) {
            self.finished = None;
            self.sites
                .iter_mut()
                .for_each(|site| site.failed_groups = 0);
        }
        self.end_rests();
        let leases: Vec<RequestId> = self.lease_requests.keys().copied().collect();
        for request in leases {
            self.forget_lease_request(request);
        }
        self.next_rollout += LOST_NUMBERS;
        self.next_group += LOST_NUMBERS;
        self.next_worker += LOST_NUMBERS;
        for (request, asked) in std::mem::take(&mut self.batches.requests) {
            self.deadlines.clear(asked.deadline, Due::Batch(request));
        }
        self.trainer.waiting_since = None;
        self.batches.restarted(self.next_step);
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            self.worker_seen(worker);
        }
        self.ledger.lose_all(RESTARTED);
        self.limits.add_up(&self.ledger);
    }
}
