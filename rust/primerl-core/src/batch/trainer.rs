//! The trainer: asks for batches, reports checkpoints, and resumes from them.

use super::BatchRequest;
use crate::Core;
use crate::deadlines::Due;
use crate::effect::Effect;
use crate::ids::*;
use crate::time::Time;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Trainer {
    pub last_seen: Option<Time>,
    pub waiting_since: Option<Time>,
}

impl Core {
    pub(crate) fn batch_requested(&mut self, request: RequestId, step: Step, rank: u32) {
        let deadline = self.now + self.config.timeouts.long_poll;
        let asked = BatchRequest {
            step,
            rank,
            deadline,
        };
        if self.takes_batch_request(request, asked) {
            self.deadlines.set(deadline, Due::Batch(request));
            self.trainer.waiting_since.get_or_insert(self.now);
        }
    }

    pub(crate) fn next_batch_requested(&mut self, request: RequestId, step: Step, rank: u32) {
        let asked = BatchRequest {
            step,
            rank,
            deadline: self.now,
        };
        if self.takes_batch_request(request, asked) {
            self.batch_poll_ended(request);
        }
    }

    /// Whether the rank may have that batch; answers the request if not.
    fn takes_batch_request(&mut self, request: RequestId, asked: BatchRequest) -> bool {
        let BatchRequest { step, rank, .. } = asked;
        self.trainer.last_seen = Some(self.now);
        if self.ending.finished.is_some() || step.0 > self.config.run.max_steps {
            self.effects.push(Effect::NoMoreBatches { request });
            return false;
        }
        if let Some(why) = self.refuses_batch(step, rank) {
            self.warn(format!(
                "data rank {rank} asked for the batch of step {step}, which it cannot have: {why}"
            ));
            self.effects.push(Effect::NoMoreBatches { request });
            return false;
        }
        self.batches.requests.insert(request, asked);
        true
    }

    fn refuses_batch(&self, step: Step, rank: u32) -> Option<String> {
        let data_ranks = self.config.run.data_ranks;
        if rank >= data_ranks {
            return Some(format!("there are {data_ranks} data ranks, counted from 0"));
        }
        if step.0 == 0 {
            return Some("steps are counted from 1".to_owned());
        }
        (step < self.batches.kept_from()).then(|| self.why_batch_gone())
    }

    pub(crate) fn answer_batch_requests(&mut self) {
        if self.batches.requests.is_empty() {
            return;
        }
        let waiting: Vec<RequestId> = self.batches.requests.keys().copied().collect();
        for request in waiting {
            let asked = self.batches.requests[&request];
            let effect = if self.ending.finished.is_some() {
                Effect::NoMoreBatches { request }
            } else {
                if asked.step >= self.next_step {
                    continue;
                }
                self.batches.fetched(asked.step);
                Effect::Batch {
                    request,
                    rank: asked.rank,
                    step: asked.step,
                }
            };
            self.batches.requests.remove(&request);
            self.deadlines.clear(asked.deadline, Due::Batch(request));
            self.trainer.waiting_since = None;
            self.effects.push(effect);
        }
        if self.batches.requests.is_empty() && self.ending.finished.is_some() {
            self.trainer.waiting_since = None;
        }
    }

    pub(crate) fn batch_written(&mut self, step: Step, checksums: Vec<u64>) {
        if step >= self.next_step {
            return self.ignore("batch_written of a step that was not cut");
        }
        self.batches.written(step, checksums);
    }

    /// Tells the shell which batches no trainer will ask for.
    pub(crate) fn forget_batches(&mut self) {
        let before = self.batches.kept_from();
        self.ledger.forget_before(before.trains());
        self.effects.push(Effect::ForgetBatches { before });
    }

    pub(crate) fn batch_poll_ended(&mut self, request: RequestId) {
        let Some(asked) = self.batches.requests.get(&request).copied() else {
            return;
        };
        self.cut_batches();
        self.answer_batch_requests();
        if self.batches.requests.remove(&request).is_some() {
            let waiting_for = self.words(self.step_wait(asked.step));
            self.effects.push(Effect::BatchNotReady {
                request,
                waiting_for,
            });
        }
    }

    /// Why a trainer cannot resume after `step`.
    pub fn refuses_resume(&self, step: Step) -> Option<String> {
        if step.next() < self.batches.kept_from() {
            return Some(self.why_batch_gone());
        }
        (step >= self.next_step).then(|| {
            let last = self.next_step.0 - 1;
            format!("the trainer would resume after step {step}, but only {last} steps were cut")
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
             long; resume from a checkpoint of step {} or later, or begin a new run",
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
}
