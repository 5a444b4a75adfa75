//! Restarts: of the orchestrator, from its journal, and of the trainer, from its checkpoint.

use super::Simulator;
use super::actors::Action;
use crate::event::Event;
use crate::ids::*;

impl Simulator {
    pub(super) fn plan_restart(&mut self) {
        let probability = self.scenario.faults.orchestrator_dies;
        if probability > 0.0 && self.chance(probability) {
            let after = self.spread(1.0, 40.0);
            self.plan(after, Action::OrchestratorRestarts);
        }
    }

    /// The core is made anew from what is on disk, and must be the one that died. Everyone else lives on, and finds
    /// their requests unanswered.
    pub(super) fn restart(&mut self) {
        let mut core = self.snapshot.clone();
        for (now, event) in self.journal.drain(..) {
            core.handle(event, now);
        }
        let (replayed, died) = (core.fingerprint(), self.core.fingerprint());
        assert!(
            replayed == died,
            "a replay of the journal gives another core: {}",
            first_difference(&replayed, &died)
        );
        self.core = core;
        self.snapshot = self.core.clone();
        for (request, worker) in std::mem::take(&mut self.lease_requests) {
            self.observer.forget_request(request);
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.asking = false;
            }
            self.plan(crate::Duration(1_000), Action::AskForLease(worker));
        }
        for (request, rank) in std::mem::take(&mut self.trainer.requests) {
            self.observer.forget_request(request);
            self.trainer_repeats(rank);
        }
        self.send(Event::Restarted);
        self.reach_engines();
        self.plan_restart();
    }

    /// Whatever an engine was told before, it is told anew.
    fn reach_engines(&mut self) {
        let mut running = Vec::new();
        for (id, engine) in self.engines.iter_mut().filter(|(_, engine)| engine.runs) {
            engine.life += 1;
            engine.serves = None;
            running.push(*id);
        }
        for engine in running {
            let after = self.spread(0.1, 1.0);
            self.plan(after, Action::EngineStarts(engine));
        }
    }

    pub(super) fn trainer_dies(&mut self) {
        self.trainer.life += 1;
        self.trainer.requests.clear();
        self.trainer.fetched.clear();
        self.trainer.works = false;
        let after = self.spread(0.5, 10.0);
        self.plan(after, Action::TrainerStarts);
    }

    pub(super) fn trainer_starts(&mut self) {
        let step = self.trainer.checkpoint;
        self.send(Event::TrainerResumed { step: Step(step) });
        let life = self.trainer.life;
        let after = self.spread(0.1, 1.0);
        self.plan(after, Action::TrainerPublishes(PolicyVersion(step), life));
    }

    /// After every other step.
    pub(super) fn trainer_saves(&mut self, version: PolicyVersion) {
        if version.0 > 0 && version.0.is_multiple_of(2) {
            self.trainer.checkpoint = version.0;
            self.send(Event::CheckpointSaved {
                step: Step(version.0),
            });
        }
    }
}

/// The surroundings of the first byte in which two texts differ.
fn first_difference(a: &str, b: &str) -> String {
    let at = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let around = |text: &str| {
        let bytes = &text.as_bytes()[at.saturating_sub(60)..(at + 60).min(text.len())];
        String::from_utf8_lossy(bytes).into_owned()
    };
    format!("{:?} against {:?}", around(a), around(b))
}
