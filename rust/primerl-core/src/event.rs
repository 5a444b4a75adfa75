//! What can happen. The shell turns every request, answer and deadline into one of these, and writes it to the journal.

use crate::admission::EngineLoad;
use crate::config::Changes;
use crate::ids::*;
use crate::rollout::Score;
use crate::sample::TokenLogprobs;
use crate::signal::mean;
use crate::time::Duration;
use crate::turn::Turn;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug, Serialize, Deserialize)]
// Tagged outside: an inner tag would buffer the fields, and serde cannot buffer the 128-bit digests of a turn.
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A worker listed the environment's examples. Repeated registrations must agree; the first one counts.
    EnvironmentReady {
        environment: EnvironmentId,
        examples: u32,
        /// Its rewards come from all rollouts of a group together: groups are leased whole, and begun anew whole.
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
    /// The worker said goodbye, or whoever had started it says how it ended (`reason`: "exited with code 3"); its leases
    /// go back.
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
    /// this says how old the rollout gets. Sent again when another engine has to begin anew.
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
    /// What the shell will have to know of the rollout after a restart, in its own words. Notes are kept in their order
    /// for as long as the rollout is open, and nothing is decided by them.
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
    /// It failed to load, died, or reported other weights: no traffic until it proves again. The core tells it nothing
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
    /// A trainer process goes on after `step` (0: begins anew): from here it asks for batches, and publishes versions,
    /// that may have been fetched and published before.
    TrainerResumed {
        step: Step,
    },
    /// The trainer can go on after `step` from what it has on disk: earlier batches are not needed any more.
    CheckpointSaved {
        step: Step,
    },

    /// The run was started again with these.
    Reconfigured(Changes),
    /// Of a run that only evaluates: what failed, and what was not measured in time, is to be measured once more.
    MeasureAgain,
    /// The shell was restarted: every request that waited is gone, engines have to be reached again, and workers had
    /// nobody to tell that they live.
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

/// A worker whose event loop does not run, as the worker tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// For how long by now.
    pub lasted: Duration,
    /// The line of code that it is at (`my_env/rewards.py:28`), where that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// The rollout whose code that is, where that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutId>,
}

/// A worker's event loop turns about once a second. One that has not for so long is blocked: it is named, and gets nothing
/// to do.
pub const BLOCKED_AFTER: Duration = Duration(10_000_000);

/// What the environment says about one rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The environment ran to its end. `ok` does not mean trainable: there may be no sampled token.
    pub ok: bool,
    pub traces: Vec<Trace>,
    /// The first error, if any.
    pub error: Option<RolloutError>,
    /// What the gateway last refused the rollout, if it answered nothing since. Its own word, not the worker's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

/// An answer of the gateway that was an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// As told to the client; empty where it has none.
    pub code: String,
    /// Of HTTP.
    pub status: u16,
    /// Where the prompt was longer than the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overflow: Option<Overflow>,
}

/// A prompt that is longer than the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    pub prompt_tokens: u32,
    /// The context, prompt and answer together.
    pub most: u32,
}

impl Outcome {
    /// Which trace each turn is of, `None` where that is not trained; `sessions` are those of the turns, in order. A client
    /// that sends no session name has one conversation, and its one trace is named otherwise: those two belong together.
    pub fn trained_traces<'a>(
        &self,
        sessions: impl Iterator<Item = &'a str> + Clone,
    ) -> Vec<Option<usize>> {
        let mut others = sessions.clone();
        let first = others.next();
        if let [trace] = &self.traces[..]
            && others.all(|session| Some(session) == first)
        {
            return sessions.map(|_| trace.is_trained().then_some(0)).collect();
        }
        let named = self.traces.iter().enumerate();
        let named: BTreeMap<&str, usize> = named
            .map(|(index, trace)| (trace.session.as_str(), index))
            .collect();
        let of = |session: &str| {
            let trace = named.get(session).copied();
            trace.filter(|trace| self.traces[*trace].is_trained())
        };
        sessions.map(of).collect()
    }
}

impl Outcome {
    /// Means over the trainable traces, or over all if none is; of no trace, 0.
    pub fn score(&self) -> Score {
        let any = self.traces.iter().any(|trace| trace.trainable);
        let traces = self.traces.iter().filter(|trace| trace.trainable || !any);
        let mut metrics: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, value) in traces.clone().flat_map(|trace| &trace.metrics) {
            metrics.entry(name.clone()).or_default().push(*value);
        }
        let means = metrics.into_iter();
        Score {
            reward: mean(traces.map(|trace| trace.reward)),
            metrics: means
                .map(|(name, values)| (name, mean(values.into_iter())))
                .collect(),
        }
    }
}

/// One seat of a rollout: one conversation with its own reward.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Equals the `session` of its turns (`X-Session-ID`).
    pub session: String,
    /// Which part of the episode it played; rewards are compared with those of the same one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub seat: String,
    pub trainable: bool,
    pub ok: bool,
    pub reward: f64,
    pub metrics: BTreeMap<String, f64>,
    pub stop_condition: Option<String>,
    pub truncated: bool,
}

impl Trace {
    pub fn is_trained(&self) -> bool {
        self.trainable && self.ok
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutError {
    /// Which boundary failed, in the reporter's word: `environment`, `engine`, `timeout`, `worker_lost`, ... What it counts
    /// as, [`crate::ErrorKind::of`] decides.
    pub kind: String,
    pub message: String,
    /// Type of the exception, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exception: Option<String>,
    /// HTTP status that it came with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// [`Outcome::refusal`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

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
