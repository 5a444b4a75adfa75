//! What engines do in a simulation.

use super::Simulator;
use super::actors::{Action, Engine};
use super::batching::{Request, Sampled};
use super::restarts::SOON;
use crate::Duration;
use crate::event::Event;
use crate::ids::*;

impl Simulator {
    pub(super) fn engine_starts(&mut self, id: EngineId, life: u32) {
        let engine = self.engines.entry(id).or_default();
        if engine.dead_for_good || engine.life != life {
            return;
        }
        if self.chance(self.scenario.faults.engine_dies) {
            let after = self.spread(1.0, 60.0);
            self.plan(after, Action::EngineDies(id, life));
        }
        let slow = self.message_fault(self.scenario.faults.engine_slow);
        let (model, seed) = (self.scenario.engine_model, self.scenario.seed);
        let engine = self.engines.entry(id).or_default();
        engine.slow = slow;
        engine
            .batching
            .get_or_insert_with(|| model.make(seed, slow));
        self.plan(Duration::from_secs(1), Action::EngineReports(id, life));
        self.send(Event::EngineJoined {
            engine: id,
            url: format!("http://engine-{id}"),
        });
    }

    pub(super) fn engine_reports(&mut self, id: EngineId, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it started");
        let inside = engine.batching.as_mut().filter(|_| engine.life == life);
        let Some(load) = inside.and_then(|inside| inside.report()) else {
            return;
        };
        self.plan(Duration::from_secs(1), Action::EngineReports(id, life));
        self.send(Event::EngineLoad { engine: id, load });
    }

    /// Gives an engine something to do, and comes back when it has something to tell.
    pub(super) fn with_engine(&mut self, id: EngineId, act: impl FnOnce(&mut Engine)) {
        let Some(engine) = self.engines.get_mut(&id) else {
            return;
        };
        act(engine);
        let next = engine.batching.as_ref().and_then(|inside| inside.next());
        if next == engine.looked_at {
            return;
        }
        engine.looked_at = next;
        if let Some(at) = next {
            self.plan(at.since(self.now), Action::EngineWorks(id, at));
        }
    }

    pub(super) fn submit(&mut self, id: EngineId, request: Request) {
        let now = self.now;
        self.with_engine(id, |engine| {
            let inside = engine.batching.as_mut().expect("it serves");
            inside.submit(request, now);
        });
    }

    /// As the gateway does when a rollout is over.
    pub(super) fn abort_request(&mut self, rollout: RolloutId) {
        if let Some(asked) = self.asked.remove(&rollout) {
            let now = self.now;
            self.with_engine(asked.engine, |engine| {
                if let Some(inside) = &mut engine.batching {
                    inside.abort(rollout, now);
                }
            });
        }
    }

    pub(super) fn engine_works(&mut self, id: EngineId, at: crate::Time) {
        if self.engines[&id].looked_at != Some(at) {
            return;
        }
        let mut ended = Vec::new();
        self.with_engine(id, |engine| {
            engine.looked_at = None;
            if let Some(inside) = &mut engine.batching {
                ended = inside.advance(at);
            }
        });
        for Sampled { rollout, versions } in ended {
            // One may end the rollout of another.
            if let Some(asked) = self.asked.remove(&rollout) {
                self.end_turn(rollout, asked, versions);
            }
        }
        self.load_if_still(id);
    }

    pub(super) fn engine_updates(&mut self, id: EngineId, version: PolicyVersion) {
        let now = self.now;
        self.with_engine(id, |engine| {
            assert!(engine.told.is_none(), "one update at a time");
            engine.told = Some(version);
            engine.loads = false;
            if let Some(inside) = &mut engine.batching {
                inside.pause(now);
            }
        });
        self.load_if_still(id);
    }

    fn load_if_still(&mut self, id: EngineId) {
        let engine = self.engines.get_mut(&id).expect("it exists");
        let still = engine
            .batching
            .as_ref()
            .is_some_and(|inside| inside.stands_still());
        let (Some(version), false, true) = (engine.told, engine.loads, still) else {
            return;
        };
        engine.loads = true;
        let life = engine.life;
        let after = self.spread(0.1, 1.5);
        let action = match self.chance(self.scenario.faults.engine_fails) {
            true => Action::EngineDies(id, life),
            false => Action::EngineLoaded(id, version, life),
        };
        self.plan(after, action);
    }

    pub(super) fn engine_loaded(&mut self, id: EngineId, version: PolicyVersion, life: u32) {
        if self.engines[&id].life != life {
            return;
        }
        let now = self.now;
        self.with_engine(id, |engine| {
            engine.serves = Some(version);
            engine.told = None;
            let inside = engine.batching.as_mut().expect("it loaded");
            inside.load(version, now);
        });
        self.send(Event::EngineProved {
            engine: id,
            version,
        });
    }

    pub(super) fn engine_dies(&mut self, id: EngineId, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it lived");
        if engine.life != life {
            return;
        }
        engine.ends();
        engine.batching = None;
        engine.looked_at = None;
        self.ask_again(Some(id));
        let after = self.spread(0.5, 10.0);
        self.plan(after, Action::EngineStarts(id, life + 1));
        self.send(Event::EngineLost {
            engine: id,
            reason: "connection refused".to_owned(),
        });
    }

    /// The orchestrator is gone, with whatever it had asked engines for and told them. Returns those that run, and
    /// their lives.
    pub(super) fn lose_engines(&mut self) -> Vec<(EngineId, u32)> {
        self.ask_again(None);
        let running = self
            .engines
            .iter_mut()
            .filter(|(_, engine)| engine.batching.is_some());
        running
            .map(|(id, engine)| {
                engine.ends();
                (*id, engine.life)
            })
            .collect()
    }

    /// What `engine`, or any, was asked for it does not answer any more: the agent's request starts over.
    fn ask_again(&mut self, engine: Option<EngineId>) {
        let of_it = |id: EngineId| engine.is_none_or(|engine| engine == id);
        let asked = self.asked.iter().filter(|(_, asked)| of_it(asked.engine));
        let lost: Vec<(RolloutId, WorkerId)> = asked
            .map(|(rollout, asked)| (*rollout, asked.worker))
            .collect();
        for (rollout, worker) in lost {
            self.abort_request(rollout);
            self.plan(SOON, Action::BeginTurn(worker, rollout));
        }
    }
}
