//! What engines do in a simulation.

use super::Simulator;
use super::actors::Action;
use crate::admission::EngineLoad;
use crate::event::Event;
use crate::ids::*;

impl Simulator {
    pub(super) fn engine_starts(&mut self, id: EngineId) {
        let engine = self.engines.entry(id).or_default();
        if engine.dead_for_good {
            return;
        }
        engine.runs = true;
        let life = engine.life;
        if self.chance(self.scenario.faults.engine_dies) {
            let after = self.spread(1.0, 60.0);
            self.plan(after, Action::EngineDies(id, life));
        }
        let slow = self.message_fault(self.scenario.faults.engine_slow);
        self.engines.entry(id).or_default().slow = slow;
        self.plan(
            crate::Duration::from_secs(1),
            Action::EngineReports(id, life),
        );
        self.send(Event::EngineJoined {
            engine: id,
            url: format!("http://engine-{id}"),
        });
    }

    pub(super) fn engine_reports(&mut self, id: EngineId, life: u32) {
        let engine = &self.engines[&id];
        let (Some(capacity), true) = (self.scenario.engine_capacity, engine.life == life) else {
            return;
        };
        let running = engine.requests.min(capacity);
        let load = EngineLoad {
            running,
            waiting: engine.requests - running,
            kv_cache_usage: f64::from(running) / f64::from(capacity),
            preemptions: 0,
        };
        self.plan(
            crate::Duration::from_secs(1),
            Action::EngineReports(id, life),
        );
        self.send(Event::EngineLoad { engine: id, load });
    }

    pub(super) fn engine_updates(&mut self, id: EngineId, version: PolicyVersion) {
        let life = self.engines[&id].life;
        let after = self.spread(0.1, 1.5);
        let action = match self.chance(self.scenario.faults.engine_fails) {
            true => Action::EngineDies(id, life),
            false => Action::EngineLoaded(id, version, life),
        };
        self.plan(after, action);
    }

    pub(super) fn engine_loaded(&mut self, id: EngineId, version: PolicyVersion, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it was told to load");
        if engine.life == life {
            engine.serves = Some(version);
            self.send(Event::EngineProved {
                engine: id,
                version,
            });
        }
    }

    pub(super) fn engine_dies(&mut self, id: EngineId, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it lived");
        if engine.life != life {
            return;
        }
        engine.life += 1;
        engine.runs = false;
        engine.serves = None;
        engine.requests = 0;
        let after = self.spread(0.5, 10.0);
        self.plan(after, Action::EngineStarts(id));
        self.send(Event::EngineLost {
            engine: id,
            reason: "connection refused".to_owned(),
        });
    }

    /// The orchestrator is gone, and whatever an engine was told is told anew. Returns those that run.
    pub(super) fn lose_engines(&mut self) -> Vec<EngineId> {
        let is_instant = self.disk.is_instant();
        let mut running = Vec::new();
        for (id, engine) in self.engines.iter_mut().filter(|(_, engine)| engine.runs) {
            engine.life += 1;
            engine.serves = None;
            if !is_instant {
                engine.requests = 0;
            }
            running.push(*id);
        }
        running
    }
}
