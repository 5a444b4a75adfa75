//! The trainer: asks for a step's batch, works on it, publishes, asks for the next.

use super::{Action, World};
use crate::tracks::Doing;
use primerl_core::admission::last_step;
use primerl_core::pack::PackedBatch;
use primerl_core::*;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Trainer {
    /// The step it asks for or works on.
    step: u64,
    requests: BTreeMap<RequestId, u32>,
    ranks_served: u32,
    /// Tokens of the fullest rank of each step that was cut and not fetched.
    fullest: BTreeMap<Step, usize>,
    /// What it waits for, if it waits.
    pub waits: Option<Doing>,
    doing: Option<Doing>,
    /// What was noted last.
    noted: Doing,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            step: 0,
            requests: BTreeMap::new(),
            ranks_served: 0,
            fullest: BTreeMap::new(),
            waits: None,
            doing: Some(Doing::Publishing),
            noted: Doing::Start,
        }
    }
}

/// Kinds of what a rollout in flight does.
pub(crate) const IN_FLIGHT: [Doing; 5] = [
    Doing::Sampling,
    Doing::Queued,
    Doing::Environment,
    Doing::WorkerCpu,
    Doing::WeightUpdate,
];

impl World {
    pub(super) fn published(&mut self, version: PolicyVersion) {
        self.send(Event::WeightsPublished {
            version,
            manifest: String::new(),
            digest: String::new(),
        });
        self.trainer.step = version.0 + 1;
        self.trainer.doing = None;
        if self.trainer.step > self.plan.max_steps {
            self.trainer.doing = Some(Doing::RunEnd);
            return;
        }
        for rank in 0..self.plan.data_ranks {
            self.trainer_asks(rank);
        }
    }

    fn trainer_asks(&mut self, rank: u32) {
        let request = self.new_request();
        self.trainer.requests.insert(request, rank);
        self.send(Event::BatchRequested {
            request,
            step: Step(self.trainer.step),
            rank,
        });
    }

    pub(super) fn trainer_asks_again(&mut self, request: RequestId) {
        if let Some(rank) = self.trainer.requests.remove(&request) {
            self.trainer_asks(rank);
        }
    }

    pub(super) fn trainer_gets(&mut self, rank: u32, step: Step) {
        self.trainer.requests.retain(|_, asked| *asked != rank);
        self.trainer.ranks_served += 1;
        if self.trainer.ranks_served < self.plan.data_ranks {
            return;
        }
        self.trainer.ranks_served = 0;
        self.trainer.doing = Some(Doing::Working);
        let fullest = self.trainer.fullest.remove(&step).unwrap_or(0);
        let trainer = &self.plan.trainer;
        let seconds = trainer.step_s + trainer.step_per_token_s * fullest as f64;
        self.plan_after(seconds, Action::TrainerDone(step));
    }

    pub(super) fn trainer_done(&mut self, step: Step) {
        self.trainer.doing = Some(Doing::Publishing);
        let version = PolicyVersion(step.0);
        self.plan_after(self.plan.trainer.publish_s, Action::Published(version));
    }

    pub(super) fn batch_cut(&mut self, batch: &PackedBatch) {
        self.steps_cut = batch.step.0;
        let ranks = batch.ranks.iter();
        let tokens = ranks.map(|rank| rank.iter().map(|part| part.len()).sum::<usize>());
        self.trainer
            .fullest
            .insert(batch.step, tokens.max().unwrap_or(0));
        self.measured.cuts.push(self.now);
        self.ended_at_last_cut = self.core.counters().ended();
        self.measured.trained_tokens += batch.loss_tokens;
        for (name, value) in &batch.metrics {
            if let Some(Ok(steps)) = name.strip_prefix("staleness/").map(str::parse) {
                *self.measured.staleness.entry(steps).or_default() += *value as u64;
            }
        }
    }

    /// What the trainer does now, and what the rollouts do it may wait for.
    pub(super) fn note_trainer(&mut self) {
        let asked = Some(Step(self.trainer.step));
        let waits_for = match last_step(self.core.config(), self.proved) < asked {
            true => Doing::WeightUpdate,
            false => Doing::Rollouts,
        };
        let doing = match self.proved {
            None => Doing::Start,
            Some(_) => self.trainer.doing.unwrap_or(waits_for),
        };
        let waits = self.trainer.doing.is_none().then_some(doing);
        let now = self.now;
        let measured = &mut self.measured;
        let before = std::mem::replace(&mut self.trainer.noted, doing);
        measured.trainer.change(before, doing, now);
        if waits == self.trainer.waits {
            return;
        }
        self.trainer.waits = waits;
        for kind in IN_FLIGHT {
            let count = match waits == Some(Doing::Rollouts) {
                true => measured.slots.count(kind),
                false => 0,
            };
            measured.while_waiting.set(kind, count, now);
        }
    }
}
