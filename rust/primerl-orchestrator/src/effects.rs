//! Carries out what the core decided. Nothing here waits: slow work goes to other tasks and threads.

use crate::app::{App, report_lost_leases};
use crate::custom::AdvantagesThread;
use crate::envs::workers::Workers;
use crate::recorder::Recorder;
use crate::teacher::Teacher;
use crate::teacher::itself::Itself;
use primerl_core::counters::CancelReason;
use primerl_core::effect::{AdvantagesRequest, LeasedRollout, TeacherRequest};
use primerl_core::{Core, Effect, EnvironmentId, RolloutId, Step, WorkerId};
use primerl_engines::Engines;
use primerl_gateway::Rollouts;
use primerl_gateway::Sampling;
use primerl_service::inbox::{BatchReply, DriverHandle};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;

pub(crate) struct Effects {
    pub rollouts: Arc<Rollouts>,
    /// Indexed by environment.
    pub samplings: Vec<Sampling>,
    pub workers: Arc<Workers>,
    pub engines: Arc<Engines>,
    pub recorder: Recorder,
    pub driver: DriverHandle,
    /// Set if the program can call custom functions.
    pub advantages: Option<AdvantagesThread>,
    /// The teachers of the environments that learn by on-policy distillation.
    pub teachers: BTreeMap<EnvironmentId, ScoredBy>,
}

/// Who scores what the policy samples.
#[derive(Clone)]
pub(crate) enum ScoredBy {
    Teacher(Teacher),
    Itself(Itself),
}

impl Effects {
    pub fn new(
        app: &App,
        recorder: Recorder,
        advantages: Option<AdvantagesThread>,
        teachers: BTreeMap<EnvironmentId, ScoredBy>,
    ) -> Effects {
        Effects {
            rollouts: Arc::clone(&app.gateway.gateway.rollouts),
            samplings: app.samplings.clone(),
            workers: Arc::clone(&app.workers),
            engines: Arc::clone(&app.engines),
            recorder,
            driver: app.driver.clone(),
            advantages,
            teachers,
        }
    }

    /// Whether `rollout` runs on this worker.
    pub fn is_open(&self, rollout: RolloutId, worker: WorkerId) -> bool {
        self.rollouts
            .get(rollout)
            .is_some_and(|open| open.worker == worker)
    }

    /// Opens these rollouts: the gateway answers for them from now on.
    pub fn open(&self, worker: WorkerId, leased: &[LeasedRollout]) {
        for lease in leased {
            self.rollouts.open(
                lease,
                worker,
                self.samplings[lease.environment.0 as usize].clone(),
            );
        }
        self.workers
            .leased(worker, leased.iter().map(|lease| lease.rollout));
    }

    pub fn lease_lost(&self, worker: WorkerId, leased: &[RolloutId]) {
        report_lost_leases(&self.driver, worker, leased);
    }

    /// Has a snapshot of the core written, as it was after event `number`.
    pub fn snapshot(&self, number: u64, core: Box<Core>) {
        self.recorder.snapshot(number, core);
    }

    /// Has it written next to the trainer's checkpoint of `step`.
    pub fn keep_state(&self, step: Step, number: u64, core: Box<Core>) {
        self.recorder.keep_state(step, number, core);
    }

    /// The driver answers leases; everything else is done here. `waiter` waits for a batch.
    pub fn carry_out(&self, effect: Effect, waiter: Option<oneshot::Sender<BatchReply>>) {
        match effect {
            Effect::CancelRollout {
                rollout,
                worker,
                reason,
            } => self.cancel(rollout, worker, reason),
            Effect::RolloutClosed { rollout } => {
                if let Some(worker) = self.rollouts.close(rollout) {
                    self.workers.closed(worker, rollout);
                }
            }
            Effect::WorkerLost {
                worker,
                reason,
                is_blocked,
            } => {
                tracing::warn!(%worker, reason, "worker lost");
                self.workers.lose(worker, is_blocked.then_some(reason));
            }
            Effect::WorkerGone { why, .. } => tracing::warn!("{why}"),
            Effect::UpdateEngine {
                engine,
                version,
                manifest,
                digest,
            } => self.engines.update(engine, version, &manifest, digest),
            Effect::LimitEngine { engine, limit } => self.engines.limit(engine, limit),
            Effect::Batch { step, rank, .. } => {
                if let Some(waiter) = waiter {
                    self.recorder.answer(step, rank, waiter);
                }
            }
            Effect::ForgetBatches { before } => self.recorder.forget(before),
            Effect::BatchCut { batch } => self.recorder.cut(batch),
            Effect::ComputeAdvantages { request } => self.compute_advantages(request),
            Effect::ScoreByTeacher { request } => self.score(request),
            Effect::Evaluated(report) => self.recorder.evaluated(report),
            Effect::Warn { message } => tracing::warn!("{message}"),
            Effect::Finished { reason } => self.recorder.finished(reason),
            Effect::Failed { reason } => self.recorder.failed(reason),
            Effect::RolloutFailed { .. }
            | Effect::RolloutVoided { .. }
            | Effect::GroupDropped { .. } => {}
            Effect::Lease { .. }
            | Effect::NoLease { .. }
            | Effect::BatchNotReady { .. }
            | Effect::NoMoreBatches { .. } => {
                debug_assert!(false, "answered by the driver, who knows the waiters");
            }
        }
    }
    fn cancel(&self, rollout: RolloutId, worker: Option<WorkerId>, reason: CancelReason) {
        self.rollouts.cancel(rollout, reason);
        if let Some(worker) = worker {
            self.workers.cancel(worker, rollout);
        }
    }

    fn compute_advantages(&self, request: Arc<AdvantagesRequest>) {
        match &self.advantages {
            Some(thread) => thread.compute(request),
            None => debug_assert!(false, "a run that cannot call the function is not started"),
        }
    }

    fn score(&self, request: Arc<TeacherRequest>) {
        match self.teachers.get(&request.environment) {
            Some(ScoredBy::Teacher(teacher)) => teacher.score(request),
            Some(ScoredBy::Itself(policy)) => policy.score(request),
            None => debug_assert!(false, "an environment without a teacher asks none"),
        }
    }
}
