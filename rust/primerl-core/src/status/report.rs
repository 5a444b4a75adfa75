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
                max_steps: self.config.max_steps,
                policy_version: self.ledger.newest_proved(),
                published_version: self.ledger.newest_published(),
                finished: self.finished.clone(),
            },
            rollouts: RolloutStatus {
                in_flight: self.rollouts.len() as u64,
                limit: self.in_flight_limit() as u64,
                in_flight_evaluation: self.in_flight_evaluation as u64,
                finished: self.finished_rollouts() as u64,
                queued: self
                    .config
                    .environment_ids()
                    .map(|(id, _)| self.queued(id) as u64)
                    .sum(),
                counters: self.counters,
            },
            groups: GroupStatus {
                ready: self.ready.len(),
                needed: self.config.groups_per_batch(),
                live: self.groups.len(),
                dropped: self.losses.groups_dropped,
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
                .config
                .environment_ids()
                .map(|(id, _)| self.environment_status(id))
                .collect(),
            buffer: self.curriculum.environments(&self.config),
            engines: self.engine_status(),
            workers: self.worker_status(),
            waits: self.all_waits(),
            evaluations: self.evaluation_status(),
            last_step: self.batches.last_metrics().cloned(),
            failures: self.losses.failed.clone(),
            errors: self.errors().named(),
            cancelled: self.losses.cancelled.clone(),
            voided: self.losses.voided.clone(),
            ignored: self.ignored.clone(),
        }
    }

    /// Of all environments.
    pub fn errors(&self) -> ErrorCounts {
        let mut errors = ErrorCounts::default();
        self.sites.iter().for_each(|site| errors.add(&site.errors));
        errors
    }

    fn environment_status(&self, environment: EnvironmentId) -> EnvironmentStatus {
        let site = &self.sites[environment.0 as usize];
        EnvironmentStatus {
            environment,
            name: self.name(environment).to_owned(),
            examples: site.examples,
            workers: site.workers,
            queued: self.queued(environment),
            set_aside: site.set_aside.len(),
            in_flight: site.in_flight,
            rests: self.why_it_rests(environment),
            errors: site.errors.named(),
            first_errors: site.first_errors.clone(),
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
        let status = |(id, worker): (&WorkerId, &crate::machine::Worker)| WorkerStatus {
            worker: *id,
            environment: worker.environment,
            last_seen: worker.last_seen,
            running: worker.running.len(),
            blocked: self.block_status(worker),
        };
        self.workers.iter().map(status).collect()
    }

    fn evaluation_status(&self) -> Vec<EvaluationStatus> {
        let Some(round) = &self.round else {
            return Vec::new();
        };
        let environments =
            round
                .environments
                .iter()
                .map(|(environment, progress)| EvaluationStatus {
                    environment: *environment,
                    version: round.version,
                    ended: progress.ended(),
                    total: progress.total.unwrap_or(0),
                    since: round.since,
                    deadline: round.deadline,
                });
        environments.collect()
    }

    pub(crate) fn finished_rollouts(&self) -> usize {
        let finished = self
            .groups
            .values()
            .map(crate::group::Group::finished_count);
        let rounds = self.round.iter();
        let held = rounds.flat_map(|round| round.environments.values());
        finished.sum::<usize>() + held.map(|progress| progress.held_rollouts()).sum::<usize>()
    }

    fn queued(&self, environment: EnvironmentId) -> usize {
        let progress = self
            .round
            .as_ref()
            .and_then(|round| round.environments.get(&environment));
        self.sites[environment.0 as usize].queue.len()
            + progress.map_or(0, |progress| progress.queue.len())
    }
}
