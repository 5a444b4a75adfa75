//! What the shell has to do. Effects are carried out in order; a [`Effect::is_durable`] one only after the event
//! that caused it is on disk, and one that [`Effect::follows`] it only then, too.

use crate::counters::{CancelReason, VoidReason};
use crate::failure::{ErrorKind, RolloutError};
use crate::ids::*;
use crate::pack::PackedBatch;
use crate::sample::{Sample, TrainedTrace};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub enum Effect {
    /// Answer to [`crate::Event::LeaseRequested`].
    Lease {
        request: RequestId,
        worker: WorkerId,
        rollouts: Vec<LeasedRollout>,
    },
    /// Nothing to lease within the long poll, and why. The worker asks again unless `finished`.
    NoLease {
        request: RequestId,
        reason: String,
        finished: bool,
    },
    /// Abort the rollout's engine requests, refuse further ones, and tell its worker (if it has one) at its next heartbeat.
    CancelRollout {
        rollout: RolloutId,
        worker: Option<WorkerId>,
        reason: CancelReason,
    },
    /// The worker sent nothing for `timeouts.worker`, or `is_blocked` by its environment and let a lease run out: its
    /// leases were handed out again. It has to register again, as another worker; until then its calls are refused. A
    /// blocked one cannot, so its process has to end.
    WorkerLost {
        worker: WorkerId,
        reason: String,
        is_blocked: bool,
    },
    /// The rollout is over: its conversations may be forgotten. Sent for every rollout, once, cancelled ones too.
    RolloutClosed { rollout: RolloutId },

    // Reported for people, and for readers of the journal.
    /// A worker is gone, with rollouts that it ran; how, and which, in words.
    WorkerGone { worker: WorkerId, why: String },
    /// Whether it reported the failure itself or its time was up. It may be tried again, as another rollout.
    RolloutFailed {
        rollout: RolloutId,
        error: RolloutError,
    },
    /// It had ended well, and is not trained.
    RolloutVoided {
        rollout: RolloutId,
        reason: VoidReason,
    },
    /// A training group was dropped, and why in words.
    GroupDropped {
        group: GroupId,
        reason: VoidReason,
        why: String,
    },

    /// Pause, load, check the hash, resume; then report `EngineProved` or `EngineLost`.
    UpdateEngine {
        engine: EngineId,
        version: PolicyVersion,
        manifest: String,
        digest: String,
    },

    /// Give the engine at most so many requests at a time while another has room.
    LimitEngine { engine: EngineId, limit: u32 },

    /// Answer to [`crate::Event::BatchRequested`].
    Batch {
        request: RequestId,
        rank: u32,
        step: Step,
    },
    /// Not ready within the long poll: what the batch waits for, in words. The trainer asks again.
    BatchNotReady {
        request: RequestId,
        waiting_for: String,
    },
    /// There will be no such step.
    NoMoreBatches { request: RequestId },
    /// A batch was cut: write it to the spool, record its metrics. Comes before any `Batch` of that step.
    BatchCut { batch: Arc<PackedBatch> },
    /// Batches of earlier steps will not be asked for again: they may be deleted.
    ForgetBatches { before: Step },

    /// Let the environment's custom function give the group's advantages; then report
    /// [`crate::Event::AdvantagesComputed`]. After the request's timeout the answer is ignored.
    ComputeAdvantages { request: Arc<AdvantagesRequest> },
    /// Ask the teacher for its log-probabilities of the group's tokens; then report [`crate::Event::TeacherScored`].
    ScoreByTeacher { request: Arc<TeacherRequest> },

    /// An evaluation ended.
    Evaluated(EvaluationReport),
    /// Something a person should read (a dropped group, a lost worker, ...).
    Warn { message: String },
    /// The last step's weights were proved and the last evaluation is done (or a shutdown was asked for and all is cancelled).
    Finished { reason: String },
    /// The run cannot come to an end by itself: stop, and exit non-zero with this reason.
    Failed { reason: String },
}

impl Effect {
    /// Losing it after it was seen outside would break a promise.
    pub fn is_durable(&self) -> bool {
        matches!(
            self,
            Effect::BatchCut { .. }
                | Effect::ForgetBatches { .. }
                | Effect::Evaluated(_)
                | Effect::Finished { .. }
                | Effect::Failed { .. }
        )
    }

    /// Whether it must not be seen before `other` is carried out. That a batch was given need not be on disk, which a
    /// trainer would wait for: the batch has to be, and after a restart every batch that is counts as given.
    pub fn follows(&self, other: &Effect) -> bool {
        match (self, other) {
            (Effect::Batch { step, .. }, Effect::BatchCut { batch }) => batch.step == *step,
            _ => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct LeasedRollout {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub evaluation: bool,
    /// The environment's own time limit must be shorter than this; microseconds from now.
    pub deadline: crate::Duration,
}

/// A complete group, for a function that gives its advantages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdvantagesRequest {
    pub group: GroupId,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    /// `module:function`.
    pub path: String,
    pub timeout: crate::Duration,
    /// Rewards and what else is known of each seat of each rollout.
    pub traces: Vec<TrainedTrace>,
    /// The rollout of each trace.
    pub rollouts: Vec<RolloutId>,
    /// The samples to be trained, their tokens shared, each with the position of its trace in `traces`.
    pub samples: Vec<(usize, Sample)>,
}

/// The samples of a complete group, for a teacher. Their tokens are shared.
#[derive(Clone, Debug, PartialEq)]
pub struct TeacherRequest {
    pub group: GroupId,
    pub environment: EnvironmentId,
    pub samples: Vec<Sample>,
    /// For each of them what an expert answered, where the environment says it.
    pub demonstrations: Vec<Option<Arc<str>>>,
}

/// Means over the rollouts of one evaluation of one environment at one pinned version.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationReport {
    pub environment: EnvironmentId,
    pub version: PolicyVersion,
    /// That ended, and count.
    pub rollouts: u32,
    /// That there were to be.
    pub expected: u32,
    /// How many of those had not ended when the evaluation was closed: of which examples, depends on how long they took.
    pub unmeasured: u32,
    /// None is unmeasured.
    pub complete: bool,
    /// How often what had failed was measured again: this takes the place of the reports before.
    #[serde(skip_serializing_if = "is_zero")]
    pub measured_again: u32,
    pub failed: u32,
    /// How many failed with each kind of error.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub errors: BTreeMap<ErrorKind, u64>,
    pub mean_reward: f64,
    /// Mean of each metric the environment reported.
    pub metrics: BTreeMap<String, f64>,
    /// `avg@k` and `pass@k`, with the ends of their intervals as `avg@k/low` and `avg@k/high` (see `evaluation::scores`).
    #[serde(flatten)]
    pub scores: BTreeMap<String, f64>,
    /// What these are means of: as many numbers as there are examples, so it has a file of its own.
    #[serde(skip)]
    pub by_example: ExampleScores,
}

/// Scores of each example of which anything ended, so that evaluations of the same examples are compared by pairs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ExampleScores {
    pub examples: Vec<ExampleIndex>,
    /// By name, one for each of `examples`; `None` where too few of its rollouts ended in time.
    pub scores: BTreeMap<String, Vec<Option<f64>>>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}
