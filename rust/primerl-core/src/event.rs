//! What can happen. The shell turns every request, answer and deadline into one of these, and writes it to the journal.

mod outcome;

pub use outcome::{Outcome, Score, Trace};

use crate::config::Changes;
use crate::ids::*;
use crate::sample::TokenLogprobs;
use crate::time::Duration;
use crate::turn::Turn;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Clone, Debug, Serialize, Deserialize)]
// Tagged outside: an inner tag would buffer the fields, and serde cannot buffer the 128-bit digests of a turn.
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A worker listed the environment's examples. Repeated registrations must agree; the first one counts.
    EnvironmentReady {
        environment: EnvironmentId,
        examples: u32,
        /// Its rewards come from all rollouts of a group together: groups are leased whole, and restarted whole.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        whole_groups: bool,
    },
    WorkerJoined {
        worker: WorkerId,
        environment: EnvironmentId,
        /// Unique to the process: one that registers again is known by it.
        name: String,
    },
    /// Any sign of life.
    WorkerSeen {
        worker: WorkerId,
    },
    /// What the environment's own code does to a worker: it has kept the worker's event loop from running. Sent for as long
    /// as it lasts, and once, with `None`, when the loop runs again.
    WorkerBlocked {
        worker: WorkerId,
        block: Option<Block>,
    },
    /// The worker deregistered, or the process that had started it reports how it ended (`reason`: "exited with code 3");
    /// its leases go back.
    WorkerLeft {
        worker: WorkerId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A worker asks for up to `max` rollouts. Answered by [`crate::Effect::Lease`] or, at the long-poll deadline
    /// or the end of the run, by [`crate::Effect::NoLease`].
    LeaseRequested {
        request: RequestId,
        worker: WorkerId,
        max: u32,
    },
    /// The requester hung up: forget a waiting lease or batch request.
    RequestDropped {
        request: RequestId,
    },
    /// An engine that serves `version` begins the rollout's first turn. Until that turn is over (it may be a long one) only
    /// this tells how old the rollout gets. Sent again when another engine has to start over.
    SamplingStarted {
        rollout: RolloutId,
        version: PolicyVersion,
    },
    /// A turn the environment is answered with. A rollout's turns (of all its sessions) are numbered by the order of
    /// these events, and [`Turn::parent`] refers to those numbers.
    TurnFinished {
        rollout: RolloutId,
        turn: Turn,
    },
    /// What the shell will have to know of the rollout after a restart, in the shell's own format. Notes are kept in
    /// their order for as long as the rollout is open, and nothing is decided by them.
    Noted {
        rollout: RolloutId,
        note: Arc<str>,
    },
    /// The engine's request failed for good (no engine could answer within the rollout's deadline).
    TurnFailed {
        rollout: RolloutId,
        message: String,
    },
    /// The environment reported. Repeating it is harmless.
    RolloutFinished {
        rollout: RolloutId,
        worker: WorkerId,
        outcome: Outcome,
    },

    EngineJoined {
        engine: EngineId,
        url: String,
    },
    /// The engine proved by hash that it serves this version.
    EngineProved {
        engine: EngineId,
        version: PolicyVersion,
    },
    /// It failed to load, died, or reported other weights: no traffic until it proves again. The core ignores it
    /// until the shell, having found it healthy, sends `EngineJoined` for it again.
    EngineLost {
        engine: EngineId,
        reason: String,
    },

    /// What a serving engine reports of its load. Sent when it changed enough to matter, not at every look.
    EngineLoad {
        engine: EngineId,
        load: EngineLoad,
    },

    /// Data rank `rank` asks for its part of step `step`.
    BatchRequested {
        request: RequestId,
        step: Step,
        rank: u32,
    },
    /// A data rank that trains the step before asks for its part of `step`, should it be there: it is answered at once,
    /// and does not wait.
    NextBatchRequested {
        request: RequestId,
        step: Step,
        rank: u32,
    },
    /// The batch of a step is in the spool: for each rank the checksum of its bytes, by which it is known from now on.
    BatchWritten {
        step: Step,
        checksums: Vec<u64>,
    },
    /// The trainer published weights; the shell has checked the manifest.
    WeightsPublished {
        version: PolicyVersion,
        manifest: String,
        digest: String,
    },
    /// A trainer process resumes after `step` (0: starts from scratch): from here it asks for batches, and publishes
    /// versions, that may have been fetched and published before.
    TrainerResumed {
        step: Step,
    },
    /// The trainer can resume after `step` from what it has on disk: earlier batches are not needed any more.
    CheckpointSaved {
        step: Step,
    },

    /// The run was started again with these values.
    Reconfigured(Changes),
    /// In a run that only evaluates, what failed and what was not measured in time is to be measured once more.
    MeasureAgain,
    /// The shell was restarted: every request that waited is gone, engines have to be reached again, and workers
    /// could not show signs of life meanwhile.
    Restarted,
    /// A custom algorithm answered [`crate::Effect::ComputeAdvantages`]: for each of the request's samples one value
    /// a token, or why there are none.
    AdvantagesComputed {
        group: GroupId,
        result: Result<Vec<Vec<f32>>, String>,
    },
    /// The teacher answered [`crate::Effect::ScoreByTeacher`]: for each of the request's samples its log-probability of
    /// every token, nats (0 for the first, which nothing precedes), or why there are none.
    TeacherScored {
        group: GroupId,
        result: Result<Vec<TokenLogprobs>, String>,
    },

    /// Time passed: check deadlines.
    Tick,
    /// Stop dispatching, cancel what is in flight, finish.
    ShutdownRequested {
        reason: String,
    },
}

impl Event {
    /// Its name in the journal.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::EnvironmentReady { .. } => "environment_ready",
            Event::WorkerJoined { .. } => "worker_joined",
            Event::WorkerSeen { .. } => "worker_seen",
            Event::WorkerBlocked { .. } => "worker_blocked",
            Event::WorkerLeft { .. } => "worker_left",
            Event::LeaseRequested { .. } => "lease_requested",
            Event::RequestDropped { .. } => "request_dropped",
            Event::SamplingStarted { .. } => "sampling_started",
            Event::TurnFinished { .. } => "turn_finished",
            Event::Noted { .. } => "noted",
            Event::TurnFailed { .. } => "turn_failed",
            Event::RolloutFinished { .. } => "rollout_finished",
            Event::EngineJoined { .. } => "engine_joined",
            Event::EngineProved { .. } => "engine_proved",
            Event::EngineLost { .. } => "engine_lost",
            Event::EngineLoad { .. } => "engine_load",
            Event::BatchRequested { .. } => "batch_requested",
            Event::NextBatchRequested { .. } => "next_batch_requested",
            Event::BatchWritten { .. } => "batch_written",
            Event::WeightsPublished { .. } => "weights_published",
            Event::TrainerResumed { .. } => "trainer_resumed",
            Event::CheckpointSaved { .. } => "checkpoint_saved",
            Event::AdvantagesComputed { .. } => "advantages_computed",
            Event::TeacherScored { .. } => "teacher_scored",
            Event::Reconfigured(_) => "reconfigured",
            Event::MeasureAgain => "measure_again",
            Event::Restarted => "restarted",
            Event::Tick => "tick",
            Event::ShutdownRequested { .. } => "shutdown_requested",
        }
    }

    /// Decisions do not rest on what such an event changes, unless it leads to an effect (a turn, to a cancellation; a
    /// load, to another limit).
    pub(crate) fn is_only_noted(&self) -> bool {
        matches!(
            self,
            Event::WorkerSeen { .. }
                | Event::SamplingStarted { .. }
                | Event::TurnFinished { .. }
                | Event::Noted { .. }
                | Event::TurnFailed { .. }
                | Event::EngineLoad { .. }
                | Event::BatchWritten { .. }
                | Event::Tick
        )
    }
}

/// An engine's report of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// Requests it computes.
    pub running: u32,
    /// Requests that wait for capacity (not those that a pause deferred).
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Requests that lost their KV cache since the previous report.
    pub preemptions: u32,
}

/// A worker whose event loop does not run, as the worker reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// For how long by now.
    pub lasted: Duration,
    /// The line of code that it is at (`my_env/rewards.py:28`), where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The rollout whose code that is, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutId>,
}

/// A worker's event loop turns about once a second. One that has not for this long is blocked: a warning names it,
/// and it gets nothing to do.
pub const BLOCKED_AFTER: Duration = Duration(10_000_000);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{outcome, turn};

    #[test]
    fn a_journal_reads_back_what_it_wrote() {
        let mut turn = turn(None, &[1, 2], &[3], 4);
        turn.context_digest = u128::MAX - 5;
        turn.request_digest = 1 << 100;
        turn.answer.reasoning = Some(3);
        turn.logprobs = [-1.25e-3].into();
        let events = [
            Event::TurnFinished {
                rollout: RolloutId(7),
                turn,
            },
            Event::RolloutFinished {
                rollout: RolloutId(7),
                worker: WorkerId(1),
                outcome: outcome(0.1),
            },
            Event::AdvantagesComputed {
                group: GroupId(3),
                result: Ok(vec![vec![0.5, -1.25e-30], vec![]]),
            },
            Event::AdvantagesComputed {
                group: GroupId(4),
                result: Err("KeyError: 'length'".to_owned()),
            },
            Event::TeacherScored {
                group: GroupId(5),
                result: Ok(vec![TokenLogprobs([0.0, -1.25e-3].into())]),
            },
            Event::BatchWritten {
                step: Step(2),
                checksums: vec![u64::MAX, 0],
            },
            Event::Tick,
        ];
        for event in events {
            let bytes = rmp_serde::to_vec_named(&event).expect("events can be written");
            let read: Event = rmp_serde::from_slice(&bytes).expect("events can be read");
            assert_eq!(format!("{read:?}"), format!("{event:?}"));
        }
    }

    #[test]
    fn a_journal_of_before_whole_groups_is_read() {
        let written = serde_json::json!({"environment_ready": {"environment": 2, "examples": 7}});
        let bytes = rmp_serde::to_vec_named(&written).expect("it can be written");
        let read: Event = rmp_serde::from_slice(&bytes).expect("it can be read");
        let Event::EnvironmentReady {
            environment,
            examples,
            whole_groups,
        } = &read
        else {
            panic!("another event: {read:?}");
        };
        assert_eq!(
            (*environment, *examples, *whole_groups),
            (EnvironmentId(2), 7, false)
        );
        let again = rmp_serde::to_vec_named(&read).expect("it can be written");
        assert_eq!(again, bytes, "and written as before");
    }

    #[test]
    fn a_report_of_before_kinds_of_errors_is_read_and_written_as_it_was() {
        let written = serde_json::json!({
            "ok": false, "traces": [], "error": {"kind": "environment", "message": "it broke"}
        });
        let bytes = rmp_serde::to_vec_named(&written).expect("it can be written");
        let read: Outcome = rmp_serde::from_slice(&bytes).expect("it can be read");
        let error = read.error.as_ref().expect("there is one");
        assert_eq!((&*error.kind, &error.exception), ("environment", &None));
        assert_eq!(serde_json::json!(read), written);
    }
}
