//! One function an event, in the module of its stage. What follows from it is decided in `settle`.

use crate::Core;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::event::Event;
use crate::ids::*;
use crate::policy::Published;

impl Core {
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::EnvironmentReady {
                environment,
                examples,
                whole_groups,
            } => self.environment_ready(environment, examples, whole_groups),
            Event::WorkerJoined {
                worker,
                environment,
                name,
            } => self.worker_joined(worker, environment, name),
            Event::WorkerSeen { worker } => self.worker_seen(worker),
            Event::WorkerBlocked { worker, block } => self.worker_blocked(worker, block),
            Event::WorkerLeft { worker, reason } => self.worker_left(worker, reason.as_deref()),
            Event::LeaseRequested {
                request,
                worker,
                max,
            } => self.lease_requested(request, worker, max),
            Event::RequestDropped { request } => self.request_dropped(request),
            Event::SamplingStarted { rollout, version } => self.sampling_started(rollout, version),
            Event::TurnFinished { rollout, turn } => self.turn_finished(rollout, turn),
            Event::Noted { rollout, note } => self.noted(rollout, note),
            Event::TurnFailed {
                rollout,
                message: _,
            } => self.turn_failed(rollout),
            Event::RolloutFinished {
                rollout,
                worker,
                outcome,
            } => self.rollout_finished(rollout, worker, &outcome),
            Event::EngineJoined { engine, url } => self.engine_joined(engine, url),
            Event::EngineProved { engine, version } => self.engine_proved(engine, version),
            Event::EngineLost { engine, reason } => self.engine_lost(engine, reason),
            Event::EngineLoad { engine, load } => self.engine_reported(engine, load),
            Event::BatchRequested {
                request,
                step,
                rank,
            } => self.batch_requested(request, step, rank),
            Event::NextBatchRequested {
                request,
                step,
                rank,
            } => self.next_batch_requested(request, step, rank),
            Event::BatchWritten { step, checksums } => self.batch_written(step, checksums),
            Event::WeightsPublished {
                version,
                manifest,
                digest,
            } => {
                self.weights_published(version, Published { manifest, digest });
            }
            Event::TrainerResumed { step } => self.trainer_resumed(step),
            Event::CheckpointSaved { step } => self.checkpoint_saved(step),
            Event::Reconfigured(changes) => self.reconfigured(changes),
            Event::MeasureAgain => self.measure_again(),
            Event::Restarted => self.restarted(),
            Event::AdvantagesComputed { group, result } => self.advantages_computed(group, result),
            Event::TeacherScored { group, result } => self.teacher_scored(group, result),
            Event::Tick => {}
            Event::ShutdownRequested { reason } => self.end(Effect::Finished { reason }),
        }
    }

    fn request_dropped(&mut self, request: RequestId) {
        if self.forget_lease_request(request).is_some() {
            return;
        }
        match self.batches.requests.remove(&request) {
            Some(waiting) => {
                self.deadlines.clear(waiting.deadline, Due::Batch(request));
                if self.batches.requests.is_empty() {
                    self.trainer.waiting_since = None;
                }
            }
            // It was answered while the requester hung up.
            None => self.ignore("request_dropped of an answered request"),
        }
    }
}
