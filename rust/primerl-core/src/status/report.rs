//! [`Status`]: the core's state for `/status`.

use crate::Core;
use crate::failure::ErrorCounts;
use crate::ids::*;
use crate::status::*;

impl Core {
    /// Everything the core knows, for `/status`. Costs O(workers + engines + environments + groups).
    pub fn status(&self) -> Status {
        Status {
            run: RunStatus {
                next_step: self.next_step,
                max_steps: self.config.run.max_steps,
                policy_version: self.ledger.newest_proved(),
                published_version: self.ledger.newest_published(),
                sampled_tokens: self.tally.sampled_tokens,
                finished: self.ending.finished.clone(),
            },
            rollouts: RolloutStatus {
                in_flight: self.rollouts.in_flight.len() as u64,
                limit: self.in_flight_limit() as u64,
                in_flight_evaluation: self.rollouts.evaluating as u64,
                finished: self.finished_rollouts() as u64,
                queued: self
                    .environments
                    .ids()
                    .map(|id| self.queued(id) as u64)
                    .sum(),
                counters: self.tally.counters,
            },
            groups: GroupStatus {
                ready: self.groups.ready.len(),
                needed: self.groups_needed(),
                live: self.groups.live.len(),
                dropped: self.tally.discards.groups_dropped,
                set_aside: self.groups_set_aside(),
                without_signal_since: self.without_signal_since(),
            },
            trainer: TrainerStatus {
                waiting: !self.batches.requests.is_empty(),
                waiting_since: self.trainer.waiting_since,
                last_seen: self.trainer.last_seen,
                fetched: self.batches.newest_fetched(),
            },
            environments: self
                .environments
                .ids()
                .map(|id| self.environment_status(id))
                .collect(),
            buffer: self.curriculum.environments(&self.config),
            engines: self.engine_status(),
            workers: self.worker_status(),
            waits: self.all_waits(),
            evaluations: self.evaluation_status(),
            last_step: self.batches.last_metrics().cloned(),
            failures: self.tally.discards.failed.clone(),
            errors: self.errors().named(),
            cancelled: self.tally.discards.cancelled.clone(),
            voided: self.tally.discards.voided.clone(),
            ignored: self.tally.ignored.clone(),
        }
    }

    /// Errors of all environments together.
    pub fn errors(&self) -> ErrorCounts {
        let mut errors = ErrorCounts::default();
        self.environments
            .iter()
            .for_each(|state| errors.add(&state.errors));
        errors
    }

    fn environment_status(&self, environment: EnvironmentId) -> EnvironmentStatus {
        let state = &self.environments[environment];
        EnvironmentStatus {
            environment,
            name: self.name(environment).to_owned(),
            examples: state.examples,
            workers: state.workers,
            queued: self.queued(environment),
            set_aside: state.set_aside.len(),
            in_flight: state.in_flight,
            rests: self.why_it_rests(environment),
            errors: state.errors.named(),
            first_errors: state.first_errors.clone(),
        }
    }

    fn engine_status(&self) -> Vec<EngineStatus> {
        let status = |(id, engine): (&EngineId, &crate::policy::Engine)| EngineStatus {
            engine: *id,
            version: engine.proved,
            updating: engine.updating,
            lost: engine.lost.clone(),
            limit: self.limits.get(*id).map(|limited| limited.limit),
            load: self.limits.get(*id).and_then(|limited| limited.load),
        };
        self.ledger.engines().iter().map(status).collect()
    }

    fn worker_status(&self) -> Vec<WorkerStatus> {
        let status = |(id, worker): (&WorkerId, &crate::worker::Worker)| WorkerStatus {
            worker: *id,
            environment: worker.environment,
            last_seen: worker.last_seen,
            running: worker.running.len(),
            blocked: self.block_status(worker),
        };
        self.workers.registered.iter().map(status).collect()
    }

    fn evaluation_status(&self) -> Vec<EvaluationStatus> {
        let Some(round) = &self.evaluations.round else {
            return Vec::new();
        };
        let environments = self.evaluations.environments();
        environments
            .map(|(environment, progress)| EvaluationStatus {
                environment,
                version: round.version,
                ended: progress.ended(),
                total: progress.total.unwrap_or(0),
                since: round.since,
                deadline: round.deadline,
            })
            .collect()
    }

    pub(crate) fn finished_rollouts(&self) -> usize {
        let groups = self.groups.live.values();
        let finished: usize = groups.map(|group| group.finished_count()).sum();
        let held = self.evaluations.environments();
        finished
            + held
                .map(|(_, progress)| progress.held_rollouts())
                .sum::<usize>()
    }

    fn queued(&self, environment: EnvironmentId) -> usize {
        let progress = self.evaluations.progress(environment);
        self.environments[environment].queue.len()
            + progress.map_or(0, |progress| progress.queue.len())
    }
}
