//! What the trainer does in a simulation.

use super::Simulator;
use super::actors::Action;
use super::process::Reply;
use crate::event::Event;
use crate::ids::*;
use crate::time::Duration;

impl Simulator {
    pub(super) fn trainer_asks(&mut self, step: Step, rank: u32, life: u32) {
        if self.trainer.dead || self.trainer.life != life {
            return;
        }
        if self.trainer.held.remove(&(step, rank)) {
            if !self.is_answered(rank) {
                self.trainer_has(rank);
            }
            return;
        }
        let times = match self.message_fault(self.scenario.faults.message_repeated) {
            true => 2,
            false => 1,
        };
        for _ in 0..times {
            let request = self.new_request();
            self.trainer.requests.insert(request, rank);
            self.send(Event::BatchRequested {
                request,
                step,
                rank,
            });
        }
    }

    pub(super) fn trainer_asks_ahead(&mut self, step: Step, rank: u32, life: u32) {
        if self.trainer.dead || self.trainer.life != life {
            return;
        }
        let request = self.new_request();
        self.trainer.asked_ahead.insert(request, (step, rank));
        self.send(Event::NextBatchRequested {
            request,
            step,
            rank,
        });
    }

    pub(super) fn trainer_asks_again(&mut self, request: RequestId) {
        self.trainer.asked_ahead.remove(&request);
        // A trainer that died since does not ask again.
        if let Some(rank) = self.trainer.requests.remove(&request)
            && !self.is_answered(rank)
        {
            self.trainer_repeats(rank);
        }
    }

    /// Whether the trainer has all it asked for, or a repeated request of the same rank still waits: one answer is
    /// enough.
    pub(super) fn is_answered(&self, rank: u32) -> bool {
        self.trainer.works || self.trainer.requests.values().any(|other| *other == rank)
    }

    pub(super) fn trainer_repeats(&mut self, rank: u32) {
        let (step, life) = (Step(self.trainer.step), self.trainer.life);
        self.plan(Duration(1_000), Action::TrainerAsks(step, rank, life));
    }

    pub(super) fn trainer_gets(&mut self, request: RequestId) {
        if let Some(ahead) = self.trainer.asked_ahead.remove(&request) {
            self.trainer.held.insert(ahead);
            return;
        }
        let Some(rank) = self.trainer.requests.remove(&request) else {
            return;
        };
        if self.is_answered(rank) {
            return;
        }
        let dies = self.scenario.faults.trainer_dies;
        if dies > 0.0 && self.chance(dies) {
            return self.trainer_dies();
        }
        if self.chance(self.scenario.faults.trainer_forgets) {
            return self.trainer_repeats(rank);
        }
        self.trainer_has(rank);
    }

    fn trainer_has(&mut self, rank: u32) {
        self.trainer.fetched.insert(rank);
        if self.trainer.fetched.len() == self.scenario.config.run.data_ranks as usize {
            self.trainer.fetched.clear();
            self.trainer.works = true;
            let after = self.spread(0.5, 6.0);
            let version = PolicyVersion(self.trainer.step);
            self.plan(after, Action::TrainerPublishes(version, self.trainer.life));
            for rank in 0..self.scenario.config.run.data_ranks {
                let after = self.spread(0.1, 3.0);
                let next = Step(self.trainer.step + 1);
                let asks = Action::TrainerAsksAhead(next, rank, self.trainer.life);
                self.plan(after, asks);
            }
        }
    }

    pub(super) fn trainer_publishes(&mut self, version: PolicyVersion, life: u32) {
        if self.trainer.dead || self.trainer.life != life {
            return;
        }
        self.trainer.step = version.0 + 1;
        self.trainer.works = false;
        let manifest = format!("step_{version}/manifest.json");
        let digest = format!("{version:0>24}{life:0>8}");
        let digest = self.trainer.digests.entry(version).or_insert(digest);
        let digest = digest.clone();
        let refusal = self.core.refuses_weights(version, &digest);
        assert_eq!(refusal, None, "version {version} is due");
        let event = Event::WeightsPublished {
            version,
            manifest,
            digest,
        };
        self.ask(event, Reply::Published(version, life));
    }

    pub(super) fn weights_accepted(&mut self, version: PolicyVersion, life: u32) {
        self.witness.accepts_weights(version);
        if self.trainer.life != life {
            return;
        }
        for rank in 0..self.scenario.config.run.data_ranks {
            let after = self.spread(0.01, 0.1);
            let asks = Action::TrainerAsks(Step(version.0 + 1), rank, life);
            self.plan(after, asks);
        }
        self.trainer_saves(version);
    }

    pub(super) fn trainer_dies(&mut self) {
        self.trainer.life += 1;
        self.trainer.requests.clear();
        self.trainer.asked_ahead.clear();
        self.trainer.held.clear();
        self.trainer.fetched.clear();
        self.trainer.works = false;
        let saved = PolicyVersion(self.trainer.checkpoint);
        self.trainer.digests.retain(|version, _| *version <= saved);
        let after = self.spread(0.5, 10.0);
        self.plan(after, Action::TrainerStarts);
    }

    pub(super) fn trainer_starts(&mut self) {
        let step = Step(self.trainer.checkpoint);
        let refusal = self.core.refuses_resume(step);
        assert_eq!(refusal, None, "the trainer can resume after step {step}");
        self.ask(Event::TrainerResumed { step }, Reply::Resumed(step));
    }

    pub(super) fn resume_accepted(&mut self, step: Step) {
        let life = self.trainer.life;
        let after = self.spread(0.1, 1.0);
        self.plan(after, Action::TrainerPublishes(PolicyVersion(step.0), life));
    }

    /// After every other step.
    fn trainer_saves(&mut self, version: PolicyVersion) {
        if version.0 > 0 && version.0.is_multiple_of(2) {
            self.trainer.checkpoint = version.0;
            let step = Step(version.0);
            let refusal = self.core.refuses_checkpoint(step);
            assert_eq!(refusal, None, "step {step} was published");
            self.send(Event::CheckpointSaved { step });
        }
    }
}
