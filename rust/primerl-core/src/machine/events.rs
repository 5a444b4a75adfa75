//! One function an event: what it changes by itself. What follows from it is decided in `settle`.

use crate::Core;
use crate::admission::EngineLoad;
use crate::batch::BatchRequest;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::event::Event;
use crate::ids::*;
use crate::policy::Published;
use crate::time::Time;

impl Core {
    pub(crate) fn take_in(&mut self, event: Event) {
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

    fn environment_ready(&mut self, environment: EnvironmentId, examples: u32, whole_groups: bool) {
        let Some(site) = self.sites.get_mut(environment.0 as usize) else {
            return self.ignore("environment_ready of an unknown environment");
        };
        match site.examples {
            None if examples == 0 => {
                let name = self.name(environment).to_owned();
                self.warn(format!("environment {name:?} listed no examples; it is not used until a worker lists some"));
            }
            None => {
                site.examples = Some(examples);
                site.whole_groups = whole_groups;
                self.curriculum.set_examples(environment, examples);
            }
            Some(known) if known != examples => {
                let name = self.name(environment).to_owned();
                self.warn(format!(
                    "a worker of environment {name:?} lists {examples} examples where the first one listed {known}: \
                     workers of one environment must load the same data; the first number is kept"
                ));
            }
            Some(_) if site.whole_groups != whole_groups => {
                let kept = site.whole_groups;
                let name = self.name(environment).to_owned();
                self.warn(format!(
                    "a worker of environment {name:?} says whole_groups = {whole_groups}, the first one said {kept}: \
                     workers of one environment must agree; the first word is kept"
                ));
            }
            Some(_) => {}
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

    fn batch_requested(&mut self, request: RequestId, step: Step, rank: u32) {
        let deadline = self.now + self.config.timeouts.long_poll;
        if self.takes_batch_request(request, step, rank, deadline) {
            self.deadlines.set(deadline, Due::Batch(request));
            self.trainer.waiting_since.get_or_insert(self.now);
        }
    }

    fn next_batch_requested(&mut self, request: RequestId, step: Step, rank: u32) {
        if self.takes_batch_request(request, step, rank, self.now) {
            self.batch_poll_ended(request);
        }
    }

    /// Whether the rank may have that batch; answers the request if not.
    fn takes_batch_request(
        &mut self,
        request: RequestId,
        step: Step,
        rank: u32,
        deadline: Time,
    ) -> bool {
        self.trainer.last_seen = Some(self.now);
        if self.finished.is_some() || step.0 > self.config.max_steps {
            self.effects.push(Effect::NoMoreBatches { request });
            return false;
        }
        let refusal = if rank >= self.config.data_ranks {
            Some(format!(
                "there are {} data ranks, counted from 0",
                self.config.data_ranks
            ))
        } else if step.0 == 0 {
            Some("steps are counted from 1".to_owned())
        } else if step < self.batches.kept_from() {
            Some(self.why_batch_gone())
        } else {
            None
        };
        if let Some(why) = refusal {
            self.warn(format!(
                "data rank {rank} asked for the batch of step {step}, which it cannot have: {why}"
            ));
            self.effects.push(Effect::NoMoreBatches { request });
            return false;
        }
        let asked = BatchRequest {
            step,
            rank,
            deadline,
        };
        self.batches.requests.insert(request, asked);
        true
    }

    fn weights_published(&mut self, version: PolicyVersion, published: Published) {
        self.trainer.last_seen = Some(self.now);
        match self.refuses_weights(version, &published.digest) {
            Some(why) => self.warn(format!("{why}; the weights are not used")),
            None => {
                if self.ledger.publish(version, published) {
                    self.warn(format!(
                        "the trainer computed version {version} again and came to other weights; engines load these"
                    ));
                    self.evaluate_anew(version);
                }
            }
        }
    }

    fn engine_joined(&mut self, engine: EngineId, url: String) {
        self.ledger.join(engine, url);
        let limit = self.limits.join(engine, &self.config.admission);
        self.limits.add_up(&self.ledger);
        self.effects.push(Effect::LimitEngine { engine, limit });
    }

    fn engine_reported(&mut self, engine: EngineId, load: EngineLoad) {
        if self.limits.get(engine).is_none() {
            return self.ignore("load of an unknown engine");
        }
        let (in_flight, admission) = (self.rollouts.len(), &self.config.admission);
        if let Some(limit) = self.limits.report(engine, load, in_flight, admission) {
            self.limits.add_up(&self.ledger);
            self.effects.push(Effect::LimitEngine { engine, limit });
        }
    }

    fn engine_proved(&mut self, engine: EngineId, version: PolicyVersion) {
        if !self.ledger.prove(engine, version) {
            self.warn(format!(
                "engine {engine} proved version {version}, but the engine never joined or the version was never \
                 published: it is not used"
            ));
        }
        self.limits.add_up(&self.ledger);
    }

    fn engine_lost(&mut self, engine: EngineId, reason: String) {
        if self.ledger.lose(engine, reason.clone()) {
            self.warn(format!("engine {engine} is out of rotation: {reason}"));
        } else {
            self.ignore("engine_lost of an unknown engine");
        }
        self.limits.add_up(&self.ledger);
    }
}
